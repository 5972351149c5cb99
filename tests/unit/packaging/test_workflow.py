# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The workflow of a public repository uses existing targets of the Makefile. ``make lint`` checks its form."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Iterator, List

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
MAKEFILE = ROOT / "Makefile"
# Only the source tree has both, not the installed collection.
pytestmark = pytest.mark.skipif(not WORKFLOW.exists(), reason="only in the source tree")


def commands() -> Iterator[List[str]]:
    """Yield the words of each command that the workflow runs."""
    for job in yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"].values():
        for step in job["steps"]:
            for command in re.split(r"&&|\n", step.get("run", "")):
                yield shlex.split(command)


def targets() -> List[str]:
    return re.findall(r"^([a-z][a-z-]*):", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_target_and_program_exists() -> None:
    called = []
    for words in commands():
        if "make" in words and "install" not in words:
            for word in words[words.index("make") + 1 :]:
                called += word.partition("=")[2].split() if word.startswith("STEPS=") else [word]
        elif words and words[0].startswith(".ci/"):
            assert (ROOT / words[0]).exists()
    assert {"unit", "test", "test-full", "lint", "pythons"} <= set(called) <= set(targets())


def test_the_nodes_python_is_a_supported_one() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    assert [row["node"] for row in jobs["red-hat"]["strategy"]["matrix"]["include"]] == ["3.9", "3.12"]
