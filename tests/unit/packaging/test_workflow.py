# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The workflow of a public repository uses existing targets of the Makefile. ``make lint`` checks its form."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Iterator

import pytest
import yaml

from tests.unit.packaging.test_programs import ALWAYS, OTHERS, declared, programs_of

ROOT = Path(__file__).resolve().parents[3]
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
MAKEFILE = ROOT / "Makefile"
# Only the source tree has both, not the installed collection.
pytestmark = pytest.mark.skipif(not WORKFLOW.exists(), reason="only in the source tree")


PURPOSES = {
    "lint": ("all",),
    "kernel": ("all", "demo", "test"),
    "lab": ("all", "demo", "uml", "test", "guest"),
}
#: Of the commands that every Debian has, those that images of Red Hat do not have. Packages of other programs there.
NOT_IN_RED_HAT = {"cmp": "diffutils", "find": "findutils", "git": "git", "mount": "util-linux", "xargs": "findutils"}
RED_HAT = {**NOT_IN_RED_HAT, "ip": "iproute", "make": "make", "modprobe": "kmod", "python3": "python3"}


def jobs() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]


def words_of(job: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the words of each command that a job runs."""
    for step in job["steps"]:
        for command in re.split(r"&&|\n", step.get("run", "")):
            yield shlex.split(command)


def commands() -> Iterator[list[str]]:
    """Yield the words of each command that the workflow runs."""
    for job in jobs().values():
        yield from words_of(job)


def installed(job: dict[str, Any]) -> set[str]:
    """Return the packages that a job installs, without those of .ci/bootstrap."""
    packages: set[str] = set()
    for words in words_of(job):
        if "install" in words and {"dnf", "apt-get"} & set(words):
            packages |= {word for word in words[words.index("install") + 1 :] if not word.startswith("-")}
    return packages


def called_by(words: list[str]) -> list[str]:
    """Return the targets of the Makefile that a command calls, with the steps of ``make test``."""
    found: list[str] = []
    if "make" in words and "install" not in words:
        for word in words[words.index("make") + 1 :]:
            name, assignment, value = word.partition("=")
            found += (value.split() if name == "STEPS" else []) if assignment else [word]
    return found


def prerequisites() -> dict[str, list[str]]:
    """Return the targets of the Makefile, each with the words behind its colon."""
    text = MAKEFILE.read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z.][a-z -]*):([^=\n#]*)(?:#.*)?$", text, re.MULTILINE)
    return {target: words.split() for targets, words in rules for target in targets.split()}


def targets() -> list[str]:
    return [target for target in prerequisites() if not target.startswith(".")]


def needs_the_laboratory(target: str) -> bool:
    """Report whether a target needs ``setup-lab``, itself or by another target; ``test-full`` calls ``test``."""
    words = ["test"] if target == "test-full" else prerequisites()[target]
    return target == "setup-lab" or any(needs_the_laboratory(word) for word in words)


def purpose_of(job: dict[str, Any]) -> str:
    """Return the purpose with which a job calls .ci/bootstrap."""
    lines = list(words_of(job))
    if not any(needs_the_laboratory(target) for words in lines for target in called_by(words)):
        return "lint"
    return "kernel" if any("GUESTS=" in words for words in lines) else "lab"


def containers() -> list[str]:
    return [name for name, job in jobs().items() if "container" in job]


def test_every_target_and_program_exists() -> None:
    called: list[str] = []
    for words in commands():
        called += called_by(words)
        if words and words[0].startswith(".ci/"):
            assert (ROOT / words[0]).exists()
    assert {"unit", "test", "test-full", "lint", "pythons", "integration", "docsite"} <= set(called) <= set(targets())


def test_jobs_have_the_purpose_that_their_system_can_fulfil() -> None:
    assert {name: purpose_of(job) for name, job in jobs().items()} == {
        "checks": "lint",
        "collection": "lint",
        "nodes": "lab",
        "ubuntu": "kernel",
        "red-hat": "lint",
        "full": "lab",
    }


@pytest.mark.parametrize("name", containers())
def test_containers_have_what_bootstrap_does_not_install(name: str) -> None:
    """Debian's bootstrap installs the rest; elsewhere the job must install every program of its purpose."""
    job = jobs()[name]
    packages = installed(job)
    lines = list(words_of(job))
    assert {"git", "make"} <= packages
    if any("apt-get" in words for words in lines):
        return
    scripts = {".ci/bootstrap", *(words[0] for words in lines if words and words[0].startswith(".ci/"))}
    programs = set(declared(*PURPOSES[purpose_of(job)]))
    for script in scripts:
        programs |= programs_of(ROOT / script) & ({*ALWAYS.split()} | declared(*PURPOSES["lab"]))
    # The part of bootstrap for Debian, and what the image has.
    programs -= {"apt-get", *OTHERS.split(), *({*ALWAYS.split()} - set(NOT_IN_RED_HAT))}
    assert {RED_HAT[program] for program in programs} <= packages


@pytest.mark.parametrize("name", containers())
def test_containers_of_the_laboratory_can_run_containers(name: str) -> None:
    job = jobs()[name]
    if purpose_of(job) == "lint":
        return
    assert {"--privileged", "--cgroupns=host"} <= set(job["container"]["options"].split())
    assert "/var/lib/containers" in job["container"]["volumes"]


def test_the_nodes_python_is_a_supported_one() -> None:
    assert [row["node"] for row in jobs()["red-hat"]["strategy"]["matrix"]["include"]] == ["3.9", "3.12"]
