# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of the table of nftables mode, with what packets meet after each transaction."""

from __future__ import annotations

from functools import cache
from typing import Any, Callable, Iterable, Mapping, Optional

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import TransactionRefused
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import Key, Value
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference

from .nftables import Crashed, Kernel, Table
from .states import NODE, Changes, Node, Packet, State, packets, service_ports
from .traversal import Traversal

Traversals = Mapping[Packet, Traversal]
Outcomes = Mapping[Packet, Any]


def wrong(where: str, now: Outcomes, before: Outcomes, after: Outcomes) -> list[str]:
    """Return a line for each packet that fares otherwise than both before and after a change."""
    found = [packet for packet, fate in now.items() if fate not in (before[packet], after[packet])]
    fates = "{}: {}: {}, before {}, after {}"
    return [fates.format(where, each, *(set(one[each]) for one in (now, before, after))) for each in found]


def described(found: Change[Any, Any]) -> list[str]:
    """Return a line for each entry in which the kernel differs from what it should hold."""
    parts = (("missing", found.added), ("wrong", found.replaced), ("left", found.removed))
    return [f"{word}: {key}" for word, part in parts for key in part]


@cache
def desired(state: Optional[State], node: Node) -> dict[Key, Value]:
    """Return the table of a state; None means a node without one."""
    if state is None:
        return {}
    ports = service_ports(state, node.family, node.behaviour)
    return RENDERING.desired_tables(ports, node.settings())["table objects"]


def traversals(table: Table, of: Iterable[Packet], earlier: Optional[Traversals] = None) -> Traversals:
    """Return the ways of packets; ``earlier``: those before the transaction that led to the table."""
    if earlier is None:
        return {packet: Traversal(table, packet) for packet in of}
    return {
        packet: known if known.read.isdisjoint(table.changed) else Traversal(table, packet)
        for packet, known in earlier.items()
    }


@cache
def steady(state: Optional[State], node: Node, services: int) -> Traversals:
    return traversals(Table(desired(state, node)), packets(services, node.family))


def fates(found: Traversals) -> Outcomes:
    return {packet: way.outcomes for packet, way in found.items()}


class Check(Changes[Optional[State]]):
    """Changes from state to state. ``faults``: what went wrong; ``states``: the tables that packets could meet.

    ``prepare``: may alter the kernel with its planner before a change, as seeded faults do.
    """

    def __init__(
        self, node: Node = NODE, most_elements: int = 1, old_kernel: bool = False,
        prepare: Callable[[Kernel], None] = lambda _kernel: None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.node = node
        self.most_elements = most_elements
        self.old_kernel = old_kernel
        self.prepare = prepare

    def change(self, old: Optional[State], new: Optional[State], crash: int = -1, to: Optional[Node] = None) -> bool:
        """Make a change; return whether the process has ended after ``crash`` transactions and another continued.

        ``to``: where settings or the behaviour change as well.
        """
        services = len(old or new or ())
        to = to or self.node
        ends = steady(old, self.node, services), steady(new, to, services)
        target = desired(new, to)
        start = Table(desired(old, self.node))
        held, now, crashed = self.applied(f"{old} to {new}", start, target, ends, ends[0], crash)
        if crashed:
            where = f"{old} to {new}, after a crash in transaction {crash + 1}"
            held, now, _crashed = self.applied(where, held, target, (now, ends[1]), now, -1)
        if difference(held.observed(), target):
            self.faults.append(f"{old} to {new}: not the desired table")
        return crashed

    def applied(
        self, where: str, held: Table, target: dict[Key, Value], ends: tuple[Traversals, Traversals], now: Traversals,
        crash: int,
    ) -> tuple[Table, Traversals, bool]:  # fmt: skip
        """Make a table the desired one, in the presence of packets that fare as ``now``.

        Return the table and the ways of packets in the end, and whether the process has ended before.
        """
        before, after = map(fates, ends)
        numbers: list[int] = []

        def seen(table: Table) -> None:
            nonlocal now
            numbers.append(len(numbers) + 1)
            now = traversals(table, (), now)
            self.faults += wrong(f"{where}: transaction {numbers[-1]}", fates(now), before, after)

        kernel = Kernel(self.node.family, held, self.most_elements, seen, self.old_kernel, crash)
        self.prepare(kernel)
        crashed = False
        try:
            kernel.apply(difference(kernel.observe(), target))
        except Crashed:
            crashed = True
        except (TransactionRefused, KeyError) as error:
            self.faults.append(f"{where}: {error!r}")
        self.states += len(numbers)
        return kernel.held, now, crashed
