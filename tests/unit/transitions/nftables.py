# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A table of nftables to which messages are applied as the kernel would, and the way of packets through its hooks."""

from __future__ import annotations

import ipaddress
import struct
from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import (
    attribute_text,
    each_attribute,
    parse_attributes,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import messages as m
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.decoding import (
    parse_elements,
    parse_expression,
    parse_hook,
    parse_set,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import (
    NftablesResource,
    TransactionRefused,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Labelled
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.user_data import rule_comment
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.expressions import register_word
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    PROTOCOL_NUMBERS,
    BaseHook,
    ChainValue,
    ElementKey,
    Expression,
    Key,
    ObjectKey,
    Rule,
    SetValue,
    TableValue,
    Value,
    index_bytes,
    index_of,
    key_length,
    list_items,
    list_value,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.slots import jhash
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Part

from .states import NODES, Packet


def target_of(verdict: Any) -> str:
    """Return the chain to which a verdict leads, empty if to none."""
    return verdict.partition(" ")[2] if isinstance(verdict, str) else ""


#: A chain or an element: kind, name, and the key of an element. ``HOOKS``: which chains have one.
Object = Tuple[str, str, bytes]
HOOKS: Object = ("hooks", "", b"")


class Table:
    """The sets, chains and elements of a table; the elements of lists are single ones. It never changes.

    ``changed``: what the transaction that led to the table has changed.
    """

    def __init__(self, desired: Mapping[Key, Value]) -> None:
        #: The key of the table itself; None while there is none.
        self.key: Optional[Key] = next((key for key in desired if key.kind == "table"), None)
        self.sets: Dict[str, SetValue] = {}
        self.chains: Dict[str, ChainValue] = {}
        self.elements: Dict[str, Dict[bytes, Any]] = {}
        self.changed: Set[Object] = set()
        for key, value in desired.items():
            if isinstance(value, SetValue):
                self.sets[key.name] = value
                self.elements[key.name] = {}
            elif isinstance(value, ChainValue):
                self.chains[key.name] = value
        for key, value in desired.items():
            if isinstance(key, ElementKey) and key.kind == "list":
                found = {key.key + index_bytes(index): data for index, data in list_items(value)}  # type: ignore[arg-type]
                self.elements[key.name].update(found)
            elif isinstance(key, ElementKey):
                self.elements[key.name][key.key] = value

    def observed(self) -> Dict[Key, Value]:
        """Return what is read from the kernel."""
        if self.key is None:
            return {}
        found: Dict[Key, Value] = {self.key: TableValue()}
        found.update({ObjectKey("chain", name): value for name, value in self.chains.items()})
        for name, value in self.sets.items():
            found[ObjectKey("set", name)] = value
            lists: Dict[bytes, Dict[int, bytes]] = {}
            for key, data in self.elements[name].items():
                if value.is_list:
                    lists.setdefault(key[:-4], {})[index_of(key[-4:])] = data
                else:
                    found[ElementKey("element", name, key)] = data
            found.update({ElementKey("list", name, key): list_value(items) for key, items in lists.items()})
        return found

    def after(self, messages: Iterable[Labelled], old_kernel: bool = False) -> Table:
        """Return the table after a transaction. Raises TransactionRefused.

        ``old_kernel``: before Linux 6.2 a chain cannot be removed together with the last element that leads to it.
        """
        table = Table({})
        table.key, table.sets, table.chains = self.key, dict(self.sets), dict(self.chains)
        table.elements = {name: dict(found) for name, found in self.elements.items()}
        led_to = {target_of(data) for found in self.elements.values() for data in found.values()} if old_kernel else ()
        for labelled in messages:
            kind, _flags, payload = labelled.message
            if kind == m.DELETE_CHAIN and labelled.chain in led_to:
                raise TransactionRefused(labelled.label, transient=True, busy_chains=True)
            table._apply(kind, parse_attributes(memoryview(payload), 4, len(payload)), labelled.label)
        return table

    def _apply(self, kind: int, found: Dict[int, memoryview], label: str) -> None:
        of_chain = kind in (m.NEW_CHAIN, m.DELETE_CHAIN)
        of_table = kind in (m.NEW_TABLE, m.DELETE_TABLE)
        name = attribute_text(found[1 if of_table else 3 if of_chain else 2])
        self.changed |= {("chain", name, b""), HOOKS} if of_chain or of_table else {("chain", name, b"")}
        if kind == m.NEW_TABLE:
            self.key = ObjectKey("table", name)
        elif kind == m.DELETE_TABLE:
            self._expect(self.key is not None, label)
            self.key, self.sets, self.chains, self.elements = None, {}, {}, {}
        else:
            self._expect(self.key is not None, label)
            self._apply_to_object(kind, name, found, label)

    def _apply_to_object(self, kind: int, name: str, found: Dict[int, memoryview], label: str) -> None:
        if kind == m.NEW_SET:
            self._expect(name not in self.sets, label)
            self.sets[name], self.elements[name] = parse_set(found), {}
        elif kind == m.DELETE_SET:
            self._expect(name in self.sets and name not in self._used_sets(), label)
            del self.sets[name], self.elements[name]
        elif kind == m.NEW_CHAIN:
            self._expect(name not in self.chains, label)
            self.chains[name] = ChainValue((), parse_hook(found))
        elif kind == m.DELETE_CHAIN:
            self._expect(name in self.chains and name not in self._used_chains(), label)
            del self.chains[name]
        elif kind == m.DELETE_RULE:
            self._expect(name in self.chains, label)
            self.chains[name] = self.chains[name]._replace(rules=())
        elif kind == m.NEW_RULE:
            self._add_rule(name, found, label)
        else:
            self._change_elements(kind == m.NEW_ELEMENT, name, parse_elements([bytes(found[3])]), label)

    def _add_rule(self, name: str, found: Dict[int, memoryview], label: str) -> None:
        parts = tuple(parse_expression(part) for _kind, part in each_attribute(found[4], 0, len(found[4])))
        rule = Rule(parts, rule_comment(found, 7))
        self._expect(name in self.chains and set(_sets_of([rule])) <= self.sets.keys(), label)
        self._expect(set(_chains_of([rule])) <= self.chains.keys(), label)
        self.chains[name] = self.chains[name]._replace(rules=(*self.chains[name].rules, rule))

    def _change_elements(self, added: bool, name: str, changed: Dict[bytes, Any], label: str) -> None:
        self._expect(name in self.sets, label)
        for key, data in changed.items():
            self._expect((key in self.elements[name]) != added, label)
            self.changed.add(("element", name, key))
            if added:
                self._expect(target_of(data) in {"", *self.chains}, label)
                self.elements[name][key] = data
            else:
                del self.elements[name][key]

    def _used_sets(self) -> Set[str]:
        return {name for chain in self.chains.values() for name in _sets_of(chain.rules)}

    def _used_chains(self) -> Set[str]:
        used = {name for chain in self.chains.values() for name in _chains_of(chain.rules)}
        return used | {target_of(data) for found in self.elements.values() for data in found.values()}

    @staticmethod
    def _expect(accepted: bool, label: str) -> None:
        if not accepted:
            raise TransactionRefused(label, transient=True, busy_chains=False)


def _sets_of(rules: Iterable[Rule]) -> Iterator[str]:
    return (part.get(1) for rule in rules for part in rule.expressions if part.name in ("lookup", "dynset"))


def _chains_of(rules: Iterable[Rule]) -> Iterator[str]:
    targets = (target_of(part.get(2)) for rule in rules for part in rule.expressions if part.name == "immediate")
    return (target for target in targets if target)


class _Held:
    """What is read from a table, as a reader of the real one returns it."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def hooks(self) -> None:
        return None

    def chains(self, _hooks: None) -> Dict[Key, Value]:
        return {key: value for key, value in self._table.observed().items() if key.kind == "chain"}

    def contents(self, name: str) -> Dict[Key, Value]:
        found = self._table.observed().items()
        return {key: value for key, value in found if isinstance(key, ElementKey) and key.name == name}

    def touched(self, change: Change[Key, Value]) -> Part[Key, Value]:
        keys = {*change.added, *change.replaced, *change.removed}
        return Part({key: value for key, value in self._table.observed().items() if key in keys}, keys)


class Crashed(Exception):
    """The process has ended between two transactions."""


class Kernel(NftablesResource):
    """The resource of nftables mode with a simulated table in place of the kernel's.

    ``seen``: called with the table after each transaction. ``crash``: after how many of them the process ends.
    """

    def __init__(
        self, family: str, held: Table, most_elements: int, seen: Callable[[Table], None] = lambda _table: None,
        old_kernel: bool = False, crash: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(family, most_elements)
        self.held = held
        self.old_kernel = old_kernel
        self._seen = seen
        self._left = crash

    def observe(self) -> Dict[Key, Value]:
        return self.held.observed()

    def exists(self) -> bool:
        return self.held.key is not None

    def _parts(self, _expected: Any) -> Any:
        return _Held(self.held)

    def _reader(self) -> Any:
        return _Held(self.held)

    def _send(self, labelled: List[Labelled]) -> None:
        if not self._left:
            raise Crashed
        self.held = self.held.after(labelled, self.old_kernel)
        self._left -= 1
        self._seen(self.held)


class Way(NamedTuple):
    """A packet behind some rules: where it goes, and what has been done to it."""

    address: bytes
    port: int
    mark: int = 0
    redirected: bool = False
    masqueraded: bool = False


Registers = bytes
#: A verdict, None where the next expression or rule follows, with the packet and the registers.
Step = Tuple[Optional[str], Way, Registers]
_LOCAL = {ipaddress.ip_address(node).packed for node in NODES}
_NO_MATCH = "no match"


class Traversal:
    """The ways of a packet through a table: all, where random numbers decide.

    ``outcomes``: ``drop``, ``reject``, or where the packet goes and whether it is masqueraded. ``read``: the objects
    on which they depend.
    """

    def __init__(self, table: Table, packet: Packet) -> None:
        self._table = table
        self._packet = packet
        self._source, self._destination = (ipaddress.ip_address(each).packed for each in packet[:2])
        self.read: Set[Object] = {HOOKS}
        chains = ((name, chain.base) for name, chain in table.chains.items() if chain.base is not None)
        self._hooks: Dict[str, List[Tuple[int, str]]] = {}
        for name, base in chains:
            assert isinstance(base, BaseHook)
            self._hooks.setdefault(base.hook, []).append((base.priority, name))
        self.outcomes: FrozenSet[Any] = frozenset(self._through())

    def _through(self) -> Iterator[Any]:
        from_node = self._source in _LOCAL
        start = Way(self._destination, self._packet.port)
        for verdict, way in self._hook("output" if from_node else "prerouting", start):
            to_node = way.address in _LOCAL
            rest = [*(["postrouting"] if from_node else []), *(["input"] if to_node else [])]
            yield from self._rest(verdict, way, rest if from_node or to_node else ["forward", "postrouting"])

    def _rest(self, verdict: str, way: Way, hooks: List[str]) -> Iterator[Any]:
        if verdict in ("drop", "reject"):
            yield verdict
        elif hooks:
            for next_verdict, after in self._hook(hooks[0], way):
                yield from self._rest(next_verdict, after, hooks[1:])
        else:
            yield way._replace(mark=0)

    def _hook(self, name: str, start: Way) -> Set[Tuple[str, Way]]:
        ways, ended = {start}, set()
        for _priority, chain in sorted(self._hooks.get(name, ())):
            results = {result for way in ways for result in self._chain(chain, way)}
            ended |= {(verdict, way) for verdict, way in results if verdict in ("drop", "reject")}
            ways = {way for verdict, way in results if verdict not in ("drop", "reject")}
        return ended | {("accept", way) for way in ways}

    def _chain(self, name: str, start: Way) -> Set[Tuple[str, Way]]:
        """Return verdicts, ``return`` at the end of the chain, with the packet behind it."""
        self.read.add(("chain", name, b""))
        results: Set[Tuple[str, Way]] = set()
        ways = {start}
        for rule in self._table.chains[name].rules:
            following: Set[Way] = set()
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

    def _rule(self, rule: Rule, start: Way) -> Iterator[Tuple[str, Way]]:
        """Yield verdicts, empty where the next rule follows, with the packet behind the rule."""
        pending: List[Tuple[int, Way, Registers]] = [(0, start, bytes(64))]
        while pending:
            position, way, registers = pending.pop()
            if position == len(rule.expressions):
                yield "", way
                continue
            part = rule.expressions[position]
            for verdict, after, held in getattr(self, f"_{part.name}")(part, way, registers):
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

    def _payload(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        if part.get(2) == 1:
            ends = {8: self._source, 24: way.address} if len(way.address) == 16 else {12: self._source, 16: way.address}
            data = ends[part.get(3)][: part.get(4)]
        else:
            data = {0: struct.pack("!H", 40000), 2: struct.pack("!H", way.port)}[part.get(3)]
        return [(None, way, self._with(registers, part.get(1), data))]

    def _meta(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        if part.get(3):
            (mark,) = struct.unpack("=I", self._held(registers, part.get(3), 4))
            return [(None, way._replace(mark=mark), registers)]
        protocol = bytes([PROTOCOL_NUMBERS[self._packet.protocol]])
        data = {3: struct.pack("=I", way.mark), 6: b"eth0".ljust(16, b"\0"), 16: protocol}[part.get(2)]
        return [(None, way, self._with(registers, part.get(1), data))]

    def _ct(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        # The state "new", the direction, the status "destination has been translated", and the original destination.
        numbers = {0: 8, 1: 0, 2: 0x20 if way.redirected else 0}
        data = {12: struct.pack("!H", self._packet.port), **dict.fromkeys((20, 22), self._destination)}
        data.update({key: struct.pack("=I", number) for key, number in numbers.items()})
        return [(None, way, self._with(registers, part.get(1), data[part.get(2)]))]

    def _fib(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        address = self._source if part.get(3) == 1 else way.address
        return [(None, way, self._with(registers, part.get(1), struct.pack("=I", 2 if address in _LOCAL else 1)))]

    def _cmp(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        data = part.get(3)
        held = self._held(registers, part.get(1), len(data))
        matches = {0: held == data, 1: held != data, 3: held <= data, 5: held >= data}[part.get(2)]
        return [(None if matches else _NO_MATCH, way, registers)]

    def _bitwise(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        held = self._held(registers, part.get(1), part.get(3))
        data = bytes(value & mask ^ flip for value, mask, flip in zip(held, part.get(4), part.get(5)))
        return [(None, way, self._with(registers, part.get(2), data))]

    def _lookup(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        name = part.get(1)
        key = self._held(registers, part.get(2), key_length(self._table.sets[name].key))
        self.read.add(("element", name, key))
        found = self._table.elements[name].get(key)
        if part.get(5):
            return [(None if found is None else _NO_MATCH, way, registers)]
        if found is None:
            return [(_NO_MATCH, way, registers)]
        target = part.get(3, None)
        if target is None:
            return [(None, way, registers)]
        return [(found, way, registers) if target == 0 else (None, way, self._with(registers, target, found))]

    def _numgen(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        return [(None, way, self._with(registers, part.get(1), index_bytes(each))) for each in range(part.get(2))]

    def _hash(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        held = self._held(registers, part.get(1), part.get(3))
        words = struct.unpack(f"={len(held) // 4}I", held)
        found = jhash(words, part.get(5)) * part.get(4) >> 32
        return [(None, way, self._with(registers, part.get(2), index_bytes(found)))]

    def _immediate(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        if part.get(1) == 0:
            return [(part.get(2), way, registers)]
        return [(None, way, self._with(registers, part.get(1), part.get(2)))]

    def _nat(self, part: Expression, way: Way, registers: Registers) -> List[Step]:
        address = self._held(registers, part.get(3), len(self._source))
        (port,) = struct.unpack("!H", self._held(registers, part.get(5), 2))
        return [("accept", way._replace(address=address, port=port, redirected=True), registers)]

    def _masq(self, _part: Expression, way: Way, registers: Registers) -> List[Step]:
        return [("accept", way._replace(masqueraded=True), registers)]

    def _reject(self, _part: Expression, way: Way, registers: Registers) -> List[Step]:
        return [("reject", way, registers)]

    def _dynset(self, _part: Expression, way: Way, registers: Registers) -> List[Step]:
        return [(None, way, registers)]
