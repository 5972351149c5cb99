# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The commits of iptables mode: after each of them, every packet fares as before the change or as after it."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Mapping, Tuple

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import BEHAVIOURS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables import portions
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.commit_order import Commit, commits
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference
from tests.unit.rendering.iptables.tracer import Tracer
from tests.unit.rendering.nftables.samples import sample_settings

from .states import NODE, Packet, State, ones, packets, service_ports

Table = Mapping[Any, Any]
Outcomes = Dict[Packet, FrozenSet[str]]
Order = Callable[[Change[Any, Any]], List[Commit]]


@cache
def table(state: State, behaviour: str) -> Table:
    settings = sample_settings("IPv4", node_port_cidrs=(), schedulers=frozenset(), behaviour=BEHAVIOURS[behaviour])
    return RENDERING.desired_tables(service_ports(state, behaviour), settings)["chains"]


def traced(chains: Table, services: int) -> Outcomes:
    tracer = Tracer(dict(chains), (NODE,))
    return {
        packet: tracer.trace(*packet, interface="lo" if packet.source == NODE else "eth0")
        for packet in packets(services)
    }


@cache
def outcomes(state: State, behaviour: str) -> Outcomes:
    return traced(table(state, behaviour), len(state))


def changed(chains: Table, change: Change[Any, Any]) -> Table:
    assert all(chains[key] == old for key, (old, _new) in change.replaced.items())
    assert all(chains[key] == old for key, old in change.removed.items())
    assert not chains.keys() & change.added.keys()
    kept = {key: value for key, value in chains.items() if key not in change.removed}
    return {**kept, **{key: new for key, (_old, new) in change.replaced.items()}, **change.added}


def states_between(before: Table, after: Table, order: Order) -> Iterator[Tuple[str, Table]]:
    """Yield the chains after each commit but the last one, with a description of it."""
    now, ordered = before, order(difference(before, after))
    for number, commit in enumerate(ordered, 1):
        now = changed(now, commit.change)
        if number < len(ordered):
            yield f"commit {number} of {len(ordered)}, of table {commit.table}", now
    assert now == after


def faults(pairs: List[Tuple[State, State]], behaviour: str, order: Order = commits) -> List[str]:
    """Return the packets that fare otherwise after a commit than both before and after the change."""
    found: List[str] = []
    for old, new in pairs:
        before, after = outcomes(old, behaviour), outcomes(new, behaviour)
        for step, chains in states_between(table(old, behaviour), table(new, behaviour), order):
            for packet, now in traced(chains, len(old)).items():
                if now not in (before[packet], after[packet]):
                    fates = f"{set(now)}, before {set(before[packet])}, after {set(after[packet])}"
                    found.append(f"{old} to {new}: {step}: {packet}: {fates}")
    return found


def pairs_of_one(masks: Tuple[int, ...]) -> List[Tuple[State, State]]:
    return [((old,), (new,)) for old, new in itertools.permutations(ones(masks), 2)]


def random_pairs(count: int, services: int) -> List[Tuple[State, State]]:
    chosen = random.Random(1)
    few = [None, *ones((0, 1, 2, 3))]
    return [tuple(tuple(chosen.choices(few, k=services)) for _each in range(2)) for _pair in range(count)]  # type: ignore[misc]


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_one_service(behaviour: str) -> None:
    assert faults(random.Random(2).sample(pairs_of_one((0, 1, 2)), 400), behaviour) == []


@pytest.mark.full
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_every_change_of_one_service(behaviour: str) -> None:
    assert faults(pairs_of_one((0, 1, 2, 3)), behaviour) == []


def in_portions(change: Change[Any, Any]) -> List[Commit]:
    return [commit for run in portions.portions(change) for commit in run]


def test_three_services_in_the_smallest_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "WHOLE", 0)
    monkeypatch.setattr(portions, "PORTION", 1)
    assert faults(random_pairs(20, 3), "kube-proxy", in_portions) == []


@pytest.mark.full
@pytest.mark.parametrize("portion", [0, 1, 3])
def test_many_changes_of_three_services(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "WHOLE", portion)
    monkeypatch.setattr(portions, "PORTION", portion or 1)
    assert faults(random_pairs(400, 3), "corrected", in_portions if portion else commits) == []


@pytest.mark.parametrize("order", [("filter", "nat"), ("nat", "filter")])
def test_either_order_of_the_tables_is_wrong(order: Tuple[str, ...]) -> None:
    """The check finds it if the order does not depend on the change."""

    def fixed(change: Change[Any, Any]) -> List[Commit]:
        return [commit for table in order for commit in commits(only(change, table))]

    assert faults(random.Random(2).sample(pairs_of_one((0, 1)), 60), "kube-proxy", fixed)


def only(change: Change[Any, Any], table: str) -> Change[Any, Any]:
    """Return the part of the change that concerns a table."""
    parts = (change.added, change.replaced, change.removed)
    return Change(*({key: value for key, value in part.items() if key.table == table} for part in parts))
