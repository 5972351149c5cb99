# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A change of the mode: after each step every packet fares as before or as after, though the node holds both tables."""

from __future__ import annotations

from typing import Any, Callable, Dict, List
from unittest import mock

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.commit_order import commits

from .modes import Check
from .states import TRAITS, VARIETIES, Node, State, random_changes

full = pytest.mark.full
EVERY = 1 << 30
DIRECTIONS = pytest.mark.parametrize("to_nftables", [True, False], ids=["to nftables", "to iptables"])


def ones(masks: Any) -> List[State]:
    return [((trait, mask),) for trait in TRAITS for mask in masks]


@DIRECTIONS
def test_the_same_services(to_nftables: bool) -> None:
    check = Check(to_nftables, most_elements=EVERY)
    check.changes((state, state) for state in ones((3,))[to_nftables::2])
    assert check.faults == []


@full
@DIRECTIONS
@pytest.mark.parametrize("node", VARIETIES, ids=str)
def test_every_state_of_one_service(node: Node, to_nftables: bool) -> None:
    check = Check(to_nftables, node, most_elements=EVERY)
    check.changes((state, state) for state in ones((0, 2, 3)))
    assert check.faults == []


@DIRECTIONS
@pytest.mark.parametrize(("portion", "count"), [(0, 1), pytest.param(2, 10, marks=full)])
def test_the_services_change_as_well(portion: int, count: int, to_nftables: bool) -> None:
    check = Check(to_nftables, most_elements=3 if portion else EVERY, portion=portion)
    check.changes(random_changes(4, count, 2))
    assert check.faults == []


@DIRECTIONS
@pytest.mark.parametrize("count", [1, pytest.param(8, marks=full)])
def test_a_crash_after_each_step(count: int, to_nftables: bool) -> None:
    check = Check(to_nftables, most_elements=EVERY)
    check.crashes((state, state) for state in ones((3,))[4 : 4 + count])
    assert check.faults == [] and check.states > 10


Steps = List[Callable[[], None]]
ORDERS: Dict[str, Callable[[Steps], Steps]] = {
    "leftovers removed first": lambda steps: steps[::-1],
    "the new mode missing": lambda steps: steps[1:],
    "leftovers kept": lambda steps: steps[:1],
}


@DIRECTIONS
@pytest.mark.parametrize("order", ORDERS)
def test_another_order_is_found(order: str, to_nftables: bool) -> None:
    check = Check(to_nftables, most_elements=EVERY, prepare=ORDERS[order])
    check.change((("narrow", 3),), (("open", 1),))
    assert check.faults


def test_other_commits_are_found() -> None:
    check = Check(False, most_elements=EVERY)
    with mock.patch.object(chains, "commits", lambda change: commits(change)[:-1]):
        check.change((("narrow", 3),), (("narrow", 3),))
    assert check.faults
