# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way of packets through the hooks of a table of nftables mode."""

from __future__ import annotations

import ipaddress
import struct
from functools import cache, partial
from typing import Any, Callable, Iterator, NamedTuple, Optional

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.expressions import register_word
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    PROTOCOL_NUMBERS,
    BaseHook,
    Expression,
    Rule,
    index_bytes,
    key_length,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.slots import jhash

from .nftables import HOOKS, Object, Table
from .states import NODES, Packet


class Way(NamedTuple):
    """A packet behind some rules: where it goes, and what has been done to it."""

    address: bytes
    port: int
    mark: int = 0
    redirected: bool = False
    masqueraded: bool = False


Registers = bytes
#: Takes a packet through a chain; returns verdicts with the packet behind it.
Walk = Callable[[Way], set[tuple[str, Way]]]
#: A verdict, None where the next expression or rule follows, with the packet and the registers.
Step = tuple[Optional[str], Way, Registers]
_LOCAL = {ipaddress.ip_address(node).packed for node in NODES}
_NO_MATCH = "no match"
_EMPTY: Registers = bytes(64)


@cache
def packed(address: str) -> bytes:
    """Return an address as the kernel has it."""
    return ipaddress.ip_address(address).packed


class Traversal:
    """The ways of a packet through a table: all, where random numbers decide.

    ``outcomes``: ``drop``, ``reject``, or where the packet goes and whether it is masqueraded. ``read``: the objects
    on which they depend. ``more_local``: further addresses of the node.
    """

    more_local: frozenset[bytes] = frozenset()
    #: The verdicts after which no hook is asked.
    ends: tuple[str, ...] = ("drop", "reject")

    def __init__(self, table: Table, packet: Packet) -> None:
        self._table = table
        self._packet = packet
        self._source, self._destination = map(packed, packet[:2])
        self.read: set[Object] = {HOOKS}
        self.local = _LOCAL | self.more_local
        chains = ((name, chain.base) for name, chain in table.chains.items() if chain.base is not None)
        self._hooks: dict[str, list[tuple[int, str]]] = {}
        for name, base in chains:
            assert isinstance(base, BaseHook)
            self._hooks.setdefault(base.hook, []).append((base.priority, name))
        self.outcomes: frozenset[Any] = frozenset(self._through())

    def _through(self) -> Iterator[Any]:
        from_node = self._source in self.local
        start = Way(self._destination, self._packet.port)
        for verdict, way in self._hook("output" if from_node else "prerouting", start):
            to_node = way.address in self.local
            rest = [*(["postrouting"] if from_node else []), *(["input"] if to_node else [])]
            yield from self._rest(verdict, way, rest if from_node or to_node else ["forward", "postrouting"])

    def _rest(self, verdict: str, way: Way, hooks: list[str]) -> Iterator[Any]:
        if verdict in self.ends:
            yield from self._end(verdict, way)
        elif hooks:
            for next_verdict, after in self._hook(hooks[0], way):
                yield from self._rest(next_verdict, after, hooks[1:])
        else:
            yield way._replace(mark=0)

    def _end(self, verdict: str, _way: Way) -> Iterator[Any]:
        yield verdict

    def _hook(self, name: str, start: Way) -> set[tuple[str, Way]]:
        ways, ended = {start}, set()
        for chain in self._chains(name):
            results = {result for way in ways for result in chain(way)}
            ended |= {(verdict, way) for verdict, way in results if verdict in self.ends}
            ways = {way for verdict, way in results if verdict not in self.ends}
        return ended | {("accept", way) for way in ways}

    def _chains(self, hook: str) -> Iterator[Walk]:
        """Yield the base chains of a hook in the order in which the kernel asks them."""
        for _priority, name in sorted(self._hooks.get(hook, ())):
            yield partial(self._chain, name)

    def _chain(self, name: str, start: Way) -> set[tuple[str, Way]]:
        """Return verdicts, ``return`` at the end of the chain, with the packet behind it."""
        self.read.add(("chain", name, b""))
        results: set[tuple[str, Way]] = set()
        ways = {start}
        for rule in self._table.chains[name].rules:
            following: set[Way] = set()
            for verdict, way in (result for each in ways for result in self._rule(rule, each)):
                word, _space, target = verdict.partition(" ")
                if word in ("jump", "goto"):
                    inner = self._chain(target, way)
                    returned = {after for end, after in inner if end == "return"}
                    results |= {(end, after) for end, after in inner if end != "return"}
                    if word == "jump":
                        following |= returned
                    else:
                        results |= {("return", after) for after in returned}
                elif word:
                    results.add((word, way))
                else:
                    following.add(way)
            ways = following
        return results | {("return", way) for way in ways}

    def _rule(self, rule: Rule, start: Way) -> Iterator[tuple[str, Way]]:
        """Yield verdicts, empty where the next rule follows, with the packet behind the rule."""
        pending: list[tuple[int, Way, Registers]] = [(0, start, _EMPTY)]
        parts = rule.expressions
        while pending:
            position, way, registers = pending.pop()
            if position == len(parts):
                yield "", way
                continue
            part = parts[position]
            for verdict, after, held in getattr(self, "_" + part.name)(part, way, registers):
                if verdict is None:
                    pending.append((position + 1, after, held))
                else:
                    yield ("" if verdict == _NO_MATCH else verdict), after

    @staticmethod
    def _with(registers: Registers, number: int, data: bytes) -> Registers:
        start = 4 * register_word(number)
        data += bytes(-len(data) % 4)
        return registers[:start] + data + registers[start + len(data) :]

    @staticmethod
    def _held(registers: Registers, number: int, size: int) -> bytes:
        start = 4 * register_word(number)
        return registers[start : start + size]

    def _payload(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        if part.get(2) == 1:
            ends = {8: self._source, 24: way.address} if len(way.address) == 16 else {12: self._source, 16: way.address}
            data = ends[part.get(3)][: part.get(4)]
        else:
            data = {0: struct.pack("!H", 40000), 2: struct.pack("!H", way.port)}[part.get(3)]
        return [(None, way, self._with(registers, part.get(1), data))]

    def _meta(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        if part.get(3):
            (mark,) = struct.unpack("=I", self._held(registers, part.get(3), 4))
            return [(None, way._replace(mark=mark), registers)]
        protocol = bytes([PROTOCOL_NUMBERS[self._packet.protocol]])
        data = {3: struct.pack("=I", way.mark), 6: b"eth0".ljust(16, b"\0"), 16: protocol}[part.get(2)]
        return [(None, way, self._with(registers, part.get(1), data))]

    def _ct(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        # The state "new", the direction, the status "destination has been translated", and the original destination.
        numbers = {0: 8, 1: 0, 2: 0x20 if way.redirected else 0}
        data = {12: struct.pack("!H", self._packet.port), **dict.fromkeys((20, 22), self._destination)}
        data.update({key: struct.pack("=I", number) for key, number in numbers.items()})
        return [(None, way, self._with(registers, part.get(1), data[part.get(2)]))]

    def _fib(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        address = self._source if part.get(3) == 1 else way.address
        return [(None, way, self._with(registers, part.get(1), struct.pack("=I", 2 if address in self.local else 1)))]

    def _cmp(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        data = part.get(3)
        held = self._held(registers, part.get(1), len(data))
        matches = {0: held == data, 1: held != data, 3: held <= data, 5: held >= data}[part.get(2)]
        return [(None if matches else _NO_MATCH, way, registers)]

    def _bitwise(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        held = self._held(registers, part.get(1), part.get(3))
        data = bytes(value & mask ^ flip for value, mask, flip in zip(held, part.get(4), part.get(5)))
        return [(None, way, self._with(registers, part.get(2), data))]

    def _lookup(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        name = part.get(1)
        key = self._held(registers, part.get(2), key_length(self._table.sets[name].key))
        self.read.add(("element", name, key))
        found = self._element(name, key)
        if part.get(5):
            return [(None if found is None else _NO_MATCH, way, registers)]
        if found is None:
            return [(_NO_MATCH, way, registers)]
        target = part.get(3, None)
        if target is None:
            return [(None, way, registers)]
        return [(found, way, registers) if target == 0 else (None, way, self._with(registers, target, found))]

    def _element(self, name: str, key: bytes) -> Any:
        """Return the data of an element, or of the range that has the key; None without one."""
        elements, size = self._table.elements[name], len(key)
        if not self._table.sets[name].is_interval:
            return elements.get(key)
        return next((data for both, data in elements.items() if both[:size] <= key <= both[size:]), None)

    def _numgen(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        return [(None, way, self._with(registers, part.get(1), index_bytes(each))) for each in range(part.get(2))]

    def _hash(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        held = self._held(registers, part.get(1), part.get(3))
        words = struct.unpack(f"={len(held) // 4}I", held)
        found = jhash(words, part.get(5)) * part.get(4) >> 32
        return [(None, way, self._with(registers, part.get(2), index_bytes(found)))]

    def _immediate(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        if part.get(1) == 0:
            return [(part.get(2), way, registers)]
        return [(None, way, self._with(registers, part.get(1), part.get(2)))]

    def _nat(self, part: Expression, way: Way, registers: Registers) -> list[Step]:
        address = self._held(registers, part.get(3), len(self._source))
        (port,) = struct.unpack("!H", self._held(registers, part.get(5), 2))
        return [("accept", way._replace(address=address, port=port, redirected=True), registers)]

    def _masq(self, _part: Expression, way: Way, registers: Registers) -> list[Step]:
        return [("accept", way._replace(masqueraded=True), registers)]

    def _reject(self, _part: Expression, way: Way, registers: Registers) -> list[Step]:
        return [("reject", way, registers)]

    def _objref(self, _part: Expression, way: Way, registers: Registers) -> list[Step]:
        return [(None, way, registers)]

    _counter = _objref

    def _dynset(self, _part: Expression, way: Way, registers: Registers) -> list[Step]:
        return [(None, way, registers)]
