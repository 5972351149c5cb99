# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one form in which modules, playbooks and the node command show what differs."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.command.result import change_lines
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import TableChange
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.results import difference_lines
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.tables import difference_entry

CHAIN = TableChange(
    table="IPv4 chains",
    added=0,
    replaced=1,
    removed=0,
    before=("-A X -j A", "-A X -j B"),
    after=("-A X -j B", "-A X -j C"),
    entries=("nat X",),
)
SERVERS = TableChange(
    table="IPv4 real servers", added=3, replaced=0, removed=0, before=(), after=("-a 1", "-a 2", "-a 3")
)
OF_CHAIN = [
    "--- before: IPv4 chains",
    "+++ after: IPv4 chains",
    "@@ -1,2 +1,2 @@",
    "--A X -j A",
    " -A X -j B",
    "+-A X -j C",
]
OF_SERVERS = [
    "--- before: IPv4 real servers",
    "+++ after: IPv4 real servers",
    "@@ -0,0 +1,3 @@",
    "+-a 1",
    "+-a 2",
    "+-a 3",
]


def test_the_playbook_and_the_node_command_show_the_same_diff() -> None:
    assert difference_lines([CHAIN, SERVERS], 0) == change_lines([CHAIN, SERVERS], True, True) == OF_CHAIN + OF_SERVERS
    assert difference_lines([], 0) == change_lines([], True, True) == []


@pytest.mark.parametrize(("limit", "left"), [(3, ["... and 1 more lines"]), (4, [])])
def test_only_a_limited_number_of_lines_is_shown(limit: int, left: list[str]) -> None:
    assert difference_lines([SERVERS], limit) == [*OF_SERVERS[: 2 + limit], *left]


def test_a_module_shows_a_rule_far_down_in_a_long_chain() -> None:
    rules = [f"-A X -j {number}" for number in range(500)]
    entry = difference_entry("IPv4 chains", rules[:450] + rules[451:], rules, 200)
    missing = {"+" + line for line in entry["after"].splitlines()} - {
        "+" + line for line in entry["before"].splitlines()
    }
    assert missing == {"+-A X -j 450"}
