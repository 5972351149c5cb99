# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Save the table ``kube-proxy`` as the kernel reports it, whichever program created it, and restore it unchanged.

Its objects are kept as netlink attributes that are not interpreted: only volatile ones (handles, use counts, counters,
expiring elements) are omitted. So a table that kube-proxy itself created is restored with everything that this project
would never create: comments, intervals, anonymous sets. Source: linux/netfilter/nf_tables.h.

=============================  ==================================================
key                            value
=============================  ==================================================
``TABLE_KEY``                  attributes of the table
``ObjectKey("chain", name)``   :class:`RawChain`
``ObjectKey("set", name)``     :class:`RawSet`, of a set or map, anonymous ones too
:class:`StatefulKey`           attributes of a named counter, quota or the like
=============================  ==================================================
"""

from __future__ import annotations

import time
from typing import Callable, Container, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

from ...errors import KernelError
from ...rendering.nftables.objects import SET_EVAL, TABLE_KEY, TABLE_NAME, ChainValue, ElementKey, ObjectKey, Rule
from ...rendering.nftables.text import chain_lines, element_texts, table_family
from ...resources import Change, Kind, Resource
from ..netlink.socket import (
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
from ..outcomes import is_missing, is_transient, is_unsupported
from . import messages
from .attributes import (
    NFT_OBJECT_COUNTER,
    NFT_OBJECT_QUOTA,
    NFTA_CHAIN_HOOK,
    NFTA_CHAIN_NAME,
    NFTA_CHAIN_POLICY,
    NFTA_CHAIN_TABLE,
    NFTA_CHAIN_TYPE,
    NFTA_CHAIN_USERDATA,
    NFTA_COUNTER_BYTES,
    NFTA_COUNTER_PACKETS,
    NFTA_COUNTER_PAD,
    NFTA_EXPR_DATA,
    NFTA_EXPR_NAME,
    NFTA_LAST_MSECS,
    NFTA_LAST_PAD,
    NFTA_LAST_SET,
    NFTA_LIST_ELEM,
    NFTA_OBJ_DATA,
    NFTA_OBJ_NAME,
    NFTA_OBJ_TABLE,
    NFTA_OBJ_TYPE,
    NFTA_OBJ_USERDATA,
    NFTA_QUOTA_CONSUMED,
    NFTA_RULE_CHAIN,
    NFTA_RULE_COMPAT,
    NFTA_RULE_EXPRESSIONS,
    NFTA_RULE_TABLE,
    NFTA_RULE_USERDATA,
    NFTA_SET_COUNT,
    NFTA_SET_DATA_LEN,
    NFTA_SET_DATA_TYPE,
    NFTA_SET_DESC,
    NFTA_SET_ELEM_DATA,
    NFTA_SET_ELEM_EXPIRATION,
    NFTA_SET_ELEM_EXPR,
    NFTA_SET_ELEM_EXPRESSIONS,
    NFTA_SET_ELEM_FLAGS,
    NFTA_SET_ELEM_KEY,
    NFTA_SET_ELEM_KEY_END,
    NFTA_SET_ELEM_LIST_ELEMENTS,
    NFTA_SET_ELEM_LIST_SET,
    NFTA_SET_ELEM_OBJREF,
    NFTA_SET_ELEM_TIMEOUT,
    NFTA_SET_ELEM_USERDATA,
    NFTA_SET_EXPR,
    NFTA_SET_EXPRESSIONS,
    NFTA_SET_FLAGS,
    NFTA_SET_GC_INTERVAL,
    NFTA_SET_ID,
    NFTA_SET_KEY_LEN,
    NFTA_SET_KEY_TYPE,
    NFTA_SET_NAME,
    NFTA_SET_OBJ_TYPE,
    NFTA_SET_POLICY,
    NFTA_SET_TABLE,
    NFTA_SET_TIMEOUT,
    NFTA_SET_USERDATA,
    NFTA_TABLE_FLAGS,
    NFTA_TABLE_NAME,
    NFTA_TABLE_USERDATA,
)
from .observation import added_up, parse_data, parse_expression, parse_hook

_NEW_OBJECT, _GET_OBJECT = messages.SUBSYSTEM | 18, messages.SUBSYSTEM | 19
_HEAD = 4

# The attributes that are kept for each kind of object, by number; all others are volatile or set by the kernel.
_TABLE_KEPT = frozenset((NFTA_TABLE_NAME, NFTA_TABLE_FLAGS, NFTA_TABLE_USERDATA))
_CHAIN_KEPT = frozenset(
    (
        NFTA_CHAIN_TABLE,
        NFTA_CHAIN_NAME,
        NFTA_CHAIN_HOOK,
        NFTA_CHAIN_POLICY,
        NFTA_CHAIN_TYPE,
        NFTA_CHAIN_USERDATA,
    )
)
_RULE_KEPT = frozenset((NFTA_RULE_TABLE, NFTA_RULE_CHAIN, NFTA_RULE_EXPRESSIONS, NFTA_RULE_COMPAT, NFTA_RULE_USERDATA))
_SET_KEPT = frozenset(
    (
        NFTA_SET_TABLE,
        NFTA_SET_NAME,
        NFTA_SET_FLAGS,
        NFTA_SET_KEY_TYPE,
        NFTA_SET_KEY_LEN,
        NFTA_SET_DATA_TYPE,
        NFTA_SET_DATA_LEN,
        NFTA_SET_POLICY,
        NFTA_SET_DESC,
        NFTA_SET_TIMEOUT,
        NFTA_SET_GC_INTERVAL,
        NFTA_SET_USERDATA,
        NFTA_SET_OBJ_TYPE,
        NFTA_SET_EXPR,
        NFTA_SET_EXPRESSIONS,
    )
)
_OBJECT_KEPT = frozenset((NFTA_OBJ_TABLE, NFTA_OBJ_NAME, NFTA_OBJ_TYPE, NFTA_OBJ_DATA, NFTA_OBJ_USERDATA))
_ELEMENT_KEPT = frozenset(
    (
        NFTA_SET_ELEM_KEY,
        NFTA_SET_ELEM_DATA,
        NFTA_SET_ELEM_FLAGS,
        NFTA_SET_ELEM_TIMEOUT,
        NFTA_SET_ELEM_USERDATA,
        NFTA_SET_ELEM_EXPR,
        NFTA_SET_ELEM_OBJREF,
        NFTA_SET_ELEM_KEY_END,
        NFTA_SET_ELEM_EXPRESSIONS,
    )
)
#: Attributes of an expression that count traffic: all of them restart at zero.
_COUNTING = {
    "counter": (NFTA_COUNTER_BYTES, NFTA_COUNTER_PACKETS, NFTA_COUNTER_PAD),
    "quota": (NFTA_QUOTA_CONSUMED,),
    "last": (NFTA_LAST_SET, NFTA_LAST_MSECS, NFTA_LAST_PAD),
}
_COUNTING_OBJECTS = {NFT_OBJECT_COUNTER: _COUNTING["counter"], NFT_OBJECT_QUOTA: _COUNTING["quota"]}
_SET_INTERVAL = 0x4
_ELEMENTS_BYTES = 60_000
_ATTEMPTS = 5


class RawChain(NamedTuple):
    """Attributes of a chain, and those of each of its rules in order."""

    definition: bytes
    rules: Tuple[bytes, ...] = ()


class RawSet(NamedTuple):
    """Attributes of a set, and those of each element: sorted, or for interval sets in reverse kernel order."""

    definition: bytes
    elements: Tuple[bytes, ...] = ()


class StatefulKey(NamedTuple):
    """The key of a named stateful object. ``type``: NFT_OBJECT_COUNTER and so on."""

    kind: str
    type: int
    name: str


RawKey = Union[ObjectKey, StatefulKey]
RawValue = Union[bytes, RawChain, RawSet]
RawTable = Dict[RawKey, RawValue]


def _without(raw: memoryview, numbers: Container[int]) -> bytes:
    """Return attributes unchanged, without those of some numbers."""
    parts = each_attribute(raw, 0, len(raw))
    return b"".join(attribute(number, bytes(part)) for number, part in parts if number not in numbers)


def _kept(
    raw: memoryview,
    kept: Container[int],
    start: int = 0,
    rewrite: Optional[Mapping[int, Callable[[memoryview], bytes]]] = None,
) -> bytes:
    """Return attributes of the numbers ``kept``; those of ``rewrite`` are replaced by its result."""
    parts = []
    for number, part in each_attribute(raw, start, len(raw)):
        if number in kept:
            change = (rewrite or {}).get(number)
            parts.append(attribute(number, bytes(part) if change is None else change(part)))
    return b"".join(parts)


def _expression(raw: memoryview) -> bytes:
    """Return an expression without its counters."""
    outer = parse_attributes(raw, 0, len(raw))
    name = attribute_text(outer[NFTA_EXPR_NAME]) if NFTA_EXPR_NAME in outer else ""
    counting = _COUNTING.get(name)
    if counting is None or NFTA_EXPR_DATA not in outer:
        return bytes(raw)
    return text_attribute(NFTA_EXPR_NAME, name) + nested(NFTA_EXPR_DATA, _without(outer[NFTA_EXPR_DATA], counting))


def _expressions(raw: memoryview) -> bytes:
    return b"".join(nested(number, _expression(part)) for number, part in each_attribute(raw, 0, len(raw)))


def _table_flags(raw: memoryview) -> bytes:
    """Return the table flags without the owner mark: the process that restores the table does not own it."""
    return (int.from_bytes(raw, "big") & ~(messages.TABLE_OWNER | messages.TABLE_PERSIST)).to_bytes(4, "big")


def _object(raw: memoryview, start: int) -> Tuple[StatefulKey, bytes]:
    found = parse_attributes(raw, start, len(raw))
    number = int.from_bytes(found[NFTA_OBJ_TYPE], "big")
    counting = _COUNTING_OBJECTS.get(number, ())
    kept = _kept(raw, _OBJECT_KEPT, start, {NFTA_OBJ_DATA: lambda data: _without(data, counting)})
    return StatefulKey("object", number, attribute_text(found[NFTA_OBJ_NAME])), kept


class RawReader:
    """Reads the table of one family over a socket."""

    def __init__(self, sock: NetlinkSocket, family: str) -> None:
        self._sock = sock
        self._header = messages.family_header(family)
        self._in_table = self._header + text_attribute(NFTA_TABLE_NAME, TABLE_NAME)

    def _dump(self, kind: int, payload: bytes) -> Iterator[memoryview]:
        try:
            slices = self._sock.dump(kind, payload)
        except NetlinkRefusal as refusal:
            if is_missing(refusal.error) or is_unsupported(refusal.error):
                return
            raise KernelError(f"table {TABLE_NAME} cannot be read: {refusal.error}") from refusal
        for view, _kind, start, end in slices:
            yield view[start:end]

    def _of_table(self, kind: int) -> Iterator[Tuple[memoryview, Dict[int, memoryview]]]:
        for view in self._dump(kind, self._in_table):
            found = parse_attributes(view, _HEAD, len(view))
            # The name of the table has the same number in tables, chains, rules, sets and objects.
            if attribute_text(found[NFTA_TABLE_NAME]) == TABLE_NAME:
                yield view, found

    def everything(self) -> RawTable:
        """Return the whole table; empty if there is none. Raises KernelError."""
        table: RawTable = {}
        for view in self._dump(messages.GET_TABLE, self._header):
            if attribute_text(parse_attributes(view, _HEAD, len(view))[NFTA_TABLE_NAME]) == TABLE_NAME:
                table[TABLE_KEY] = _kept(view, _TABLE_KEPT, _HEAD, {NFTA_TABLE_FLAGS: _table_flags})
        if not table:
            return table
        for view, _found in self._of_table(_GET_OBJECT):
            key, value = _object(view, _HEAD)
            table[key] = value
        rules: Dict[str, List[bytes]] = {}
        rewrite = {NFTA_RULE_EXPRESSIONS: _expressions}
        for view, found in self._of_table(messages.GET_RULE):
            chain = attribute_text(found[NFTA_RULE_CHAIN])
            rules.setdefault(chain, []).append(_kept(view, _RULE_KEPT, _HEAD, rewrite))
        for view, found in self._of_table(messages.GET_CHAIN):
            name = attribute_text(found[NFTA_CHAIN_NAME])
            table[ObjectKey("chain", name)] = RawChain(_kept(view, _CHAIN_KEPT, _HEAD), tuple(rules.get(name, ())))
        for view, found in list(self._of_table(messages.GET_SET)):
            name = attribute_text(found[NFTA_SET_NAME])
            flags = int.from_bytes(found.get(NFTA_SET_FLAGS, b""), "big")
            count = int.from_bytes(found[NFTA_SET_COUNT], "big") if NFTA_SET_COUNT in found else None
            rewrite = {NFTA_SET_EXPR: _expression, NFTA_SET_EXPRESSIONS: _expressions}
            elements = () if flags & SET_EVAL else self._elements(name, bool(flags & _SET_INTERVAL), count)
            table[ObjectKey("set", name)] = RawSet(_kept(view, _SET_KEPT, _HEAD, rewrite), elements)
        return table

    def _elements(self, name: str, interval: bool, count: Optional[int]) -> Tuple[bytes, ...]:
        """Return the elements of a set; ``interval``: of ranges, which are not in a hash table and keep their order."""
        if interval:
            return tuple(reversed(list(dict.fromkeys(self._dumped_elements(name)))))
        return tuple(sorted(added_up(lambda: ((element, True) for element in self._dumped_elements(name)), count)))

    def _dumped_elements(self, name: str) -> Iterator[bytes]:
        rewrite = {NFTA_SET_ELEM_EXPR: _expression, NFTA_SET_ELEM_EXPRESSIONS: _expressions}
        for view in self._dump(messages.GET_ELEMENT, self._in_table + text_attribute(NFTA_SET_ELEM_LIST_SET, name)):
            nest = parse_attributes(view, _HEAD, len(view)).get(NFTA_SET_ELEM_LIST_ELEMENTS, memoryview(b""))
            for _kind, raw in each_attribute(nest, 0, len(nest)):
                if not any(number == NFTA_SET_ELEM_EXPIRATION for number, _part in each_attribute(raw, 0, len(raw))):
                    yield _kept(raw, _ELEMENT_KEPT, 0, rewrite)


def replacement(family: str, present: bool, wanted: RawTable) -> List[Message]:
    """Return one transaction that deletes the table if it is ``present`` and creates the wanted one, if any."""
    header = messages.family_header(family)
    in_table = header + text_attribute(NFTA_TABLE_NAME, TABLE_NAME)
    batch: List[Message] = [messages.BATCH_BEGIN]
    if present:
        batch.append((messages.DELETE_TABLE, 0, in_table))
    table = wanted.get(TABLE_KEY)
    if isinstance(table, bytes):
        batch.append((messages.NEW_TABLE, NLM_F_CREATE, header + table))
        make = NLM_F_CREATE | NLM_F_EXCL
        for key, value in wanted.items():
            if isinstance(key, StatefulKey) and isinstance(value, bytes):
                batch.append((_NEW_OBJECT, make, header + value))
        chains = [value for value in wanted.values() if isinstance(value, RawChain)]
        batch += [(messages.NEW_CHAIN, make, header + chain.definition) for chain in chains]
        sets = [(key.name, value) for key, value in wanted.items() if isinstance(value, RawSet)]
        for number, (_name, item) in enumerate(sets, 1):
            identity = attribute(NFTA_SET_ID, number.to_bytes(4, "big"))
            batch.append((messages.NEW_SET, make, header + item.definition + identity))
        # Before the rules: a set without a name accepts no more elements once a rule uses it.
        for name, item in sets:
            for block in _blocks(item.elements):
                payload = text_attribute(NFTA_SET_ELEM_LIST_SET, name) + nested(NFTA_SET_ELEM_LIST_ELEMENTS, block)
                batch.append((messages.NEW_ELEMENT, make, in_table + payload))
        for chain in chains:
            batch += [(messages.NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, header + rule) for rule in chain.rules]
    batch.append(messages.BATCH_END)
    return batch


def _blocks(elements: Tuple[bytes, ...]) -> Iterator[bytes]:
    """Yield blocks of encoded elements, as many together as one attribute holds."""
    parts: List[bytes] = []
    size = 0
    for element in elements:
        encoded = nested(NFTA_LIST_ELEM, element)
        if size + len(encoded) > _ELEMENTS_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(encoded)
        size += len(encoded)
    if parts:
        yield b"".join(parts)


class RawTableResource(Resource[RawKey, RawValue]):
    """The raw table of a family, object by object; a change replaces the whole table in one transaction."""

    kind = Kind.TABLE_OBJECTS
    atomic = True

    def __init__(self, family: str) -> None:
        self.family = family

    def observe(self) -> RawTable:
        """See the module. Raises KernelError."""
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            return RawReader(sock, self.family).everything()

    def apply(self, change: Change[RawKey, RawValue]) -> None:
        """Apply the change to the table; retry if another program changes it meanwhile. Raises KernelError."""
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
                again = any(map(is_transient, errors))
                if attempt == _ATTEMPTS or not again:
                    position = errors[0].position
                    where = f"message {position} of {len(batch)}" if position else "transaction"
                    raise KernelError(f"table {TABLE_NAME} ({self.family}) cannot be restored: {where}: {errors[0]}")
                time.sleep(0.05 * attempt)

    def describe(self, key: RawKey, value: RawValue) -> List[str]:
        """Describe one object approximately as the nft program shows it."""
        table = f"{table_family(self.family)} {TABLE_NAME}"
        if isinstance(value, RawChain):
            return [f"chain {key.name} {{", *chain_lines(_chain_value(value)), "}"]
        if isinstance(value, RawSet):
            return [f"set {key.name} {{", *(f"\t{text}" for text in map(self._element_text, value.elements)), "}"]
        if isinstance(key, StatefulKey):
            return [f"object {table} {key.name} (type {key.type})"]
        return [f"table {table}"]

    def _element_text(self, raw: bytes) -> str:
        found = parse_attributes(memoryview(raw), 0, len(raw))
        parts = (found.get(number) for number in (NFTA_SET_ELEM_KEY, NFTA_SET_ELEM_DATA))
        key, data = (None if part is None else parse_data(part) for part in parts)
        value = True if data is None else data
        return element_texts(self.family, ElementKey("element", "", key if isinstance(key, bytes) else b""), value)[0]


def rule_expressions(rule: bytes) -> Iterator[memoryview]:
    """Yield the attributes of each expression of a rule of a :class:`RawChain`."""
    parts = parse_attributes(memoryview(rule), 0, len(rule))
    raw = parts.get(NFTA_RULE_EXPRESSIONS, memoryview(b""))
    for _kind, part in each_attribute(raw, 0, len(raw)):
        yield part


def _chain_value(value: RawChain) -> ChainValue:
    """Return the chain as this project models it, with unknown parts omitted: for display only."""
    found = parse_attributes(memoryview(value.definition), 0, len(value.definition))
    rules = [Rule(tuple(map(parse_expression, rule_expressions(rule)))) for rule in value.rules]
    return ChainValue(tuple(rules), parse_hook(found))
