# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command blocks of the documentation, for the test that runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List, NamedTuple

from tests.conftest import ROOT

#: A block contains commands if its first line that is not a comment begins with one of these words.
PROGRAMS = (
    "ansible",
    "ansible-galaxy",
    "ansible-navigator",
    "ansible-playbook",
    "export",
    "jq",
    "kubectl",
    "kubenode-proxy",
    "make",
    "pip",
    "python3",
)
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
        return next(lines, "").split(" ")[0] in PROGRAMS

    @property
    def is_playbook(self) -> bool:
        """Return whether the block is a playbook."""
        return self.text.startswith(("- hosts:", "- ansible.builtin.import_playbook:"))


def blocks(page: Path) -> List[Block]:
    """Return the indented blocks of a Markdown page, without continued paragraphs of a list."""
    found: List[Block] = []
    current: List[str] = []
    start, in_list = 0, False
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), "end"], 1):
        if line.startswith(_INDENT) and not in_list:
            start = start or number
            current.append(line[len(_INDENT) :])
        elif not line.strip():
            if current:
                current.append("")
        else:
            if current:
                found.append(Block(page, start, "\n".join(current).rstrip()))
            current, start = [], 0
            in_list = bool(_LIST.match(line)) or (in_list and line.startswith(" "))
    return found


def command_blocks(page: Path) -> List[Block]:
    """Return the blocks of a page that consist of shell commands."""
    return [block for block in blocks(page) if block.is_commands]


def playbook_blocks() -> List[Block]:
    """Return all playbooks of README.md and of the pages in docs."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return [block for page in pages for block in blocks(page) if block.is_playbook]


def pages_with_commands() -> List[Path]:
    """Return README.md and the pages in docs that have such blocks, README.md first."""
    return [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if command_blocks(page)]
