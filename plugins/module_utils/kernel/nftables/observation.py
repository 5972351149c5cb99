# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the table back: decode netlink dumps to values of the resource table."""

from __future__ import annotations

import struct
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, TypeVar

from ...rendering.nftables.expressions import IGNORED, OPTIONAL, SCHEMA
from ...rendering.nftables.objects import (
    DATA_TYPE_NAMES,
    HOOKS,
    SERVICES_TABLE,
    SET_ANONYMOUS,
    SET_CONCAT,
    SET_EVAL,
    SET_MAP,
    SET_TIMEOUT,
    VERDICT,
    BaseHook,
    ChainValue,
    ElementKey,
    Expression,
    Key,
    ObjectKey,
    Rule,
    SetValue,
    TableIdentity,
    Value,
    list_value,
)
from ..netlink.attributes import NLA_TYPE_MASK, attribute_text, each_attribute, parse_attributes, text_attribute
from ..netlink.protocol import Slice
from ..netlink.socket import NetlinkSocket
from ..outcomes import NetlinkRefusal, is_missing, is_unsupported
from . import messages
from .attributes import (
    NFTA_CHAIN_HOOK,
    NFTA_CHAIN_NAME,
    NFTA_CHAIN_POLICY,
    NFTA_CHAIN_TYPE,
    NFTA_DATA_VALUE,
    NFTA_DATA_VERDICT,
    NFTA_EXPR_DATA,
    NFTA_EXPR_NAME,
    NFTA_HOOK_HOOKNUM,
    NFTA_HOOK_PRIORITY,
    NFTA_NAT_FLAGS,
    NFTA_NAT_REG_ADDR_MAX,
    NFTA_NAT_REG_ADDR_MIN,
    NFTA_NAT_REG_PROTO_MAX,
    NFTA_NAT_REG_PROTO_MIN,
    NFTA_RULE_CHAIN,
    NFTA_RULE_EXPRESSIONS,
    NFTA_RULE_USERDATA,
    NFTA_SET_COUNT,
    NFTA_SET_DATA_TYPE,
    NFTA_SET_DESC,
    NFTA_SET_DESC_SIZE,
    NFTA_SET_ELEM_DATA,
    NFTA_SET_ELEM_FLAGS,
    NFTA_SET_ELEM_KEY,
    NFTA_SET_ELEM_KEY_END,
    NFTA_SET_ELEM_LIST_ELEMENTS,
    NFTA_SET_ELEM_LIST_SET,
    NFTA_SET_EXPR,
    NFTA_SET_EXPRESSIONS,
    NFTA_SET_FLAGS,
    NFTA_SET_KEY_TYPE,
    NFTA_SET_NAME,
    NFTA_SET_TIMEOUT,
    NFTA_TABLE_FLAGS,
    NFTA_TABLE_NAME,
    NFTA_VERDICT_CHAIN,
    NFTA_VERDICT_CODE,
)

_U32 = struct.Struct(">I")
_HEAD = 4
_INDEX = struct.Struct("=I")
_INCOMPLETE_ATTEMPTS = 20
_RESIZE_SECONDS = 0.05
#: A set with so few elements fits into one datagram of a dump, which the kernel reads atomically.
_FEW_ELEMENTS = 300

_NAT_RANGES = ((NFTA_NAT_REG_ADDR_MIN, NFTA_NAT_REG_ADDR_MAX), (NFTA_NAT_REG_PROTO_MIN, NFTA_NAT_REG_PROTO_MAX))

Element = TypeVar("Element")
Data = TypeVar("Data")


def _u32(found: Dict[int, memoryview], kind: int, default: int = 0) -> int:
    return int(_U32.unpack(found[kind])[0]) if kind in found else default


def _dump(sock: NetlinkSocket, kind: int, payload: bytes) -> List[Slice]:
    try:
        return sock.dump(kind, payload)
    except NetlinkRefusal as refusal:
        if is_missing(refusal.error) or is_unsupported(refusal.error):
            return []
        raise


def verdict_text(found: Dict[int, memoryview]) -> str:
    """Return ``drop``, ``goto CHAIN`` and so on, from the attributes of NFTA_DATA_VERDICT."""
    code = struct.unpack(">i", found[NFTA_VERDICT_CODE])[0]
    word = messages.VERDICT_NAMES.get(code, f"verdict {code}")
    return f"{word} {attribute_text(found[NFTA_VERDICT_CHAIN])}" if NFTA_VERDICT_CHAIN in found else word


def parse_data(raw: memoryview) -> Any:
    """Return bytes, or the text of a verdict, from NFTA_DATA attributes."""
    found = parse_attributes(raw, 0, len(raw))
    verdict = found.get(NFTA_DATA_VERDICT)
    if verdict is not None:
        return verdict_text(parse_attributes(verdict, 0, len(verdict)))
    return bytes(found.get(NFTA_DATA_VALUE, b""))


def _attribute_value(kind: str, raw: memoryview) -> Any:
    if kind == "text":
        return attribute_text(raw)
    if kind == "data":
        return parse_data(raw)
    return int.from_bytes(raw, "big")


def parse_expression(raw: memoryview) -> Expression:
    """Parse one expression to the form in which this project writes it, without defaults and repetitions."""
    outer = parse_attributes(raw, 0, len(raw))
    name = attribute_text(outer[NFTA_EXPR_NAME])
    inner = outer.get(NFTA_EXPR_DATA, memoryview(b""))
    schema = SCHEMA.get(name, {})
    values: Dict[int, Any] = {}
    for number, part in each_attribute(inner, 0, len(inner)):
        if (name, number) in IGNORED:
            continue
        kind = schema.get(number)
        value = bytes(part) if kind is None else _attribute_value(kind, part)
        if (kind is None and not any(value)) or ((name, number) in OPTIONAL and not value):
            continue
        values[number] = value
    if name == "nat":
        _normalise_nat(values)
    return Expression(name, tuple(sorted(values.items())))


def _normalise_nat(values: Dict[int, Any]) -> None:
    """Remove the upper end of a range of one, and the flags 1 and 2, which only repeat what the registers imply."""
    for lower, upper in _NAT_RANGES:
        if values.get(upper) == values.get(lower):
            values.pop(upper, None)
    values[NFTA_NAT_FLAGS] = values.get(NFTA_NAT_FLAGS, 0) & ~0x3
    if not values[NFTA_NAT_FLAGS]:
        del values[NFTA_NAT_FLAGS]


def _comment(found: Dict[int, memoryview], kind: int) -> str:
    raw = bytes(found.get(kind, b""))
    position = 0
    while position + 2 <= len(raw):
        tag, size = raw[position], raw[position + 1]
        if tag == 0:
            return raw[position + 2 : position + 2 + size].rstrip(b"\x00").decode(errors="replace")
        position += 2 + size
    return ""


def type_names(number: int) -> Tuple[str, ...]:
    """Return the parts of a concatenated type; a part without a name here is ``type-N``."""
    names: List[str] = []
    while number:
        part = number & 0x3F
        names.append(DATA_TYPE_NAMES.get(part, f"type-{part}"))
        number >>= 6
    return tuple(reversed(names))


def parse_set(found: Dict[int, memoryview]) -> SetValue:
    """Parse the definition of a set."""
    flags = _u32(found, NFTA_SET_FLAGS)
    data: Any = None
    if flags & SET_MAP:
        number = _u32(found, NFTA_SET_DATA_TYPE)
        data = (VERDICT,) if number == messages.DATA_TYPE_VERDICT else type_names(number)
    dynamic = bool(flags & SET_EVAL)
    description = found.get(NFTA_SET_DESC, memoryview(b""))
    size = _u32(parse_attributes(description, 0, len(description)), NFTA_SET_DESC_SIZE) if dynamic else 0
    timeout = int.from_bytes(found.get(NFTA_SET_TIMEOUT, b""), "big")
    if flags & SET_TIMEOUT and timeout:
        flags &= ~SET_TIMEOUT
    key = type_names(_u32(found, NFTA_SET_KEY_TYPE))
    return SetValue(
        key=key,
        data=data,
        dynamic=dynamic,
        timeout=timeout,
        size=size,
        flags=flags & ~(SET_MAP | SET_EVAL),
        counted=NFTA_SET_EXPR in found or NFTA_SET_EXPRESSIONS in found,
    )


def parse_hook(found: Dict[int, memoryview]) -> Optional[BaseHook]:
    """Return the hook of a chain, or None."""
    raw = found.get(NFTA_CHAIN_HOOK)
    if raw is None:
        return None
    hook = parse_attributes(raw, 0, len(raw))
    number = _u32(hook, NFTA_HOOK_HOOKNUM)
    name = HOOKS[number] if number < len(HOOKS) else f"hook-{number}"
    priority = struct.unpack(">i", hook[NFTA_HOOK_PRIORITY])[0]
    policy = _u32(found, NFTA_CHAIN_POLICY, 1)
    return BaseHook(attribute_text(found[NFTA_CHAIN_TYPE]), name, priority, policy)


def added_up(
    dump: Callable[[], Iterable[Tuple[Element, Data]]], count: Optional[int], uncounted: Optional[Element] = None
) -> Dict[Element, Data]:
    """Return all elements of a set, in the order received. ``count``: their number, if the kernel reports it.

    ``uncounted``: the element that the kernel does not count, if the set has it.

    While the kernel resizes a hash table, which continues for a while after a large load, a dump silently lacks
    elements. An element that was seen once exists: so dumps are merged until they are complete or, if the kernel
    reports no number, until two large ones in a row add nothing new.
    """
    found = dict(dump())
    for _attempt in range(_INCOMPLETE_ATTEMPTS):
        if len(found) - (uncounted in found) == count or (count is None and len(found) < _FEW_ELEMENTS):
            return found
        before = len(found)
        if count is not None:
            time.sleep(_RESIZE_SECONDS)
        found.update(dump())
        if len(found) == before and count is None:
            return found
    return found


def _joined(bounds: List[Tuple[bytes, bool, Any]]) -> Iterator[Tuple[bytes, Any]]:
    """Yield ranges from the elements where they begin and end: (key, whether it begins there, data)."""
    # At the same key one range ends before the next begins.
    ordered = sorted(bounds, key=lambda bound: bound[:2])
    for position, (key, begins, data) in enumerate(ordered):
        if begins:
            following = ordered[position + 1][0] if position + 1 < len(ordered) else b""
            size = len(key)
            last = (int.from_bytes(following, "big") - 1).to_bytes(size, "big") if following else b"\xff" * size
            yield key + last, data


def ranges(elements: Iterable[memoryview], concatenated: bool) -> Dict[bytes, Any]:
    """Return the ranges in encoded elements: first and last key, joined, to True, verdict or data.

    ``concatenated``: the key has several fields; where it has one, the beginning and the end of a range are apart.
    """
    found: Dict[bytes, Any] = {}
    bounds: List[Tuple[bytes, bool, Any]] = []
    for raw in elements:
        parts = parse_attributes(raw, 0, len(raw))
        key = parse_data(parts[NFTA_SET_ELEM_KEY]) if NFTA_SET_ELEM_KEY in parts else messages.CATCH_ALL
        data = parse_data(parts[NFTA_SET_ELEM_DATA]) if NFTA_SET_ELEM_DATA in parts else True
        # The element for all other keys has none.
        if concatenated or not key:
            last = parse_data(parts[NFTA_SET_ELEM_KEY_END]) if NFTA_SET_ELEM_KEY_END in parts else key
            found[key + last] = data
        else:
            flags = _u32(parts, NFTA_SET_ELEM_FLAGS)
            bounds.append((key, not flags & messages.ELEMENT_INTERVAL_END, data))
    found.update(_joined(bounds))
    return found


class Reader:
    """Reads the table of one family over a socket."""

    def __init__(self, sock: NetlinkSocket, family: str, table: TableIdentity = SERVICES_TABLE) -> None:
        self._sock = sock
        self._name = table.name
        self._key = table.key
        self._header = messages.family_header(family)
        self._in_table = self._header + text_attribute(NFTA_TABLE_NAME, table.name)

    def table_flags(self) -> Optional[int]:
        """Return the flags of the table, or None if there is no table."""
        for buffer, _kind, start, end in _dump(self._sock, messages.GET_TABLE, self._header):
            found = parse_attributes(buffer, start + _HEAD, end)
            if attribute_text(found[NFTA_TABLE_NAME]) == self._name:
                return _u32(found, NFTA_TABLE_FLAGS)
        return None

    def _objects(self, kind: int) -> Iterator[Dict[int, memoryview]]:
        for buffer, _kind, start, end in _dump(self._sock, kind, self._in_table):
            found = parse_attributes(buffer, start + _HEAD, end)
            # NFTA_CHAIN_TABLE, NFTA_RULE_TABLE and NFTA_SET_TABLE are the same number.
            if attribute_text(found[NFTA_TABLE_NAME]) == self._name:
                yield found

    def sets(self) -> Dict[str, SetValue]:
        """Return all named sets and maps."""
        return {name: value for name, (value, _count) in self._counted_sets().items()}

    def _counted_sets(self) -> Dict[str, Tuple[SetValue, Optional[int]]]:
        """Return all named sets and maps, with the number of their elements if the kernel reports it (6.16+)."""
        sets: Dict[str, Tuple[SetValue, Optional[int]]] = {}
        for found in self._objects(messages.GET_SET):
            if not _u32(found, NFTA_SET_FLAGS) & SET_ANONYMOUS:
                count = _u32(found, NFTA_SET_COUNT) if NFTA_SET_COUNT in found else None
                sets[attribute_text(found[NFTA_SET_NAME])] = (parse_set(found), count)
        return sets

    def chains(self) -> Dict[str, ChainValue]:
        """Return all chains with their rules."""
        chains = self._objects(messages.GET_CHAIN)
        hooks = {attribute_text(each[NFTA_CHAIN_NAME]): parse_hook(each) for each in chains}
        rules: Dict[str, List[Rule]] = {name: [] for name in hooks}
        for found in self._objects(messages.GET_RULE):
            raw = found.get(NFTA_RULE_EXPRESSIONS, memoryview(b""))
            parts = tuple(parse_expression(part) for _kind, part in each_attribute(raw, 0, len(raw)))
            rule = Rule(parts, _comment(found, NFTA_RULE_USERDATA))
            rules.setdefault(attribute_text(found[NFTA_RULE_CHAIN]), []).append(rule)
        return {name: ChainValue(tuple(found), hooks.get(name)) for name, found in rules.items()}

    def elements(self, name: str, count: Optional[int] = None) -> Dict[bytes, Any]:
        """Return all elements of a set: key to True, verdict or data. ``count``: their number, if known."""
        return added_up(lambda: self._dumped_elements(name), count, messages.CATCH_ALL)

    def _dumped_elements(self, name: str) -> Iterator[Tuple[bytes, Any]]:
        payload = self._in_table + text_attribute(NFTA_SET_ELEM_LIST_SET, name)
        unpack = struct.Struct("=HH").unpack_from
        for buffer, _kind, start, end in _dump(self._sock, messages.GET_ELEMENT, payload):
            found = parse_attributes(buffer, start + _HEAD, end)
            nest = found.get(NFTA_SET_ELEM_LIST_ELEMENTS)
            if nest is None:
                continue
            position, stop = 0, len(nest)
            while position + 4 <= stop:
                size = unpack(nest, position)[0]
                yield self._element(nest, position + 4, position + size, unpack)
                position += (size + 3) & ~3

    @staticmethod
    def _element(nest: memoryview, start: int, end: int, unpack: Any) -> Tuple[bytes, Any]:
        # The key comes first, then its data: nf_tables writes them in this order.
        key_size, kind = unpack(nest, start)
        if kind & NLA_TYPE_MASK == NFTA_SET_ELEM_KEY:
            after = start + key_size
            key = bytes(nest[start + 8 : after])
            if after >= end:
                return key, True
            data_size, kind = unpack(nest, after)
            is_last = kind & NLA_TYPE_MASK == NFTA_SET_ELEM_DATA and after + data_size == end
            if is_last and unpack(nest, after + 4)[1] & NLA_TYPE_MASK == NFTA_DATA_VALUE:
                return key, bytes(nest[after + 8 : end])
        found = parse_attributes(nest, start, end)
        key = parse_data(found[NFTA_SET_ELEM_KEY]) if NFTA_SET_ELEM_KEY in found else messages.CATCH_ALL
        return key, parse_data(found[NFTA_SET_ELEM_DATA]) if NFTA_SET_ELEM_DATA in found else True

    def _ranges(self, name: str, value: SetValue) -> Dict[bytes, Any]:
        """Return all elements of a set of ranges: see :func:`ranges`."""
        payload = self._in_table + text_attribute(NFTA_SET_ELEM_LIST_SET, name)
        elements: List[memoryview] = []
        for buffer, _kind, start, end in _dump(self._sock, messages.GET_ELEMENT, payload):
            nest = parse_attributes(buffer, start + _HEAD, end).get(NFTA_SET_ELEM_LIST_ELEMENTS, memoryview(b""))
            elements += [raw for _number, raw in each_attribute(nest, 0, len(nest))]
        return ranges(elements, bool(value.flags & SET_CONCAT))

    def everything(self) -> Dict[Key, Value]:
        """Return the whole table as a resource table; empty if it does not exist."""
        table: Dict[Key, Value] = {}
        if self.table_flags() is None:
            return table
        table[self._key] = True
        sets = self._counted_sets()
        for name, (value, _count) in sets.items():
            table[ObjectKey("set", name)] = value
        for name, chain in self.chains().items():
            table[ObjectKey("chain", name)] = chain
        for name, (value, count) in sets.items():
            if not value.dynamic:
                table.update(self._contents(name, value, count))
        return table

    def objects(self, wanted: Iterable[ObjectKey]) -> Dict[Key, Value]:
        """Return some sets with their elements, and chains with their rules, as a resource table."""
        keys = set(wanted)
        table: Dict[Key, Value] = {}
        if any(key.kind == "chain" for key in keys):
            chains = {ObjectKey("chain", name): value for name, value in self.chains().items()}
            table.update({key: value for key, value in chains.items() if key in keys})
        if any(key.kind == "set" for key in keys):
            for name, (value, count) in self._counted_sets().items():
                if ObjectKey("set", name) in keys:
                    table[ObjectKey("set", name)] = value
                    if not value.dynamic:
                        table.update(self._contents(name, value, count))
        return table

    def _contents(self, name: str, value: SetValue, count: Optional[int]) -> Dict[Key, Value]:
        """Return the elements of a set as entries of the resource table."""
        if value.is_interval:
            return {ElementKey("element", name, key): data for key, data in self._ranges(name, value).items()}
        elements = self.elements(name, count)
        if not value.is_list:
            return {ElementKey("element", name, key): data for key, data in elements.items()}
        lists: Dict[bytes, Dict[int, bytes]] = {}
        catch_all = elements.pop(messages.CATCH_ALL, None)
        for key, data in elements.items():
            items = lists.get(key[:-4])
            if items is None:
                items = lists[key[:-4]] = {}
            items[_INDEX.unpack(key[-4:])[0]] = data
        table: Dict[Key, Value] = {ElementKey("list", name, key): list_value(items) for key, items in lists.items()}
        if catch_all is not None:
            table[ElementKey("element", name, messages.CATCH_ALL)] = catch_all
        return table
