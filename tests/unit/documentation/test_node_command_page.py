# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tables of docs/node-command.md agree with the command line."""

from __future__ import annotations

import argparse
import re

from ansible_collections.kubenode.proxy.plugins.module_utils.command.cli import COMMANDS, make_parser
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "node-command.md"


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    text = PAGE.read_text(encoding="utf-8").split(heading, 1)[1].split("\n## ", 1)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def options() -> dict[str, set[str]]:
    """Return the commands of each option."""
    (subparsers,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    found: dict[str, set[str]] = {}
    for command, parser in subparsers.choices.items():
        for action in parser._actions:
            for option in action.option_strings:
                if option.startswith("--") and option != "--help":
                    found.setdefault(option, set()).add(command)
    return found


def test_every_command_is_in_the_table() -> None:
    shown = {name.split()[0] for row in rows("# The node command") for name in re.findall(r"`([^`]+)`", row[0])}
    assert shown == set(COMMANDS)


def test_every_option_is_in_the_table_with_its_commands() -> None:
    shown: dict[str, set[str]] = {}
    for names, commands, *_meaning in rows("## Options"):
        for option in re.findall(r"`(--[a-z-]+)", names):
            shown.setdefault(option, set()).update(text.split()[0] for text in re.findall(r"`([^`]+)`", commands))
    # They are what the table of commands is about.
    described = {"--check", "--diff", "--from", "--to", "--list", "--probe", "--store"}
    expected = {option: commands for option, commands in options().items() if option not in described}
    assert shown == expected
    table = " ".join(" ".join(row) for row in rows("# The node command"))
    assert sorted(option for option in described if f"{option}" not in table) == []
