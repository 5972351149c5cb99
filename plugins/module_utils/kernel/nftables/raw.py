# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table ``kube-proxy`` as the kernel tells it, whoever made it, and putting it back as it was.

Its objects are kept as netlink attributes that nobody has to understand: only what belongs to the moment (handles,
numbers of uses, counters, expiring elements) is left out. So a table that kube-proxy itself made comes back with
everything that this project would never make: comments, intervals, anonymous sets. Source: linux/netfilter/nf_tables.h.

=========================  ==================================================
key                        value
=========================  ==================================================
``("table",)``             attributes of the table
``("chain", name)``        :class:`RawChain`
``("set", name)``          :class:`RawSet`, of a set or map, anonymous ones too
``("object", type, name)`` attributes of a named counter, quota or the like
=========================  ==================================================
"""

from __future__ import annotations

import errno
import time
from typing import Any, Callable, Container, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from ...errors import KernelError
from ...rendering.nftables.objects import SET_EVAL, TABLE_NAME, ChainValue, Key, Rule
from ...rendering.nftables.text import chain_lines, element_texts, table_family
from ...resources import Change, Kind, Resource
from ..netlink import (
    NETLINK_NETFILTER,
    NLM_F_APPEND,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Message,
    NetlinkRefusal,
    NetlinkSocket,
    attribute,
    attribute_text,
    each_attribute,
    nested,
    parse_attributes,
    text_attribute,
)
from . import messages
from .observation import added_up, parse_data, parse_expression, parse_hook

_NEW_OBJECT, _GET_OBJECT = messages.SUBSYSTEM | 18, messages.SUBSYSTEM | 19
_HEAD = 4

# What of each kind is kept, by attribute number; everything else is of the moment or made by the kernel.
_TABLE_KEPT = frozenset((1, 2, 6))
_CHAIN_KEPT = frozenset((1, 3, 4, 5, 7, 12))
_RULE_KEPT = frozenset((1, 2, 4, 5, 7))
_SET_KEPT = frozenset((1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 17, 18))
_OBJECT_KEPT = frozenset((1, 2, 3, 4, 8))
_ELEMENT_KEPT = frozenset((1, 2, 3, 4, 6, 7, 9, 10, 11))
_TABLE_FLAGS, _SET_FLAGS, _SET_ID, _SET_COUNT = 2, 3, 10, 20
_RULE_EXPRESSIONS = 4
_ELEMENT_EXPIRATION, _ELEMENT_EXPRESSION, _ELEMENT_EXPRESSIONS = 5, 7, 11
_OBJECT_NAME, _OBJECT_TYPE, _OBJECT_DATA = 2, 3, 4
#: Attributes of an expression that count what has passed: all of these are begun anew.
_COUNTING = {"counter": (1, 2, 3), "quota": (4,), "last": (1, 2, 3)}
_COUNTING_OBJECTS = {1: (1, 2, 3), 2: (4,)}
_SET_INTERVAL = 0x4
_ELEMENTS_BYTES = 60_000
_ATTEMPTS = 5


class RawChain(NamedTuple):
    """Attributes of a chain, and those of each of its rules in order."""

    definition: bytes
    rules: Tuple[bytes, ...] = ()


class RawSet(NamedTuple):
    """Attributes of a set, and those of each element, sorted; an interval set's in the kernel's order, turned round."""

    definition: bytes
    elements: Tuple[bytes, ...] = ()


RawTable = Dict[Key, Any]


def _without(raw: memoryview, numbers: Container[int]) -> bytes:
    """Attributes, as they are, without those of some numbers."""
    parts = each_attribute(raw, 0, len(raw))
    return b"".join(attribute(number, bytes(part)) for number, part in parts if number not in numbers)


def _kept(
    raw: memoryview,
    kept: Container[int],
    start: int = 0,
    rewrite: Optional[Mapping[int, Callable[[memoryview], bytes]]] = None,
) -> bytes:
    """Attributes of the numbers ``kept``, those of ``rewrite`` as it makes them."""
    parts = []
    for number, part in each_attribute(raw, start, len(raw)):
        if number in kept:
            change = (rewrite or {}).get(number)
            parts.append(attribute(number, bytes(part) if change is None else change(part)))
    return b"".join(parts)


def _expression(raw: memoryview) -> bytes:
    """An expression without what it has counted."""
    outer = parse_attributes(raw, 0, len(raw))
    name = attribute_text(outer[1]) if 1 in outer else ""
    counting = _COUNTING.get(name)
    if counting is None or 2 not in outer:
        return bytes(raw)
    return text_attribute(1, name) + nested(2, _without(outer[2], counting))


def _expressions(raw: memoryview) -> bytes:
    return b"".join(nested(number, _expression(part)) for number, part in each_attribute(raw, 0, len(raw)))


def _table_flags(raw: memoryview) -> bytes:
    """Without the mark that the table belongs to a process: who puts it back does not keep it."""
    return (int.from_bytes(raw, "big") & ~(messages.TABLE_OWNER | messages.TABLE_PERSIST)).to_bytes(4, "big")


def _object(raw: memoryview, start: int) -> Tuple[Key, bytes]:
    found = parse_attributes(raw, start, len(raw))
    number = int.from_bytes(found[_OBJECT_TYPE], "big")
    counting = _COUNTING_OBJECTS.get(number, ())
    kept = _kept(raw, _OBJECT_KEPT, start, {_OBJECT_DATA: lambda data: _without(data, counting)})
    return ("object", number, attribute_text(found[_OBJECT_NAME])), kept


class RawReader:
    """Reads the table of one family over a socket."""

    def __init__(self, sock: NetlinkSocket, family: str) -> None:
        self._sock = sock
        self._header = messages.family_header(family)
        self._in_table = self._header + text_attribute(1, TABLE_NAME)

    def _dump(self, kind: int, payload: bytes) -> Iterator[memoryview]:
        try:
            slices = self._sock.dump(kind, payload)
        except NetlinkRefusal as refusal:
            if refusal.error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.EAFNOSUPPORT):
                return
            raise KernelError(f"table {TABLE_NAME} cannot be read: {refusal.error}") from refusal
        for view, _kind, start, end in slices:
            yield view[start:end]

    def _of_table(self, kind: int) -> Iterator[Tuple[memoryview, Dict[int, memoryview]]]:
        for view in self._dump(kind, self._in_table):
            found = parse_attributes(view, _HEAD, len(view))
            if attribute_text(found[1]) == TABLE_NAME:
                yield view, found

    def everything(self) -> RawTable:
        """The whole table; empty if there is none. Raises KernelError."""
        table: RawTable = {}
        for view in self._dump(messages.GET_TABLE, self._header):
            if attribute_text(parse_attributes(view, _HEAD, len(view))[1]) == TABLE_NAME:
                table[("table",)] = _kept(view, _TABLE_KEPT, _HEAD, {_TABLE_FLAGS: _table_flags})
        if not table:
            return table
        for view, _found in self._of_table(_GET_OBJECT):
            key, value = _object(view, _HEAD)
            table[key] = value
        rules: Dict[str, List[bytes]] = {}
        rewrite = {_RULE_EXPRESSIONS: _expressions}
        for view, found in self._of_table(messages.GET_RULE):
            rules.setdefault(attribute_text(found[2]), []).append(_kept(view, _RULE_KEPT, _HEAD, rewrite))
        for view, found in self._of_table(messages.GET_CHAIN):
            name = attribute_text(found[3])
            table[("chain", name)] = RawChain(_kept(view, _CHAIN_KEPT, _HEAD), tuple(rules.get(name, ())))
        for view, found in list(self._of_table(messages.GET_SET)):
            name, flags = attribute_text(found[2]), int.from_bytes(found.get(_SET_FLAGS, b""), "big")
            count = int.from_bytes(found[_SET_COUNT], "big") if _SET_COUNT in found else None
            rewrite = {17: _expression, 18: _expressions}
            elements = () if flags & SET_EVAL else self._elements(name, bool(flags & _SET_INTERVAL), count)
            table[("set", name)] = RawSet(_kept(view, _SET_KEPT, _HEAD, rewrite), elements)
        return table

    def _elements(self, name: str, interval: bool, count: Optional[int]) -> Tuple[bytes, ...]:
        """The elements of a set; ``interval``: of ranges, which are no hash table and keep their order."""
        if interval:
            return tuple(reversed(list(dict.fromkeys(self._dumped_elements(name)))))
        return tuple(sorted(added_up(lambda: ((element, True) for element in self._dumped_elements(name)), count)))

    def _dumped_elements(self, name: str) -> Iterator[bytes]:
        rewrite = {_ELEMENT_EXPRESSION: _expression, _ELEMENT_EXPRESSIONS: _expressions}
        for view in self._dump(messages.GET_ELEMENT, self._in_table + text_attribute(2, name)):
            nest = parse_attributes(view, _HEAD, len(view)).get(3, memoryview(b""))
            for _kind, raw in each_attribute(nest, 0, len(nest)):
                if not any(number == _ELEMENT_EXPIRATION for number, _part in each_attribute(raw, 0, len(raw))):
                    yield _kept(raw, _ELEMENT_KEPT, 0, rewrite)


def replacement(family: str, present: bool, wanted: RawTable) -> List[Message]:
    """One transaction that deletes the table if it is ``present`` and makes the wanted one, if any."""
    header = messages.family_header(family)
    in_table = header + text_attribute(1, TABLE_NAME)
    batch: List[Message] = [messages.BATCH_BEGIN]
    if present:
        batch.append((messages.DELETE_TABLE, 0, in_table))
    if ("table",) in wanted:
        batch.append((messages.NEW_TABLE, NLM_F_CREATE, header + wanted[("table",)]))
        make = NLM_F_CREATE | NLM_F_EXCL
        for key, value in wanted.items():
            if key[0] == "object":
                batch.append((_NEW_OBJECT, make, header + value))
        for key, value in wanted.items():
            if key[0] == "chain":
                batch.append((messages.NEW_CHAIN, make, header + value.definition))
        sets = [(key[1], value) for key, value in wanted.items() if key[0] == "set"]
        for number, (_name, value) in enumerate(sets, 1):
            identity = attribute(_SET_ID, number.to_bytes(4, "big"))
            batch.append((messages.NEW_SET, make, header + value.definition + identity))
        # Before the rules: a set without a name takes no more elements once a rule uses it.
        for name, value in sets:
            for block in _blocks(value.elements):
                batch.append((messages.NEW_ELEMENT, make, in_table + text_attribute(2, name) + nested(3, block)))
        for key, value in wanted.items():
            if key[0] == "chain":
                batch += [(messages.NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, header + rule) for rule in value.rules]
    batch.append(messages.BATCH_END)
    return batch


def _blocks(elements: Tuple[bytes, ...]) -> Iterator[bytes]:
    """Encoded elements, as many together as one attribute holds."""
    parts: List[bytes] = []
    size = 0
    for element in elements:
        encoded = nested(1, element)
        if size + len(encoded) > _ELEMENTS_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(encoded)
        size += len(encoded)
    if parts:
        yield b"".join(parts)


class RawTableResource(Resource[Key, Any]):
    """The table of a family as it is, object by object; a change replaces the whole table in one transaction."""

    kind = Kind.TABLE_OBJECTS
    atomic = True

    def __init__(self, family: str) -> None:
        self.family = family
        self.family = family

    def observe(self) -> RawTable:
        """See the module. Raises KernelError."""
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            return RawReader(sock, self.family).everything()

    def apply(self, change: Change[Key, Any]) -> None:
        """Make the table what it is with the change; if somebody else is at it, again. Raises KernelError."""
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            for attempt in range(1, _ATTEMPTS + 1):
                observed = RawReader(sock, self.family).everything()
                wanted = {key: value for key, value in observed.items() if key not in change.removed}
                wanted.update({key: new for key, (_old, new) in change.replaced.items()})
                wanted.update(change.added)
                batch = replacement(self.family, bool(observed), wanted)
                errors = sock.transact(batch, single_send=True, acknowledge=False).errors
                if not errors:
                    return
                again = {error.errno for error in errors} & {errno.ENOENT, errno.EEXIST, errno.EBUSY, errno.EINTR}
                if attempt == _ATTEMPTS or not again:
                    position = errors[0].position
                    where = f"message {position} of {len(batch)}" if position else "transaction"
                    raise KernelError(f"table {TABLE_NAME} ({self.family}) cannot be put back: {where}: {errors[0]}")
                time.sleep(0.05 * attempt)

    def describe(self, key: Key, value: Any) -> List[str]:
        """One object about as the nft program shows it."""
        table = f"{table_family(self.family)} {TABLE_NAME}"
        if key[0] == "table":
            return [f"table {table}"]
        if key[0] == "object":
            return [f"object {table} {key[2]} (type {key[1]})"]
        if key[0] == "chain":
            return [f"chain {key[1]} {{", *chain_lines(_chain_value(value)), "}"]
        return [f"set {key[1]} {{", *(f"\t{text}" for text in map(self._element_text, value.elements)), "}"]

    def _element_text(self, raw: bytes) -> str:
        found = parse_attributes(memoryview(raw), 0, len(raw))
        key, data = (parse_data(found[number]) if number in found else None for number in (1, 2))
        value = True if data is None else data
        return element_texts(self.family, ("element", "", key if isinstance(key, bytes) else b""), value)[0]


def rule_expressions(rule: bytes) -> Iterator[memoryview]:
    """Yield the attributes of each expression of a rule of a :class:`RawChain`."""
    parts = parse_attributes(memoryview(rule), 0, len(rule))
    raw = parts.get(_RULE_EXPRESSIONS, memoryview(b""))
    for _kind, part in each_attribute(raw, 0, len(raw)):
        yield part


def _chain_value(value: RawChain) -> ChainValue:
    """The chain as this project models it, as far as that goes: for showing it."""
    found = parse_attributes(memoryview(value.definition), 0, len(value.definition))
    rules = [Rule(tuple(map(parse_expression, rule_expressions(rule)))) for rule in value.rules]
    return ChainValue(tuple(rules), parse_hook(found))
