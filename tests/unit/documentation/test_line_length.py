# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prose wraps at 120 columns, so that it can be read, and its changes compared, in a terminal."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT

COLUMNS = 120
TOPS = ("docs", "examples", "molecule", "playbooks", "roles", "tests")
# Written by programs.
GENERATED = ("docs/modules/", "docs/variables.md", "CHANGELOG.md")


def pages() -> list[str]:
    """Return the Markdown files that people write."""
    places = [*ROOT.glob("*.md"), *(path for top in TOPS for path in (ROOT / top).rglob("*.md"))]
    names = sorted(path.relative_to(ROOT).as_posix() for path in places)
    return [name for name in names if not name.startswith(GENERATED)]


def long_lines(text: str) -> list[str]:
    """Return the lines of prose that are too long; tables, code, headings and images cannot be wrapped."""
    found, in_code = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif len(line) > COLUMNS and not in_code and not line.startswith(("    ", "|", "#", "![", "  |")):
            found.append(line)
    return found


@pytest.mark.parametrize("page", pages())
def test_prose_wraps(page):
    assert long_lines((ROOT / page).read_text(encoding="utf-8")) == []


def test_only_prose_is_measured():
    words = "word " * 40
    assert long_lines(f"{words}\n- {words}\n") == [words, f"- {words}"]
    assert long_lines(f"| {words} |\n# {words}\n    {words}\n```\n{words}\n```\n![{words}]\n") == []
