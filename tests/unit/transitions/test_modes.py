# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A change of the mode or the filter backend, or a clean-up, while the node holds what both need.

Between nftables and iptables mode every packet fares as before or as after; from and to ipvs mode as
docs/architecture.md says.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable
from unittest import mock

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.commit_order import commits

from .ipvs import MODES
from .ipvs_packets import FILLING, Check
from .states import TRAITS, VARIETIES, Change, Node, One, random_changes, ranges_of

full = pytest.mark.full
#: Each way from one mode to another, and to none; the filter backends of ipvs mode are modes of their own.
WAYS = [way for way in itertools.permutations([*MODES, ""], 2) if way[0]]
ways = pytest.mark.parametrize(("mode", "to_mode"), WAYS)
first = pytest.mark.parametrize("first", ["nftables", "iptables"])
#: The filter backends of ipvs mode.
IPVS = {"iptables", "nftables"}
_LOCAL_ENDPOINTS = 0b101


def check_of(mode: str, to_mode: str, node: Node = VARIETIES[0], **more: Any) -> Check:
    """Return a check of one way; other Services fill the sets where one end has ipsets."""
    return Check(mode, node, to_mode=to_mode, filling=FILLING if "iptables" in (mode, to_mode) else (), **more)


def is_excepted(mode: str, to_mode: str, node: Node, one: One, alone: bool) -> bool:
    """Return whether docs/architecture.md excepts a Service. ``alone``: the mode changes and nothing else."""
    traits, mask = one or ("", 0)
    ends = {mode, to_mode}
    if ends.isdisjoint(IPVS):
        return False
    has_ranges = bool(ranges_of(one))
    if node.behaviour != "kube-proxy" and not alone:
        return has_ranges or "external local" in traits
    if node.behaviour != "kube-proxy" and "external local" in traits:
        # The virtual servers appear or disappear, unless another mode serves when they do.
        return mode not in IPVS or not to_mode
    if "hashed" in traits or ("nftables" in ends and "external local" in traits and not mask & _LOCAL_ENDPOINTS):
        return True
    return has_ranges and ends <= {*IPVS, "iptables mode"} and (not alone or ends == {"nftables", "iptables mode"})


def have_other_ranges(change: Change) -> bool:
    """Return whether source ranges of a Service change, come or go."""
    return any(ranges_of(old) != ranges_of(new) for old, new in zip(*change))


def without_exceptions(mode: str, to_mode: str, node: Node, changes: list[Change]) -> list[Change]:
    """Return the changes without those that docs/architecture.md excepts."""
    leaves = mode != to_mode and not IPVS.isdisjoint((mode, to_mode))
    return [
        (old, new)
        for old, new in changes
        if not any(is_excepted(mode, to_mode, node, one, old == new) for one in (*old, *new))
        and not (leaves and have_other_ranges((old, new)))
    ]


def ones(masks: Any) -> list[Change]:
    states = [((trait, mask),) for trait in TRAITS for mask in masks]
    return [(state, state) for state in states]


@first
@ways
def test_the_same_services(mode: str, to_mode: str, first: str) -> None:
    check = check_of(mode, to_mode, first=first)
    every = 2 if IPVS.isdisjoint((mode, to_mode)) else 8
    chosen = ones((3,))[WAYS.index((mode, to_mode)) % every :: every]
    check.changes(without_exceptions(mode, to_mode, check.node, chosen))
    assert check.faults == [] and check.states > 1


@full
@first
@ways
@pytest.mark.parametrize("node", VARIETIES, ids=str)
def test_every_state_of_one_service(node: Node, mode: str, to_mode: str, first: str) -> None:
    check = check_of(mode, to_mode, node, first=first)
    check.changes(without_exceptions(mode, to_mode, node, ones((0, 2, 3))))
    assert check.faults == []


@first
@ways
@pytest.mark.parametrize(("portion", "count"), [(0, 1), pytest.param(2, 10, marks=full)])
def test_the_services_change_as_well(portion: int, count: int, mode: str, to_mode: str, first: str) -> None:
    """From and to ipvs mode, connections to what changes may be masqueraded or not meanwhile."""
    more: dict[str, Any] = {"most_elements": 3} if portion else {}
    sources = IPVS.isdisjoint((mode, to_mode))
    check = check_of(mode, to_mode, portion=portion, sources=sources, first=first, **more)
    check.changes(without_exceptions(mode, to_mode, check.node, random_changes(4, count, 2)))
    assert check.faults == []


@first
@pytest.mark.parametrize("count", [1, pytest.param(8, marks=full)])
@pytest.mark.parametrize(("mode", "to_mode"), [way for way in WAYS if IPVS.isdisjoint(way) and all(way)])
def test_a_crash_after_each_step(count: int, mode: str, to_mode: str, first: str) -> None:
    check = check_of(mode, to_mode, first=first)
    check.crashes(ones((3,))[4 : 4 + count])
    assert check.faults == [] and check.states > 10


@full
@pytest.mark.parametrize(("mode", "to_mode"), [way for way in WAYS if not (IPVS.isdisjoint(way) and all(way))])
def test_a_crash_from_and_to_ipvs_mode_and_in_a_clean_up(mode: str, to_mode: str) -> None:
    check = check_of(mode, to_mode)
    few = 1 if "iptables" in (mode, to_mode) else 8
    check.crashes(without_exceptions(mode, to_mode, check.node, ones((3,)))[:few])
    assert check.faults == [] and check.states > 1


Steps = list[Callable[[], None]]
ORDERS: dict[str, Callable[[Steps], Steps]] = {
    "leftovers removed first": lambda steps: steps[::-1],
    "the new mode missing": lambda steps: steps[1:],
    "leftovers kept": lambda steps: steps[:1],
}


@pytest.mark.parametrize(("mode", "to_mode"), [way for way in WAYS if all(way)])
@pytest.mark.parametrize("order", ORDERS)
def test_another_order_is_found(order: str, mode: str, to_mode: str) -> None:
    check = check_of(mode, to_mode, order=ORDERS[order])
    check.change((("narrow", 3),), (("open", 1),))
    assert check.faults


def test_other_commits_are_found() -> None:
    def without_the_last(steps: Steps) -> Steps:
        def serve() -> None:
            with mock.patch.object(chains, "commits", lambda change: commits(change)[:-1]):
                steps[0]()

        return [serve, *steps[1:]]

    check = check_of("nftables mode", "iptables mode", order=without_the_last)
    check.change((("narrow", 3),), (("narrow", 3),))
    assert check.faults
