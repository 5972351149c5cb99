# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What packets may meet: the outcomes of what the agent has known since its last completed sync, and nothing else."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Optional, Sequence

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.packed import text_in
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import BEHAVIOURS
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING as CHAINS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.observed_order import in_observed_order
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING as TABLE
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.unit.transitions import iptables
from tests.unit.transitions.check import described
from tests.unit.transitions.iptables import Programs, empty
from tests.unit.transitions.nftables import Table
from tests.unit.transitions.states import Node, Packet, packets
from tests.unit.transitions.traversal import Traversal

from .kernel import SimulatedKernel

SERVICES = 2
#: The packets to each Service that a world judges; another one has others.
_SOME = 12


class Known(NamedTuple):
    """What is known of one Service: its object and its EndpointSlices as texts, and the settings of the node.

    ``objects``: None on a node that serves nothing at all.
    """

    objects: Optional[frozenset[str]]
    node: Node


class Dataplane(NamedTuple):
    """A mode of the node. ``variant``: that of iptables, empty in nftables mode."""

    variant: str

    def desired(self, objects: Iterable[Any], node: Node) -> Mapping[Any, Any]:
        """Return what a run of the program that knows these objects would make."""
        context = NodeContext(node.family, "node1", behaviour=BEHAVIOURS[node.behaviour])
        ports = all_service_ports(ClusterState.from_objects(list(objects)), context)
        if self.variant:
            settings = node.settings(node_port_cidrs=(), schedulers=frozenset())
            return CHAINS.desired_tables(ports, settings)["chains"]
        return TABLE.desired_tables(ports, node.settings())["table objects"]

    def difference(self, kernel: SimulatedKernel, objects: Iterable[Any], node: Node) -> list[str]:
        """Return how the kernel differs from what it should hold."""
        wanted = self.desired(objects, node)
        if not self.variant:
            found = difference(kernel.table.observed(), wanted)
        else:
            programs = Programs(kernel.programs.held)
            with programs.used():
                observed = iptables.resource_of(node, self.variant).observe()
                # Rules of different Services in a chain keep their order.
                found = difference(observed, in_observed_order(wanted, observed))
        return described(found)


def some_packets(number: int, family: str, chosen: random.Random) -> tuple[Packet, ...]:
    """Return some of the packets to one Service, one of a few samples."""
    others = packets(number - 1, family)
    one_of_few = random.Random(chosen.randrange(4))
    return tuple(one_of_few.sample([each for each in packets(number, family) if each not in others], _SOME))


@lru_cache(maxsize=20_000)
def _steady(plane: Dataplane, of: Sequence[Packet], known: Known) -> Mapping[Packet, Any]:
    objects = [json.loads(text) for text in known.objects or ()]
    wanted = plane.desired(objects, known.node) if known.objects is not None else {}
    if not plane.variant:
        table = Table(wanted)
        return {packet: Traversal(table, packet).outcomes for packet in of}
    programs = Programs(empty())
    with programs.used():
        iptables.resource_of(known.node, "legacy").apply(difference({}, wanted))
    return iptables.traced(programs.held, of)


class Judge:
    """Judges packets after each step of the kernel.

    ``faults``: packets that fared otherwise. ``judged``: how many packets were judged, ``excepted``: how many were not,
    since their way reads what another program has changed.
    """

    def __init__(self, kernel: SimulatedKernel, plane: Dataplane, node: Node, chosen: random.Random) -> None:
        self.faults: list[str] = []
        self.judged = self.excepted = 0
        self.where: Callable[[], str] = str
        self._kernel = kernel
        self._plane = plane
        self._now = {number: Known(frozenset(), node) for number in range(1, SERVICES + 1)}
        self._allowed: dict[int, set[Known]] = {
            number: {known, Known(None, node)} for number, known in self._now.items()
        }
        self._packets = {number: some_packets(number, kernel.family, chosen) for number in self._now}
        self._ways: dict[Packet, Traversal] = {}

    def knows(self, view: ClusterView, node: Node) -> None:
        """Record what the agent knows now; its next sync may apply it."""
        found: dict[int, list[str]] = {number: [] for number in self._now}
        for key, packed in view._objects.items():
            if key.kind in ("Service", "EndpointSlice") and key.namespace == "ns":
                found[int(key.name[1:].partition("-")[0])].append(text_in(packed).decode())
        for number, texts in found.items():
            self._now[number] = Known(frozenset(texts), node)
            self._allowed[number].add(self._now[number])

    def synced(self, desired: Mapping[Any, Any]) -> None:
        """Record that a sync has applied everything that is known."""
        self._allowed = {number: {known} for number, known in self._now.items()}
        kernel = self._kernel
        if kernel.external and self._is_repaired(desired):
            kernel.external, kernel.touched = False, set()

    def _is_repaired(self, desired: Mapping[Any, Any]) -> bool:
        """Return whether no change of another program is left."""
        if not self._plane.variant:
            return self._kernel.table.observed() == desired
        programs, node = Programs(self._kernel.programs.held), next(iter(self._now.values())).node
        save = chains.save
        chains.save = programs.save
        try:
            observed = iptables.resource_of(node, self._plane.variant).observe()
            return not difference(observed, in_observed_order(desired, observed))
        finally:
            chains.save = save

    def __call__(self) -> None:
        """Judge every packet."""
        several = [packet for of in self._packets.values() for packet in of]
        if self._plane.variant:
            if not self._kernel.external:
                self._judge(iptables.traced(self._kernel.programs.held, several))
            return
        table = self._kernel.table
        ways = {}
        for packet in several:
            known = self._ways.get(packet)
            ways[packet] = known if known and known.read.isdisjoint(table.changed) else Traversal(table, packet)
        self._ways = ways
        self._judge({packet: way.outcomes for packet, way in ways.items() if way.read.isdisjoint(self._kernel.touched)})

    def others_changed(self) -> None:
        """Follow the changes of other programs, without a judgement."""
        self._ways = {}

    def _judge(self, outcomes: Mapping[Packet, Any]) -> None:
        for number, of in self._packets.items():
            allowed = [_steady(self._plane, of, known) for known in self._allowed[number]]
            for packet in of:
                if packet not in outcomes:
                    self.excepted += 1
                    continue
                self.judged += 1
                now, ends = outcomes[packet], [each[packet] for each in allowed]
                if now not in ends:
                    text = f"{self.where()}: {packet}: {set(now)}, expected one of {list(map(set, ends))}"
                    self.faults.append(text)
