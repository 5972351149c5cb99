# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes between nftables and iptables mode: the way of packets while the node holds tables of both."""

from __future__ import annotations

import contextlib
import ipaddress
from functools import cache, partial
from typing import Any, Callable, FrozenSet, Iterator, List, Mapping, Optional, Set, Tuple
from unittest import mock

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables import portions
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.unit.rendering.iptables import tracer
from tests.unit.rendering.iptables.tracer import Tracer

from . import check, iptables
from .check import wrong
from .iptables import Held, Programs, empty
from .nftables import Crashed, Kernel, Table
from .states import NODE, NODES, Changes, Node, Packet, State, packets
from .traversal import Traversal, Walk, Way

#: The tables of iptables by hook, with their priorities.
_PLACES = {
    "prerouting": [(-100, "nat", "PREROUTING")],
    "input": [(0, "filter", "INPUT"), (100, "nat", "INPUT")],
    "forward": [(0, "filter", "FORWARD")],
    "output": [(-100, "nat", "OUTPUT"), (0, "filter", "OUTPUT")],
    "postrouting": [(100, "nat", "POSTROUTING")],
}
Both = Tuple[Table, Held]
Outcomes = Mapping[Packet, FrozenSet[Any]]


class Together(Traversal):
    """The ways of a packet through both. ``first``: which table of NAT comes first, as the one made first does.

    Once a chain has redirected or masqueraded a connection, the kernel asks no other chain of that kind.
    """

    def __init__(self, both: Both, packet: Packet, first: str) -> None:
        table, held = both
        self._tracer = _tracer(tuple(sorted(held.items())))
        self._first = first
        super().__init__(table, packet)

    def _chains(self, hook: str) -> Iterator[Walk]:
        order = {self._first: 0}
        found = [(priority, order.get("nftables", 1), chain, "") for priority, chain in self._hooks.get(hook, ())]
        found += [(priority, order.get("iptables", 1), chain, table) for priority, table, chain in _PLACES[hook]]
        for _priority, _order, chain, table in sorted(found):
            yield partial(self._in, chain, table, hook)

    def _in(self, chain: str, table: str, hook: str, way: Way) -> Set[Tuple[str, Way]]:
        base = None if table else self._table.chains[chain].base
        if (base.type if base else table) == "nat" and (
            way.masqueraded if hook in ("postrouting", "input") else way.redirected
        ):
            return {("accept", way)}
        if base:
            return self._chain(chain, way)
        packet = self._packet
        sent = tracer.Packet(
            packet.source, str(ipaddress.ip_address(way.address)), way.port, packet.protocol,
            "lo" if packet.source in NODES else "eth0",
        )  # fmt: skip
        state = tracer._State(sent, way.mark, way.redirected, way.masqueraded)
        return {(verdict.lower(), _way(after)) for verdict, after in self._tracer._run(table, chain, state)}


def _way(state: Any) -> Way:
    address = ipaddress.ip_address(state.packet.destination).packed
    return Way(address, state.packet.port, state.mark, state.translated, state.masqueraded)


@cache
def _tracer(held: Tuple[Any, ...]) -> Tracer:
    return iptables._KnownRules({ChainKey(*place): rules for place, rules in held}, NODES)


def outcomes(both: Both, services: int, node: Node, first: str) -> Outcomes:
    return {each: Together(both, each, first).outcomes for each in packets(services, node.family)}


class Check(Changes[Optional[State]]):
    """Changes of one mode to the other, with other Services or not. ``faults``: what went wrong.

    ``to_nftables``: the direction. ``states``: transactions and commits. ``portion``: see :class:`.iptables.Check`.
    ``prepare``: may alter the order of the steps, which it is given as functions.
    """

    def __init__(
        self, to_nftables: bool, node: Node = NODE, most_elements: int = 1, portion: int = 0,
        prepare: Callable[[List[Callable[[], None]]], List[Callable[[], None]]] = lambda steps: steps,
    ) -> None:  # fmt: skip
        super().__init__()
        self.node = node
        self.to_nftables = to_nftables
        self.most_elements = most_elements
        self.prepare = prepare
        self._variant = iptables.NFT if portion else "legacy"
        self._sizes = {"WHOLE": portion - 1, "PORTION": portion} if portion else {"WHOLE": portions.WHOLE}

    def change(self, old: Optional[State], new: Optional[State], crash: int = -1) -> bool:
        """Change the mode; return whether the process has ended after ``crash`` steps and another has continued."""
        start = self._in_iptables_mode(old) if self.to_nftables else self._in_nftables_mode(old)
        goal = self._in_nftables_mode(new) if self.to_nftables else self._in_iptables_mode(new)
        crashed = False
        for first in ("nftables", "iptables"):
            ends = [outcomes(each, len(old or ()), self.node, first) for each in (start, goal)]
            where = f"{old} to {new}, {'nftables' if self.to_nftables else 'iptables'} mode, {first} first"
            both, now, crashed = self._made(where, start, new, ends, first, crash)
            if crashed:
                both, now, _again = self._made(f"{where}, after a crash", both, new, [now, ends[1]], first, -1)
            if now != ends[1]:
                self.faults.append(f"{where}: not as desired")
        return crashed

    def _in_nftables_mode(self, state: Optional[State]) -> Both:
        return Table(check.desired(state, self.node)), empty()

    def _in_iptables_mode(self, state: Optional[State]) -> Both:
        return Table({}), iptables.loaded(state, self.node)

    def _made(
        self, where: str, both: Both, new: Optional[State], ends: List[Outcomes], first: str, crash: int
    ) -> Tuple[Both, Outcomes, bool]:
        now, left = ends[0], crash

        def seen(_held: Any) -> None:
            nonlocal now, left
            left -= 1
            self.states += 1
            now = outcomes((kernel.held, programs.held), len(new or ()), self.node, first)
            self.faults.extend(wrong(where, now, ends[0], ends[1]))
            if not left:
                raise Crashed

        kernel = Kernel(self.node.family, both[0], self.most_elements, seen)
        programs = Programs(both[1], seen)

        def apply_table() -> None:
            kernel.apply(difference(kernel.observe(), check.desired(new, self.node) if self.to_nftables else {}))

        def apply_chains() -> None:
            resource = iptables.resource_of(self.node, self._variant)
            observed = resource.observe()
            resource.apply(
                difference(observed, {} if self.to_nftables or new is None else iptables.desired(new, self.node))
            )

        # As ``converge``: what the mode needs, then what others have left.
        steps = self.prepare([apply_table, apply_chains] if self.to_nftables else [apply_chains, apply_table])
        with programs.used(), mock.patch.multiple(portions, **self._sizes), contextlib.suppress(Crashed):
            for step in steps:
                step()
            return (kernel.held, programs.held), now, False
        return (kernel.held, programs.held), now, True
