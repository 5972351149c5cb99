# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lines that differ, as the playbook verify prints them."""

from __future__ import annotations

from typing import List

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import TableChange
from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.results import difference_lines

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


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (2, ["+-a 1", "+-a 2", "... and 1 more lines"]),
        (3, ["+-a 1", "+-a 2", "+-a 3"]),
        (0, ["+-a 1", "+-a 2", "+-a 3"]),
    ],
)
def test_only_a_limited_number_of_differing_lines_is_shown(limit: int, expected: List[str]) -> None:
    chain = ["IPv4 chains:", "--A X -j A", "+-A X -j C"]
    assert difference_lines([CHAIN, SERVERS], limit) == [*chain, "IPv4 real servers:", *expected]
    assert difference_lines([], limit) == []
