# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables of iptables to which the input of iptables-restore is applied, and changes of them, commit by commit."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence
from unittest import mock

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.chains import chain_ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains, saved
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.restore import RestoreError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import SavedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import NFT, XtablesVariant
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables import portions
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.canonical import target_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Resource, difference
from tests.unit.rendering.iptables.tracer import Tracer

from .check import Outcomes, wrong
from .nftables import Crashed
from .states import NODE, NODES, Changes, Node, Packet, State, packets, service_ports

Place = tuple[str, str]
Held = dict[Place, tuple[str, ...]]

_BUILTIN = {
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
}
_TARGETS = {"", "ACCEPT", "DROP", "REJECT", "RETURN", "MARK", "DNAT", "MASQUERADE"}


def empty() -> Held:
    return {(table, chain): () for table, names in _BUILTIN.items() for chain in names}


class Programs:
    """iptables-save and iptables-restore with tables in memory.

    ``seen``: called after each commit. ``crash``: after how many of them the process ends.
    """

    def __init__(self, held: Held, seen: Callable[[Held], None] = lambda _held: None, crash: int = -1) -> None:
        self.held = held
        self._seen = seen
        self._left = crash

    def save(self, *_arguments: Any) -> str:
        lines: list[str] = []
        for table, builtin in _BUILTIN.items():
            own = {chain: rules for (name, chain), rules in self.held.items() if name == table}
            lines += [f"*{table}", *(f":{chain} {'ACCEPT' if chain in builtin else '-'} [0:0]" for chain in own)]
            lines += [f"-A {chain} {rule}" for chain, rules in own.items() for rule in rules]
            lines.append("COMMIT")
        return "\n".join(lines) + "\n"

    def restore(self, _variant: Any, text: str, *_arguments: Any) -> int:
        for part in text.split("COMMIT\n")[:-1]:
            if not self._left:
                raise Crashed
            head, *lines = part.splitlines()
            self.held = self._after(head[1:], lines)
            self._left -= 1
            self._seen(self.held)
        return 0

    def _after(self, table: str, lines: list[str]) -> Held:
        held = {place: list(rules) for place, rules in self.held.items()}
        for line in lines:
            if line.startswith(":"):
                held[table, line[1:].split()[0]] = []
                continue
            option, chain, *rest = line.split(" ", 2)
            rule, place = "".join(rest), (table, chain)
            if (place in held) == (option == "-N"):
                raise RestoreError(line)
            if option == "-N":
                held[place] = []
            elif option == "-A":
                held[place].append(rule)
            elif option == "-I":
                position, _space, numbered = rule.partition(" ")
                place_in, inserted = (int(position), numbered) if position.isdigit() else (1, rule)
                if place_in > len(held[place]) + 1:
                    raise RestoreError(line)
                held[place].insert(place_in - 1, inserted)
            elif option == "-D" and rule in held[place]:
                held[place].remove(rule)
            elif option == "-X" and not held[place]:
                del held[place]
            else:
                raise RestoreError(line)
        for (name, chain), rules in held.items():
            for rule in rules:
                if target_of(rule) not in _TARGETS and (name, target_of(rule)) not in held:
                    raise RestoreError(f"{chain} {rule}")
        return {place: tuple(rules) for place, rules in held.items()}

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let the resources of chains use these programs."""
        programs = {"save": self.save, "restore": self.restore}
        here = mock.patch.multiple(chains, **programs, dormant_tables=lambda *_all: set())
        with here, mock.patch.multiple(saved, **programs, places_of_nft=lambda _family: ()):
            yield


class _KnownRules(Tracer):
    """A tracer that parses each rule once."""

    _known: dict[str, Any] = {}

    def _rule(self, text: str) -> Any:
        if text not in self._known:
            self._known[text] = super()._rule(text)
        return self._known[text]


def traced(held: Held, of: Iterable[Packet], nodes: Sequence[str] = NODES) -> Outcomes:
    """Return the outcomes of packets. ``nodes``: the addresses of the node."""
    tracer = _KnownRules({ChainKey(*place): rules for place, rules in held.items()}, nodes)
    return {packet: tracer.trace(*packet, interface="lo" if packet.source in nodes else "eth0") for packet in of}


def variant_of(family: str, name: str) -> XtablesVariant:
    return XtablesVariant(family, name, "", (1, 8, 9), "", "", "")


def desired(state: State, node: Node) -> Mapping[Any, Any]:
    settings = node.settings(node_port_cidrs=(), schedulers=frozenset())
    return RENDERING.desired_tables(service_ports(state, node.family, node.behaviour), settings)["chains"]


def resource_of(node: Node, variant: str, state: Optional[Mapping[Any, Any]] = None) -> Resource[Any, Any]:
    """Return the resource of the chains, or, with a saved ``state``, the one that restores it."""
    of = variant_of(node.family, variant)
    ownership = chain_ownership(node.settings(), True)
    return ChainsResource(of, ownership) if state is None else SavedChainsResource(of, ownership, state)


@cache
def loaded(state: Optional[State], node: Node) -> Held:
    programs = Programs(empty())
    if state is not None:
        with programs.used():
            resource_of(node, "legacy").apply(difference({}, desired(state, node)))
    return programs.held


@cache
def steady(state: Optional[State], node: Node, services: int) -> Outcomes:
    return traced(loaded(state, node), packets(services, node.family))


class Check(Changes[Optional[State]]):
    """Changes from state to state in iptables mode. ``faults``: what went wrong; ``states``: how many commits.

    ``portion``: the number of chains of a transaction of iptables-nft, 0 for that of legacy iptables.
    """

    def __init__(self, node: Node = NODE, portion: int = 0) -> None:
        super().__init__()
        self.node = node
        self.variant = NFT if portion else "legacy"
        self._sizes = {"WHOLE": portion - 1, "PORTION": portion} if portion else {}

    def change(self, old: Optional[State], new: Optional[State], crash: int = -1, to: Optional[Node] = None) -> bool:
        """Make a change; return whether the process has ended after ``crash`` commits and another continued.

        ``to``: where settings or the behaviour change as well.
        """
        to = to or self.node
        services = len(old or new or ())
        wanted = desired(new, to) if new is not None else {}
        ends = steady(old, self.node, services), steady(new, to, services)
        where = f"{old} to {new}"
        held, now, crashed = self._applied(where, loaded(old, self.node), wanted, ends, crash)
        if crashed:
            _held, now, _crashed = self._applied(f"{where}, after a crash", held, wanted, (now, ends[1]), -1)
        if now != ends[1]:
            self.faults.append(f"{where}: not as desired")
        return crashed

    def roll_back(self, old: State, new: State) -> None:
        """Restore the chains of ``new``, as iptables-save has printed them, on a node that serves ``old``."""
        programs = Programs(loaded(new, self.node))
        with programs.used():
            state = resource_of(self.node, self.variant, {}).observe()
        ends = steady(old, self.node, len(old)), steady(new, self.node, len(new))
        _held, now, _crashed = self._applied(f"{old} back to {new}", loaded(old, self.node), state, ends, -1, True)
        if now != ends[1]:
            self.faults.append(f"{old} back to {new}: not as saved")

    def _applied(
        self, where: str, held: Held, wanted: Mapping[Any, Any], ends: tuple[Outcomes, Outcomes], crash: int,
        saved_state: bool = False,
    ) -> tuple[Held, Outcomes, bool]:  # fmt: skip
        now, crashed, number = ends[0], False, 0

        def seen(after: Held) -> None:
            nonlocal now, number
            number += 1
            now = traced(after, ends[0])
            self.faults.extend(wrong(f"{where}: commit {number}", now, *ends))

        programs = Programs(held, seen, crash)
        with programs.used(), mock.patch.multiple(portions, **self._sizes) if self._sizes else mock.MagicMock():
            try:
                resource = resource_of(self.node, self.variant, wanted if saved_state else None)
                observed = resource.observe()
                target = resource.desired(observed) if isinstance(resource, SavedChainsResource) else wanted
                resource.apply(difference(observed, target))
            except Crashed:
                crashed = True
            except (RestoreError, KeyError) as error:
                self.faults.append(f"{where}: {error!r}")
        self.states += number
        return programs.held, now, crashed
