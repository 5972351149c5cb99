# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command blocks of the documentation, for the test that runs them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT

#: A block contains commands if its first line that is not a comment begins with one of these words, or with one of the
#: programs in .ci/programs.
PROGRAMS = (
    ".venv/bin/python",
    "ansible",
    "ansible-galaxy",
    "ansible-inventory",
    "ansible-navigator",
    "ansible-playbook",
    "ansible-rulebook",
    "cp",
    "docker",
    "export",
    "go",
    "helm",
    "jq",
    "kubectl",
    "kubenode-proxy",
    "make",
    "mkdir",
    "pip",
    "python",
    "sudo",
    "systemctl",
    "tar",
    "tests/conformance/lab",
    "unshare",
)
#: Blocks of commands that no shell runs, by their beginning, and why.
#: tests/unit/documentation/test_commands.py checks what it can of them.
NOT_RUN = {
    "$ kubenode-proxy ": "a session with its output; tests/unit has the tests of these commands' texts",
    "KUBECONFIG=~/.kube/config ansible-rulebook ": "ansible-rulebook needs Java; tests/unit/eda runs the event source",
    "tests/conformance/lab ": "ten minutes; make conformance FULL=1 runs these",
    "CGO_ENABLED=0 go build ": "needs a source tree of Kubernetes; tests/e2e names what is missing",
    "iptables -I DOCKER-USER ": "the node has no Docker; tests/kernel/test_neighbours.py adds the same rules",
    "ip route add local ": "for a container in userspace mode; tests/kernel/test_userspace_rungs.py does the same",
    "nft list set inet kubenode-network-policy ": "no policies here; tests/kernel/test_network_policy.py lists it",
    "mkdir -p /tmp/agent-node; ": "interactive; a test in tests/modules/test_documented_commands.py types its lines",
}
_PROMPT = "$ "
_ASSIGNMENTS = re.compile(r"(\w+=\S* )+")
_INDENT = "    "
_LIST = re.compile(r"\s*([-*]|\d+\.) ")


class Block(NamedTuple):
    """A block of lines on a page, without their indent; ``line`` is the number of the first one."""

    page: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        """Return page and line, as in ``README.md:40``."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_commands(self) -> bool:
        """Return whether the block consists of shell commands."""
        lines = (line for line in self.text.splitlines() if line and not line.startswith("#"))
        first = _ASSIGNMENTS.sub("", next(lines, "").removeprefix(_PROMPT), count=1)
        return first.split(" ")[0] in known_programs()

    @property
    def why_not_run(self) -> str:
        """Return why no shell runs the block; empty text if one does."""
        return next((reason for start, reason in NOT_RUN.items() if self.text.startswith(start)), "")

    @property
    def is_playbook(self) -> bool:
        """Return whether the block is a playbook."""
        return self.text.startswith(("- hosts:", "- ansible.builtin.import_playbook:"))


@functools.cache
def known_programs() -> frozenset[str]:
    """Return the words that begin a command."""
    lines = (ROOT / ".ci" / "programs").read_text(encoding="ascii").splitlines()
    return frozenset((*PROGRAMS, *(line.split()[0] for line in lines if line and not line.startswith("#"))))


def blocks(page: Path) -> list[Block]:
    """Return the indented blocks of a page, without continued paragraphs of a list.

    In reStructuredText, each command has a prompt; it is not a part of the text.
    """
    prompt = _PROMPT if page.suffix == ".rst" else ""
    found: list[Block] = []
    current: list[str] = []
    start, in_list = 0, False
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), "end"], 1):
        if line.startswith(_INDENT) and not in_list:
            start = start or number
            current.append(line[len(_INDENT) :].removeprefix(prompt))
        elif not line.strip():
            if current:
                current.append("")
        else:
            if current:
                found.append(Block(page, start, "\n".join(current).rstrip()))
            current, start = [], 0
            in_list = bool(_LIST.match(line)) or (in_list and line.startswith(" "))
    return found


def command_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that consist of shell commands."""
    return [block for block in blocks(page) if block.is_commands]


def pages() -> list[Path]:
    """Return the pages that are written by hand and have blocks, README.md first."""
    patterns = (
        "docs/*.md",
        "docs/dev/*.md",
        "docs/docsite/rst/*.rst",
        "roles/*/README.md",
        "molecule/*/README.md",
        "examples/*/README.md",
    )
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


def playbook_blocks() -> list[Block]:
    """Return all playbooks of these pages."""
    return [block for page in pages() for block in blocks(page) if block.is_playbook]


def pages_with_commands() -> list[Path]:
    """Return the pages with commands that a shell can run, README.md first."""
    return [page for page in pages() if any(not block.why_not_run for block in command_blocks(page))]


def inventory_of_readme() -> str:
    """Return the inventory that README.md prints."""
    return next(block.text for block in blocks(ROOT / "README.md") if block.text.startswith("plugin: ")) + "\n"


def installation_of_ansible() -> str:
    """Return the command by which docs/operations.md installs Ansible on the controller."""
    return next(block.text for block in blocks(ROOT / "docs/operations.md") if "pip install ansible-core" in block.text)
