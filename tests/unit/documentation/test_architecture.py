# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that architecture.md names every folder of the engine and part of the agent, and the glossary real files."""

from __future__ import annotations

import re

from tests.conftest import ROOT

ENGINE = ROOT / "plugins" / "module_utils"
#: The parts of the agent have a table of their own, in which paths are relative to this folder.
AGENT = "agent/"


def named(page: str) -> set[str]:
    """Return everything in backticks on a page."""
    return set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))


def test_every_folder_is_named():
    names = named("architecture.md")
    folders = {f"{path.parent.relative_to(ENGINE).as_posix()}/" for path in ENGINE.glob("*/**/*.py")}
    assert len(folders) > 40
    assert sorted(folder for folder in folders if not {folder, folder.replace(AGENT, "", 1)} & names) == []


def test_every_file_of_the_agent_is_named():
    names = named("architecture.md")
    files = {path.name for path in (ENGINE / AGENT).glob("*.py")} - {"__init__.py"}
    assert len(files) > 10
    assert sorted(file for file in files if not {file, AGENT + file} & names) == []


def test_files_of_the_glossary_exist():
    files = {name for name in named("glossary.md") if name.endswith(".py")}
    assert len(files) > 20
    assert sorted(file for file in files if not (ENGINE / file).is_file()) == []
