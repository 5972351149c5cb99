# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The transactions of nftables mode: after each of them, every packet fares as before the change or as after it."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any, Dict, List, Optional, Tuple

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.messages import Encoder
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Planner
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.layout import SERVICES_TABLE
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import Key, SetRole, Value
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.unit.rendering.nftables.samples import sample_settings

from .nftables import Table, Traversal
from .states import Packet, State, ones, packets, service_ports

Traversals = Dict[Packet, Traversal]


@cache
def desired(state: State) -> Dict[Key, Value]:
    return RENDERING.desired_tables(service_ports(state, "kube-proxy"), sample_settings("IPv4"))["table objects"]


def traversals(table: Table, services: int, earlier: Optional[Traversals] = None) -> Traversals:
    """Return the ways of all packets; ``earlier``: those before the transaction that led to the table."""
    return {
        packet: earlier[packet]
        if earlier is not None and earlier[packet].read.isdisjoint(table.changed)
        else Traversal(table, packet)
        for packet in packets(services)
    }


@cache
def steady(state: State) -> Traversals:
    return traversals(Table(desired(state)), len(state))


class Check:
    """Changes from state to state, with as many transactions as there can be.

    ``crashes``: after how many transactions of a change the process also ends, so that the next one continues.
    """

    def __init__(self, identity: Any = SERVICES_TABLE, most_elements: int = 1) -> None:
        self.planner = Planner(Encoder("IPv4", identity), most_elements)
        self.faults: List[str] = []

    def change(self, old: State, new: State, crash: int = 0) -> None:
        table, target = Table(desired(old)), desired(new)
        before, now, after = steady(old), steady(old), steady(new)
        if crash:
            for transaction in itertools.islice(self.planner.transactions(difference(desired(old), target)), crash):
                table = table.after(transaction)
                now = traversals(table, len(old), now)
            self._compare(f"{old} to {new}: crash after {crash}", now, before, after)
            before = now
        self._steps(table, table.observed(), new, (now, before, after))

    def first_load(self, new: State) -> None:
        nothing = Table({})
        before = traversals(nothing, len(new))
        self._steps(nothing, {}, new, (before, before, steady(new)))

    def _steps(
        self, table: Table, observed: Dict[Key, Value], new: State, seen: Tuple[Traversals, Traversals, Traversals]
    ) -> None:
        """Make the rest of a change. ``seen``: the ways of packets now, before the change, and after it."""
        now, before, after = seen
        for number, transaction in enumerate(self.planner.transactions(difference(observed, desired(new))), 1):
            table = table.after(transaction)
            now = traversals(table, len(new), now)
            self._compare(f"to {new}: transaction {number}", now, before, after)
        assert not difference(table.observed(), desired(new))

    def _compare(self, where: str, found: Traversals, before: Traversals, after: Traversals) -> None:
        for packet, now in found.items():
            was, will = before[packet].outcomes, after[packet].outcomes
            if now.outcomes not in (was, will):
                fates = f"{set(now.outcomes)}, before {set(was)}, after {set(will)}"
                self.faults.append(f"{where}: {packet}: {fates}")


def some_pairs(count: int, masks: Tuple[int, ...] = (0, 1, 2, 3)) -> List[Tuple[State, State]]:
    pairs = list(itertools.permutations(ones(masks), 2))
    return [((old,), (new,)) for old, new in random.Random(3).sample(pairs, count)]


def test_one_service() -> None:
    check = Check()
    for old, new in some_pairs(40):
        check.change(old, new)
    assert check.faults == []


def test_the_first_load() -> None:
    check = Check()
    check.first_load(tuple(ones((3,))[1::2]))
    assert check.faults == []


def test_a_crash_between_two_transactions() -> None:
    check = Check()
    for old, new in some_pairs(25):
        check.change(old, new, crash=random.Random(f"{old}{new}").randrange(1, 12))
    assert check.faults == []


@pytest.mark.full
def test_every_change_of_one_service() -> None:
    check = Check()
    for old, new in itertools.permutations(ones((0, 1, 2, 3)), 2):
        check.change((old,), (new,))
    assert check.faults == []


@pytest.mark.full
def test_three_services() -> None:
    chosen, check = random.Random(4), Check(most_elements=3)
    few = [None, *ones((0, 1, 2, 3))]
    for crash in range(200):
        old, new = (tuple(chosen.choices(few, k=3)) for _each in range(2))
        check.change(old, new, crash % 8)
    assert check.faults == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((("cluster", 2),), (("cluster", 1),)),
        ((("narrow", 2), ("narrow", 2)), (("wide", 2), ("narrow", 2))),
        ((("affinity local", 3),), (("affinity local", 2),)),
    ],
    ids=["hairpin", "source ranges", "session affinity"],
)
def test_a_layout_without_roles_is_found(old: State, new: State) -> None:
    """Elements that belong to a frontend, or help it, then change apart from it."""
    check = Check(SERVICES_TABLE._replace(role=lambda _family, _name: SetRole()))
    check.change(old, new)
    assert check.faults
