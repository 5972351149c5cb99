# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes in ipvs mode, with what packets meet after each message, commit and transaction."""

from __future__ import annotations

import ipaddress
from functools import cache, lru_cache, partial
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional
from unittest import mock

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables import portions
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import VirtualServerKey, server_of
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import PlannedChange, apply_plan, plan
from tests.unit.rendering.iptables import tracer
from tests.unit.rendering.iptables.tracer import Tracer

from .check import wrong as exactly_wrong
from .iptables import NFT, empty
from .ipvs import MODES, MOST_ELEMENTS, Contents, Kernel, leaving, leftovers, stages
from .nftables import Crashed, Object
from .states import NETS, NODE, NODES, Changes, Node, Packet, State, packets, service_ports
from .traversal import Traversal, Walk, Way, packed

Outcomes = Mapping[Packet, frozenset[Any]]
_OWN_PODS = {ipaddress.ip_address(pod).packed for net in NETS.values() for pod in (net.pods[0], net.pods[2])}
#: The tables of iptables by hook, with their priorities.
_PLACES = {
    "prerouting": [(-100, "nat", "PREROUTING")],
    "input": [(0, "filter", "INPUT"), (100, "nat", "INPUT")],
    "forward": [(0, "filter", "FORWARD")],
    "output": [(-100, "nat", "OUTPUT"), (0, "filter", "OUTPUT")],
    "postrouting": [(100, "nat", "POSTROUTING")],
}
#: The priorities at which IPVS takes packets, and those of the tables of iptables.
_IPVS = {"input": 98, "output": -99}
_MANGLE = {hook: [(-150, "mangle", hook.upper())] for hook in ("prerouting", "output")}
_NUMBERS = {"tcp": "6", "udp": "17"}
#: Before the name of a hook: a packet that IPVS has sent on.
_BEHIND = "behind IPVS: "


def _object(address: bytes) -> Object:
    """Return what IPVS and the dummy device have at an address, on which a way may depend."""
    return ("address", "", address)


class _Chains(Traversal):
    """The chains of another table, which a packet meets one by one."""

    def _through(self) -> Iterator[Any]:
        return iter(())


class Arrival(Traversal):
    """The ways of a packet through IPVS and all tables; outcomes are as elsewhere, ``host``, and ``lost``.

    A program of the node that connects to an address of the dummy device has that address itself: where IPVS does not
    serve it, it gets an answer from other nodes only if it is masqueraded. ``first``: which table of NAT comes first,
    as the one made last does.
    """

    ends = ("drop", "reject", "served")

    def __init__(self, state: Contents, packet: Packet, chains: Tracer, first: str = "nftables") -> None:
        self._state, self._tracer, self._first = state, chains, first
        chains.read = set()
        self._server: Optional[VirtualServerKey] = None
        self.more_local = frozenset(map(packed, state.addresses))
        self._lent = packet.source in NODES and packet.destination in state.addresses
        if self._lent:
            packet = packet._replace(source=packet.destination)
        self._services = _Chains(state.services, packet)
        self._services.local |= self.more_local
        super().__init__(state.table, packet)
        self.read |= {_of_services(each) for each in self._services.read} | chains.read
        self.read.add(_object(packed(packet.destination)))

    def _rest(self, verdict: str, way: Way, hooks: list[str]) -> Iterator[Any]:
        if verdict in self.ends or hooks:
            yield from super()._rest(verdict, way, hooks)
        elif self._server is None and way.address in self.local:
            yield "host"
        elif self._server is None and self._lent and not way.masqueraded and way.address not in _OWN_PODS:
            yield "lost"
        else:
            yield way._replace(mark=0, redirected=False)

    def _end(self, verdict: str, way: Way) -> Iterator[Any]:
        if verdict == "served":
            self._server = VirtualServerKey(self._packet.protocol, self._text(way.address), way.port)
            for each in self._real_servers():
                sent = way._replace(address=packed(each.ip), port=each.port)
                yield from list(self._rest("accept", sent, [f"{_BEHIND}output", f"{_BEHIND}postrouting"]))
            self._server = None
        else:
            yield verdict

    @staticmethod
    def _text(address: bytes) -> str:
        return str(ipaddress.ip_address(address))

    def _real_servers(self) -> list[Any]:
        servers = self._state.real_servers.items()
        return [key for key, value in servers if key.server == self._server and value.weight]

    def _chains(self, hook: str) -> Iterator[Walk]:
        behind, name = hook.startswith(_BEHIND), hook[len(_BEHIND) :] if hook.startswith(_BEHIND) else hook
        places = [*_PLACES[name], *_MANGLE.get(name, ())]
        found = [(priority, self._first != "iptables", chain, table) for priority, table, chain in places]
        for kind, of in (("", self), ("services", self._services)):
            found += [(priority, self._first != "nftables", chain, kind) for priority, chain in of._hooks.get(name, ())]
        if name in _IPVS and not behind:
            found.append((_IPVS[name], False, "", "ipvs"))
        for _priority, _order, chain, table in sorted(found):
            tables = {"": self._table, "services": self._state.services}
            base = tables[table].chains[chain].base if table in tables else None
            kind = base.type if base else table
            # The destination of a connection is translated once.
            if not (behind and name == "output" and kind == "nat"):
                yield partial(self._in, chain, table, name if kind == "nat" else "")

    def _in(self, chain: str, table: str, translating: str, way: Way) -> set[tuple[str, Way]]:
        """Return verdicts of a chain. ``translating``: its hook, if it translates addresses, which happens once."""
        if translating and (way.masqueraded if translating in ("postrouting", "input") else way.redirected):
            return {("accept", way)}
        if not table:
            return self._chain(chain, way)
        if table == "services":
            return self._services._chain(chain, way)
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

    def _nat(self, part: Any, way: Way, registers: bytes) -> list[Any]:
        if part.get(5, None) is not None:
            return super()._nat(part, way, registers)
        return [("accept", way._replace(redirected=True), registers)]


def _of_services(read: Object) -> Object:
    """Return an object of the table of nftables mode, distinct from that of the same name beside IPVS."""
    return (f"services {read[0]}", *read[1:])


def _way(state: Any) -> Way:
    address = packed(state.packet.destination)
    return Way(address, state.packet.port, state.mark, state.translated, state.masqueraded)


@cache
def _tracer(held: tuple[Any, ...], local: tuple[str, ...]) -> Tracer:
    return Tracer({ChainKey(*place): rules for place, rules in held}, (*NODES, *local))


def arrivals(state: Contents, of: Iterable[Packet], first: str = "nftables") -> dict[Packet, Arrival]:
    """Return the ways of packets. ``first``: see :class:`Arrival`."""
    chains = _tracer(tuple(sorted(state.chains.items())), tuple(sorted(state.addresses)))
    names = {key.set for key in state.elements}
    chains.sets = {name: frozenset(key.element for key in state.elements if key.set == name) for name in names}
    return {each: Arrival(state, each, chains, first) for each in of}


def arrivals_after(
    state: Contents, earlier: Contents, ways: dict[Packet, Arrival], first: str = "nftables"
) -> dict[Packet, Arrival]:
    """Return the ways of packets after a step."""
    changed: set[Object] = {("rules", *place) for place, _rules in state.chains.items() ^ earlier.chains.items()}
    elements = state.elements.keys() ^ earlier.elements.keys()
    changed |= {("set", key.set, ",".join(key.element.split(",")[:2])) for key in elements}
    changed |= set(state.table.changed if state.table is not earlier.table else ())
    changed |= set(map(_of_services, state.services.changed if state.services is not earlier.services else ()))
    tables = ((state.servers, earlier.servers), (state.real_servers, earlier.real_servers))
    keys = {key for one, other in tables for key, _value in one.items() ^ other.items()}  # type: ignore[attr-defined]
    places = {server_of(key).address for key in keys} | (state.addresses.keys() ^ earlier.addresses.keys())
    changed |= {_object(packed(address)) for address in places}
    affected = [each for each, way in ways.items() if not way.read.isdisjoint(changed)]
    return {**ways, **arrivals(state, affected, first)}


def fates(ways: Mapping[Packet, Arrival]) -> Outcomes:
    return {packet: way.outcomes for packet, way in ways.items()}


def wrong(
    where: str, now: Outcomes, ends: tuple[Outcomes, Outcomes], states: tuple[Contents, Contents], leaves: bool = False,
    refused: bool = False,
) -> list[str]:  # fmt: skip
    """Return a line for each packet that fares otherwise than docs/architecture.md says.

    ``ends``: the outcomes in the states before and after the change. ``leaves``: ipvs mode begins or ends, so that
    nothing closes other ports of an address on the dummy device meanwhile. ``refused``: the kernel has refused a
    message, perhaps one that would admit clients of a Service that is not served yet.
    """
    faults, (old, new) = [], states
    kept = (old.addresses.keys() & new.addresses.keys()) | {*NODES}
    remade = {(key.address, key.port, key.protocol) for key in old.servers.keys() ^ new.servers.keys()}
    for packet, found in now.items():
        before, after = (outcomes[packet] for outcomes in ends)
        known, by_node = before | after, packet.source in NODES
        if before != after or packet[1:] in remade:
            passing = Way(packed(packet.destination), packet.port)
            known |= {fate._replace(masqueraded=True) for fate in (*known, passing) if isinstance(fate, Way)}
            if (packet.destination in kept or by_node) and not (_served(before) and _served(after)):
                known |= {"reject", "host", passing}
            # Also of a Service that gets ranges before it gets an endpoint, and would be refused otherwise.
            if refused and not _served(before):
                known |= {"drop"}
            if by_node and "drop" in known | found:
                continue
        if leaves and packet.destination in old.addresses.keys() ^ new.addresses.keys():
            passing = Way(packed(packet.destination), packet.port)
            known |= known if _served(before) and _served(after) else {"reject", "host", passing}
        if not found <= known:
            faults.append(f"{where}: {packet}: {set(found)}, before {set(before)}, after {set(after)}")
    return faults


def _served(outcomes: frozenset[Any]) -> bool:
    return all(isinstance(fate, Way) and fate.port == 8080 for fate in outcomes)


#: Services that fill each set of the filter backend iptables, whose rules depend on that.
_FILLING = [f"{first}+external IP{last}" for first in ("narrow", "external local") for last in ("", "+UDP")]
FILLING: State = (*((traits, 3) for traits in _FILLING), ("internal local", 2), ("external local", 2))


class Check(Changes[Optional[State]]):
    """Changes from state to state in a mode, named as in ``MODES``. ``faults``: what went wrong; ``states``: how many.

    Without ipvs mode at either end, every packet must fare exactly as before or as after.

    ``to_mode``: the mode changes as well, to none if empty. ``filling``: other Services on the node. ``connected``:
    every real server of the old state has a connection, so those of TCP are drained. ``refuses``: the kernel refuses
    the message with the number ``crash``, in place of a process that ends. ``sources``: whether packets must keep or
    lose their source as in one of the states. ``portion``: the number of chains of a
    transaction of iptables-nft, 0 for that of legacy iptables. ``first``: see :class:`Arrival`. ``prepare`` and
    ``order`` may alter a plan, and the steps of which each makes one, as seeded faults do.
    """

    def __init__(
        self, mode: str, node: Node = NODE, connected: bool = False, refuses: bool = False, filling: State = (),
        to_mode: Optional[str] = None, sources: bool = True, portion: int = 0, most_elements: int = MOST_ELEMENTS,
        first: str = "nftables",
        prepare: Callable[[list[PlannedChange]], list[PlannedChange]] = lambda planned: planned,
        order: Callable[[list[Callable[[], None]]], list[Callable[[], None]]] = lambda steps: steps,
    ) -> None:  # fmt: skip
        super().__init__()
        self.mode, self.node, self._filling = mode, node, filling
        self._to_mode = mode if to_mode is None else to_mode
        self._connected, self._refuses, self._prepare, self._order = connected, refuses, prepare, order
        self._variant = NFT if portion else "legacy"
        self._sizes = {"WHOLE": portion - 1, "PORTION": portion} if portion else {"WHOLE": portions.WHOLE}
        self._most_elements, self._first, self._sources = most_elements, first, sources
        # Most changes begin or end with a state of an earlier one.
        self._steady = lru_cache(256)(self._steady_of)
        self._is_exact = not any(each and MODES[each].subsystems.ipvs for each in (mode, self._to_mode))

    def desired(self, state: State, node: Node, mode: str = "") -> Mapping[str, Mapping[Any, Any]]:
        address = NETS[node.family].node
        settings = node.settings(node_addresses=(("eth0", address),))
        if mode == "iptables mode":
            settings = settings._replace(node_port_cidrs=(), schedulers=frozenset())
        ports = service_ports((*state, *self._filling), node.family, node.behaviour)
        rendering: Any = MODES[mode or self.mode].rendering
        return rendering.desired_tables(ports, settings)  # type: ignore[no-any-return]

    @property
    def leaves(self) -> bool:
        """Whether for some steps nothing closes other ports of an address: ipvs mode begins or ends."""
        return self.mode != self._to_mode

    def _steady_of(
        self, state: Optional[State], node: Node, mode: str, services: int
    ) -> tuple[Contents, dict[Packet, Arrival]]:
        """Return what the kernel holds that serves a state, and the ways of packets then."""
        held = self.loaded(state, node, mode)
        return held, arrivals(held, packets(services, self.node.family), self._first)

    def loaded(self, state: Optional[State], node: Node, mode: str = "") -> Contents:
        """Return what the kernel of a node holds that serves a state, None if it serves nothing."""
        kernel = Kernel(Contents(), family=node.family)
        if state is not None:
            self._apply(kernel, state, node, mode or self.mode)
        return kernel.held

    def _apply(self, kernel: Kernel, state: Optional[State], node: Node, mode: str, faulty: bool = False) -> None:
        """Make the node serve a state in a mode, as ``converge`` does: what it needs, then what others have left."""

        def serve() -> None:
            planned = plan(stages(kernel, node, mode, self.desired(state or (), node, mode), self._variant))
            apply_plan(self._prepare(planned) if faulty else planned)

        def leave() -> None:
            apply_plan(plan(leaving(kernel, mode)))

        def clean_up() -> None:
            apply_plan(plan(leftovers(kernel, node, mode, self._variant)))

        steps = [*([serve] if mode else []), leave, clean_up]
        with kernel.used(), mock.patch.multiple(portions, **self._sizes):
            for step in self._order(steps) if faulty else steps:
                step()

    def change(self, old: Optional[State], new: Optional[State], crash: int = -1, to: Optional[Node] = None) -> bool:
        """Make a change; return whether it ended after ``crash`` steps and another run continued.

        ``to``: where settings or the behaviour change as well.
        """
        to, services = to or self.node, len(old or new or ())
        start, ways = self._steady(old, self.node, self.mode, services)
        end, ways_after = self._steady(new if self._to_mode else None, to, self._to_mode, services)
        where = f"{old} to {new}, {self.mode} to {self._to_mode}"
        earlier, before, after = start, fates(ways), fates(ways_after)

        def seen(state: Contents) -> None:
            nonlocal earlier, ways
            self.states += 1
            earlier, ways = state, arrivals_after(state, earlier, ways, self._first)
            now, *ends = (found if self._sources else _unmasqueraded(found) for found in (fates(ways), before, after))
            step = f"{where}: step {kernel.steps}"
            if self._is_exact:
                self.faults += exactly_wrong(step, now, *ends)
            else:
                refused = self._refuses and kernel.stopped
                self.faults += wrong(step, now, (ends[0], ends[1]), (start, end), self.leaves, refused)

        kernel = Kernel(start, seen, crash, self._refuses, self.node.family)
        kernel.most_elements = self._most_elements
        kernel.connections = dict.fromkeys(start.real_servers, 1) if self._connected else {}
        try:
            self._apply(kernel, new, to, self._to_mode, True)
        except (Crashed, KernelError) as error:
            if not kernel.stopped:
                self.faults.append(f"{where}: {error!r}")
        if kernel.stopped:
            self._apply(kernel, new, to, self._to_mode, True)
        if fates(ways) != after and not (self._connected and self.mode != self._to_mode):
            self.faults.append(f"{where}: not as desired")
        kernel.connections = {}
        steps = kernel.steps
        self._apply(kernel, new, to, self._to_mode)
        if _comparable(kernel.held) != _comparable(end):
            self.faults.append(f"{where}: not as desired")
        if steps != kernel.steps and not self._connected:
            self.faults.append(f"{where}: a second run changes something")
        return kernel.stopped


def _unmasqueraded(found: Outcomes) -> Outcomes:
    """Return outcomes without what happens to the source of packets."""
    return {
        packet: frozenset(fate._replace(masqueraded=False) if isinstance(fate, Way) else fate for fate in several)
        for packet, several in found.items()
    }


def _comparable(held: Contents) -> Any:
    """Return contents with tables in the form in which they are read, and the jumps of built-in chains in any order."""
    chains = {**held.chains, **{place: tuple(sorted(held.chains[place])) for place in empty()}}
    return held._replace(table=held.table.observed(), services=held.services.observed(), chains=chains)
