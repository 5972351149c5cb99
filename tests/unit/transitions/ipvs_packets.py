# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes in ipvs mode, with what packets meet after each message, commit and transaction."""

from __future__ import annotations

import ipaddress
from functools import cache, partial
from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import VirtualServerKey, server_of
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import PlannedChange, apply_plan, plan
from tests.unit.rendering.iptables import tracer
from tests.unit.rendering.iptables.tracer import Tracer

from .ipvs import MODES, Contents, Kernel, stages
from .modes import _PLACES, _way
from .nftables import Crashed, Object
from .states import NETS, NODE, NODES, Changes, Node, Packet, State, packets, service_ports
from .traversal import Traversal, Walk, Way

Outcomes = Mapping[Packet, FrozenSet[Any]]
#: The priorities at which IPVS takes packets, and those of the tables of iptables.
_IPVS = {"input": 98, "output": -99}
_MANGLE = {hook: [(-150, "mangle", hook.upper())] for hook in ("prerouting", "output")}
_NUMBERS = {"tcp": "6", "udp": "17"}
#: Before the name of a hook: a packet that IPVS has sent on.
_BEHIND = "behind IPVS: "


def _object(address: bytes) -> Object:
    """Return what IPVS and the dummy device have at an address, on which a way may depend."""
    return ("address", "", address)


class Arrival(Traversal):
    """The ways of a packet through IPVS and the filter backend; outcomes are as elsewhere, and ``host``.

    A program of the node that connects to an address of the dummy device has that address itself.
    """

    ends = ("drop", "reject", "served")

    def __init__(self, state: Contents, packet: Packet, chains: Tracer) -> None:
        self._state, self._tracer = state, chains
        self._server: Optional[VirtualServerKey] = None
        self.more_local = frozenset(ipaddress.ip_address(address).packed for address in state.addresses)
        if packet.source in NODES and packet.destination in state.addresses:
            packet = packet._replace(source=packet.destination)
        super().__init__(state.table, packet)
        self.read.add(_object(ipaddress.ip_address(packet.destination).packed))

    def _rest(self, verdict: str, way: Way, hooks: List[str]) -> Iterator[Any]:
        if verdict in self.ends or hooks:
            yield from super()._rest(verdict, way, hooks)
        elif self._server is None and way.address in self.local:
            yield "host"
        else:
            yield way._replace(mark=0, redirected=False)

    def _end(self, verdict: str, way: Way) -> Iterator[Any]:
        if verdict == "served":
            self._server = VirtualServerKey(self._packet.protocol, self._text(way.address), way.port)
            for each in self._real_servers():
                packed = ipaddress.ip_address(each.ip).packed
                sent = way._replace(address=packed, port=each.port)
                yield from list(self._rest("accept", sent, [f"{_BEHIND}output", f"{_BEHIND}postrouting"]))
            self._server = None
        else:
            yield verdict

    @staticmethod
    def _text(address: bytes) -> str:
        return str(ipaddress.ip_address(address))

    def _real_servers(self) -> List[Any]:
        servers = self._state.real_servers.items()
        return [key for key, value in servers if key.server == self._server and value.weight]

    def _chains(self, hook: str) -> Iterator[Walk]:
        behind, name = hook.startswith(_BEHIND), hook[len(_BEHIND) :] if hook.startswith(_BEHIND) else hook
        found = [(priority, chain, "") for priority, chain in self._hooks.get(name, ())]
        found += [(priority, chain, table) for priority, table, chain in (*_PLACES[name], *_MANGLE.get(name, ()))]
        if name in _IPVS and not behind:
            found.append((_IPVS[name], "", "ipvs"))
        for _priority, chain, table in sorted(found):
            base = None if table else self._table.chains[chain].base
            # The destination of a connection is translated once.
            if not (behind and name == "output" and (base.type if base else table) == "nat"):
                yield partial(self._in, chain, table)

    def _in(self, chain: str, table: str, way: Way) -> Set[Tuple[str, Way]]:
        if not table:
            return self._chain(chain, way)
        if table == "ipvs":
            return {(self._balanced(way), way)}
        packet, server = self._packet, self._server
        sent = tracer.Packet(
            packet.source, self._text(way.address), way.port, packet.protocol,
            "lo" if packet.source in NODES else "eth0",
        )  # fmt: skip
        numbered = (_NUMBERS[server.protocol], server.address, str(server.port)) if server else None
        self._tracer.virtual_server = numbered
        start = tracer._State(sent, way.mark, way.redirected, way.masqueraded)
        return {(verdict.lower(), _way(after)) for verdict, after in self._tracer._run(table, chain, start)}

    def _balanced(self, way: Way) -> str:
        self.read.add(_object(way.address))
        self._server = VirtualServerKey(self._packet.protocol, self._text(way.address), way.port)
        found = "served" if self._real_servers() else "reject"
        exists, self._server = self._server in self._state.servers, None
        return found if exists else "accept"

    def _nat(self, part: Any, way: Way, registers: bytes) -> List[Any]:
        if part.get(5, None) is not None:
            return super()._nat(part, way, registers)
        return [("accept", way._replace(redirected=True), registers)]


@cache
def _tracer(held: Tuple[Any, ...], local: Tuple[str, ...]) -> Tracer:
    return Tracer({ChainKey(*place): rules for place, rules in held}, (*NODES, *local))


def arrivals(state: Contents, of: Iterable[Packet]) -> Dict[Packet, Arrival]:
    """Return the ways of packets."""
    chains = _tracer(tuple(sorted(state.chains.items())), tuple(sorted(state.addresses)))
    names = {key.set for key in state.elements}
    chains.sets = {name: frozenset(key.element for key in state.elements if key.set == name) for name in names}
    return {each: Arrival(state, each, chains) for each in of}


def arrivals_after(state: Contents, earlier: Contents, ways: Dict[Packet, Arrival]) -> Dict[Packet, Arrival]:
    """Return the ways of packets after a step."""
    if (state.chains, state.elements) != (earlier.chains, earlier.elements):
        return arrivals(state, ways)
    changed = set(state.table.changed if state.table is not earlier.table else ())
    tables = ((state.servers, earlier.servers), (state.real_servers, earlier.real_servers))
    keys = {key for one, other in tables for key, _value in one.items() ^ other.items()}  # type: ignore[attr-defined]
    places = {server_of(key).address for key in keys} | (state.addresses.keys() ^ earlier.addresses.keys())
    changed |= {_object(ipaddress.ip_address(address).packed) for address in places}
    return {**ways, **arrivals(state, [each for each, way in ways.items() if not way.read.isdisjoint(changed)])}


def fates(ways: Mapping[Packet, Arrival]) -> Outcomes:
    return {packet: way.outcomes for packet, way in ways.items()}


def wrong(where: str, now: Outcomes, ends: Tuple[Outcomes, Outcomes], states: Tuple[Contents, Contents]) -> List[str]:
    """Return a line for each packet that fares otherwise than docs/architecture.md says.

    ``ends``: the outcomes in the states before and after the change.
    """
    faults, (old, new) = [], states
    kept = (old.addresses.keys() & new.addresses.keys()) | {*NODES}
    remade = {(key.address, key.port, key.protocol) for key in old.servers.keys() ^ new.servers.keys()}
    for packet, found in now.items():
        before, after = (outcomes[packet] for outcomes in ends)
        known, by_node = before | after, packet.source in NODES
        if before != after or packet[1:] in remade:
            passing = Way(ipaddress.ip_address(packet.destination).packed, packet.port)
            known |= {fate._replace(masqueraded=True) for fate in (*known, passing) if isinstance(fate, Way)}
            if (packet.destination in kept or by_node) and not (_served(before) and _served(after)):
                known |= {"reject", "host", passing}
            if by_node and "drop" in known | found:
                continue
        if not found <= known:
            faults.append(f"{where}: {packet}: {set(found)}, before {set(before)}, after {set(after)}")
    return faults


def _served(outcomes: FrozenSet[Any]) -> bool:
    return all(isinstance(fate, Way) and fate.port == 8080 for fate in outcomes)


#: Services that fill each set of the filter backend iptables, whose rules depend on that.
_FILLING = [f"{first}+external IP{last}" for first in ("narrow", "external local") for last in ("", "+UDP")]
FILLING: State = (*((traits, 3) for traits in _FILLING), ("internal local", 2), ("external local", 2))


class Check(Changes[Optional[State]]):
    """Changes from state to state with one filter backend. ``faults``: what went wrong; ``states``: how many steps.

    ``filling``: other Services on the node. ``connected``: every real server of the old state has a connection, so
    those of TCP are drained. ``refuses``: the kernel refuses the message with the number ``crash``, in place of a
    process that ends. ``prepare``: may alter the plan, as seeded faults do.
    """

    def __init__(
        self, filter_backend: str, node: Node = NODE, connected: bool = False, refuses: bool = False,
        filling: State = (), prepare: Callable[[List[PlannedChange]], List[PlannedChange]] = lambda planned: planned,
    ) -> None:  # fmt: skip
        super().__init__()
        self.filter_backend, self.node, self._filling = filter_backend, node, filling
        self._connected, self._refuses, self._prepare = connected, refuses, prepare

    def desired(self, state: State, node: Node) -> Mapping[str, Mapping[Any, Any]]:
        address = NETS[node.family].node
        settings = node.settings(node_addresses=(("eth0", address),))
        rendering: Any = MODES[self.filter_backend].rendering
        return rendering.desired_tables(service_ports((*state, *self._filling), node.family, node.behaviour), settings)  # type: ignore[no-any-return]

    def loaded(self, state: Optional[State], node: Node) -> Contents:
        """Return what the kernel of a node holds that serves a state, None if it serves nothing."""
        kernel = Kernel(Contents())
        if state is not None:
            self._apply(kernel, self.desired(state, node))
        return kernel.held

    def _apply(self, kernel: Kernel, desired: Mapping[str, Mapping[Any, Any]], faulty: bool = False) -> None:
        with kernel.used():
            planned = plan(stages(kernel, self.node, self.filter_backend, desired))
            apply_plan(self._prepare(planned) if faulty else planned)

    def change(self, old: Optional[State], new: Optional[State], crash: int = -1, to: Optional[Node] = None) -> bool:
        """Make a change; return whether it ended after ``crash`` steps and another run continued.

        ``to``: where settings or the behaviour change as well.
        """
        to, services = to or self.node, len(old or new or ())
        start, end = self.loaded(old, self.node), self.loaded(new, to)
        where, sent = f"{old} to {new}", packets(services, self.node.family)
        earlier, ways = start, arrivals(start, sent)
        before, after = fates(ways), fates(arrivals(end, sent))

        def seen(state: Contents) -> None:
            nonlocal earlier, ways
            self.states += 1
            earlier, ways = state, arrivals_after(state, earlier, ways)
            self.faults += wrong(f"{where}: step {kernel.steps}", fates(ways), (before, after), (start, end))

        kernel = Kernel(start, seen, crash, self._refuses)
        kernel.connections = dict.fromkeys(start.real_servers, 1) if self._connected else {}
        desired = self.desired(new, to)
        try:
            self._apply(kernel, desired, True)
        except (Crashed, KernelError) as error:
            if not kernel.stopped:
                self.faults.append(f"{where}: {error!r}")
        if kernel.stopped:
            self._apply(kernel, desired, True)
        if fates(ways) != after:
            self.faults.append(f"{where}: not as desired")
        kernel.connections = {}
        steps = kernel.steps
        self._apply(kernel, desired)
        if kernel.held._replace(table=end.table) != end or kernel.held.table.observed() != end.table.observed():
            self.faults.append(f"{where}: not as desired")
        if steps != kernel.steps and not self._connected:
            self.faults.append(f"{where}: a second run changes something")
        return kernel.stopped
