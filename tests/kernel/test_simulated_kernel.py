# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulated kernel of the checks of transitions is as the real one, and so are the fates of its packets."""

from __future__ import annotations

import ipaddress
import random
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.policy_table import PolicyTableResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import (
    NftablesResource,
    TransactionRefused,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Labelled, Transaction
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import restore
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import parse_save
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import (
    XtablesVariant,
    detect_variant,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables import portions
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.canonical import canonical_rule
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.kernel.packet_judge import EVERYWHERE, LOST, REFUSED, Fate, Judge
from tests.unit.transitions import iptables, policies
from tests.unit.transitions.check import desired, traversals
from tests.unit.transitions.iptables import Held, Programs, empty
from tests.unit.transitions.nftables import Kernel, Table
from tests.unit.transitions.states import NETS, Node, Packet, packets, random_changes
from tests.unit.transitions.traversal import Way

full = pytest.mark.full


class Both(Kernel):
    """A simulated kernel beside a real one: each transaction must have the same effect on both.

    ``states``, ``refused``: how many transactions were made, and refused. ``shuffled``: the transactions of a change
    come in any order, so that kernels refuse most of them.
    """

    def __init__(self, family: str, real: NftablesResource, most_elements: int, shuffled: bool) -> None:
        super().__init__(family, Table({}), most_elements)
        self.real = real
        self.states = self.refused = 0
        self.planner, self._planner = self._planner, self  # type: ignore[assignment]
        self.shuffled = shuffled
        self.compare: Callable[[Table], None] = lambda _table: None

    def transactions(self, change: Any) -> Iterator[Transaction]:
        steps = list(self.planner.transactions(change))
        if self.shuffled:
            random.Random(self.states).shuffle(steps)
        return iter(steps)

    def _send(self, labelled: list[Labelled]) -> None:
        refused = ""
        try:
            super()._send(labelled)
        except TransactionRefused as error:
            refused = str(error)
        try:
            self.real._send(labelled)
        except TransactionRefused as error:
            assert refused, f"only the kernel has refused it: {error}"
            self.refused += 1
            raise
        assert not refused, f"only the simulated kernel has refused it: {refused}"
        self.states += 1
        assert self.real.observe() == self.observe(), [each.label for each in labelled]
        self.compare(self.held)


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=full)])
@pytest.mark.parametrize("family", NETS)
def test_transactions_have_the_same_effect(family: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    states = refused = 0
    for number, change in enumerate(random_changes(8, count, 2)):
        with NftablesResource(family) as real:
            both = Both(family, real, 1 + number % 4, shuffled=False)
            both.apply(difference({}, desired(change[0], Node(family))))
            both.shuffled = number % 2 == 1
            try:
                both.apply(difference(both.observe(), desired(change[1], Node(family))))
            except TransactionRefused:
                assert both.shuffled
            both.shuffled = False
            both.apply(difference(both.observe(), {}))
            states, refused = states + both.states, refused + both.refused
    assert states > 15 * count and refused > count // 4


class BothPolicies(policies.Kernel):
    """The simulated tables of network policies beside real ones: each transaction must have the same effect."""

    def __init__(self, real: PolicyTableResource) -> None:
        super().__init__((Table({}), Table({})), self._compare)
        self.real = real
        self.states = 0

    def _send(self, labelled: list[Labelled]) -> None:
        self.real._send(labelled)
        super()._send(labelled)

    def _compare(self, tables: policies.Tables) -> None:
        self.states += 1
        assert self.real.observe() == policies.joined(tables)


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=full)])
def test_policies_have_the_same_effect(count: int) -> None:
    chosen = random.Random(11).sample(policies.states(), min(count, len(policies.states())))
    with PolicyTableResource() as real:
        both = BothPolicies(real)
        for state in chosen:
            both.apply(difference(both.observe(), policies.Agent(state.objects(), policies.SETTINGS).desired))
        both.apply(difference(both.observe(), {}))
        assert real.is_empty()
    assert both.states > len(chosen) // 2


def possible(outcome: Any, packet: Packet, node: str) -> frozenset[Fate]:
    """Return what a sender can notice of an outcome."""
    if outcome == "drop":
        return frozenset([LOST])
    if outcome == "reject":
        return frozenset([REFUSED])
    assert isinstance(outcome, Way)
    address = str(ipaddress.ip_address(outcome.address))
    if address == node:
        return frozenset([REFUSED])
    server = address if outcome.redirected else EVERYWHERE
    return frozenset([(server, outcome.masqueraded and packet.source != node)])


def expected(table: Table, family: str, services: int) -> dict[Packet, frozenset[Fate]]:
    ways = traversals(table, packets(services, family))
    node = NETS[family].node
    return {
        packet: frozenset().union(*(possible(each, packet, node) for each in way.outcomes))
        for packet, way in ways.items()
    }


@pytest.mark.parametrize("count", [1, pytest.param(25, marks=full)])
@pytest.mark.parametrize("family", NETS)
def test_packets_fare_as_in_the_simulation(family: str, count: int) -> None:
    """After each transaction, so most of the tables are between two states."""
    judge, states = Judge(family), 0
    try:
        with NftablesResource(family) as real:
            for old, new in random_changes(9, count, 1):
                both = Both(family, real, 1, shuffled=False)

                def compare(table: Table, change: Any = (old, new)) -> None:
                    nonlocal states
                    states += 1
                    wanted = expected(table, family, 1)
                    for packet, fate in judge.fates(wanted).items():
                        assert fate in wanted[packet], (change, packet, fate, wanted[packet])

                both.compare = compare
                for state in (old, new, None):
                    both.apply(difference(both.observe(), desired(state, Node(family))))
    finally:
        judge.close()
    assert states > 20 * count


class BothPrograms(Programs):
    """The simulated programs of iptables, beside the real ones: after each commit both tables must be the same."""

    def __init__(self, real: XtablesVariant, compare: Callable[[Held], None]) -> None:
        super().__init__(empty())
        self._real = real
        self._compare = compare

    def restore(self, variant: Any, text: str, *arguments: Any) -> int:
        for part in text.split("COMMIT\n")[:-1]:
            super().restore(variant, f"{part}COMMIT\n")
            restore.restore(self._real, f"{part}COMMIT\n")
            assert self._rules(self.held) == self._rules(parse_save(restore.save(self._real)).chains), part
            self._compare(self.held)
        return 0

    def _rules(self, held: Mapping[Any, Sequence[str]]) -> dict[Any, list[str]]:
        """Return the chains of a Service proxy, and others that are not empty."""
        family = self._real.family
        found = {place: [canonical_rule(rule, family) for rule in rules] for place, rules in held.items()}
        return {place: rules for place, rules in found.items() if rules or place[1].startswith("KUBE-")}


def noticed(outcome: str, packet: Packet, node: str) -> frozenset[Fate]:
    """Return what a sender can notice of an outcome in iptables mode."""
    if outcome in ("DROP", "REJECT"):
        return frozenset([LOST if outcome == "DROP" else REFUSED])
    if outcome in ("-", "ACCEPT"):
        return frozenset([REFUSED] if packet.destination == node else [(EVERYWHERE, False), (EVERYWHERE, True)])
    address, _colon, port = outcome.rpartition(":")
    return frozenset([(address.strip("[]"), port.endswith("+M") and packet.source != node)])


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=full)])
@pytest.mark.parametrize("family", NETS)
@pytest.mark.parametrize("variant", ["legacy", "nft"])
def test_commits_and_packets_of_iptables_mode(
    variant: str, family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    node, judge, states = Node(family), Judge(family), 0
    address = NETS[family].node

    def compare(held: Held) -> None:
        nonlocal states
        states += 1
        wanted = {
            packet: frozenset().union(*(noticed(each, packet, address) for each in outcomes))
            for packet, outcomes in iptables.traced(held, packets(1, family)).items()
        }
        for packet, fate in judge.fates(wanted).items():
            assert fate in wanted[packet], (packet, fate, wanted[packet], [key for key in held if "KUBE" in key[1]])

    try:
        programs = BothPrograms(detect_variant(family, variant), compare)
        monkeypatch.setattr(portions, "WHOLE", 0)
        monkeypatch.setattr(portions, "PORTION", 3)
        with programs.used():
            for old, new in random_changes(10, count, 1):
                for state in (old, new):
                    resource = iptables.resource_of(node, variant)
                    resource.apply(difference(resource.observe(), iptables.desired(state, node)))
    finally:
        judge.close()
    assert states > 2 * count
