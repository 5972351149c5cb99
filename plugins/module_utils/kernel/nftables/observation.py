# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the table back: decode netlink dumps to values of the resource table."""

from __future__ import annotations

import struct
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

from ...rendering.nftables.layout import SERVICES_TABLE
from ...rendering.nftables.objects import (
    SET_ANONYMOUS,
    SET_CONCAT,
    TABLE_PERSIST,
    ChainValue,
    ElementKey,
    Expression,
    Key,
    ObjectKey,
    Rule,
    SetValue,
    TableIdentity,
    TableValue,
    Value,
    list_value,
)
from ..netlink.attributes import attribute_text, each_attribute, parse_attributes, text_attribute
from ..netlink.outcomes import NetlinkRefusal, is_missing, is_unsupported
from ..netlink.protocol import Slice
from ..netlink.socket import NetlinkSocket
from . import messages
from .attributes import (
    GENMSG_BYTES,
    GET_TABLE,
    NFTA_CHAIN_NAME,
    NFTA_RULE_CHAIN,
    NFTA_RULE_EXPRESSIONS,
    NFTA_RULE_USERDATA,
    NFTA_SET_COUNT,
    NFTA_SET_ELEM_LIST_ELEMENTS,
    NFTA_SET_ELEM_LIST_SET,
    NFTA_SET_FLAGS,
    NFTA_SET_NAME,
    NFTA_TABLE_FLAGS,
    NFTA_TABLE_NAME,
)
from .confirmation import FEWEST_ELEMENTS, Confirmation
from .decoding import (
    added_up,
    parse_elements,
    parse_expression,
    parse_hook,
    parse_set,
    ranges,
    u32,
)
from .user_data import rule_comment

_INDEX = struct.Struct("=I")


def _dump(sock: NetlinkSocket, kind: int, payload: bytes) -> List[Slice]:
    try:
        return sock.dump(kind, payload)
    except NetlinkRefusal as refusal:
        if is_missing(refusal.error) or is_unsupported(refusal.error):
            return []
        raise


class _Expressions(Dict[bytes, Expression]):
    """Encoded expressions, parsed on first use: thousands of rules share most of them."""

    def __missing__(self, encoded: bytes) -> Expression:
        parsed = self[encoded] = parse_expression(memoryview(encoded))
        return parsed


class Reader:
    """Reads the table of one family over a socket."""

    def __init__(self, sock: NetlinkSocket, family: str, table: TableIdentity = SERVICES_TABLE) -> None:
        self._sock = sock
        self._encoded_name = table.name.encode() + b"\x00"
        self._key = table.key
        self._header = messages.family_header(family)
        self._in_table = self._header + text_attribute(NFTA_TABLE_NAME, table.name)

    def table(self) -> Optional[TableValue]:
        """Return the table itself, or None if there is none."""
        for buffer, _kind, start, end in _dump(self._sock, GET_TABLE, self._header):
            found = parse_attributes(buffer, start + GENMSG_BYTES, end)
            if found[NFTA_TABLE_NAME] == self._encoded_name:
                flags = u32(found, NFTA_TABLE_FLAGS)
                return TableValue(flags if flags != TABLE_PERSIST else 0)
        return None

    def _objects(self, kind: int) -> Iterator[Dict[int, memoryview]]:
        for buffer, _kind, start, end in _dump(self._sock, kind, self._in_table):
            found = parse_attributes(buffer, start + GENMSG_BYTES, end)
            # NFTA_CHAIN_TABLE, NFTA_RULE_TABLE and NFTA_SET_TABLE are the same number.
            if found[NFTA_TABLE_NAME] == self._encoded_name:
                yield found

    def sets(self) -> Dict[str, SetValue]:
        """Return all named sets and maps."""
        return {name: value for name, (value, _count) in self._counted_sets().items()}

    def _counted_sets(self) -> Dict[str, Tuple[SetValue, Optional[int]]]:
        """Return all named sets and maps, with the number of their elements if the kernel reports it (6.16+)."""
        sets: Dict[str, Tuple[SetValue, Optional[int]]] = {}
        for found in self._objects(messages.GET_SET):
            if not u32(found, NFTA_SET_FLAGS) & SET_ANONYMOUS:
                count = u32(found, NFTA_SET_COUNT) if NFTA_SET_COUNT in found else None
                sets[attribute_text(found[NFTA_SET_NAME])] = (parse_set(found), count)
        return sets

    def chains(self) -> Dict[str, ChainValue]:
        """Return all chains with their rules."""
        chains = self._objects(messages.GET_CHAIN)
        hooks = {attribute_text(each[NFTA_CHAIN_NAME]): parse_hook(each) for each in chains}
        rules: Dict[str, List[Rule]] = {name: [] for name in hooks}
        expressions = _Expressions()
        for found in self._objects(messages.GET_RULE):
            raw = found.get(NFTA_RULE_EXPRESSIONS, memoryview(b""))
            parts = tuple([expressions[bytes(part)] for _kind, part in each_attribute(raw, 0, len(raw))])
            rule = Rule(parts, rule_comment(found, NFTA_RULE_USERDATA))
            rules.setdefault(attribute_text(found[NFTA_RULE_CHAIN]), []).append(rule)
        return {name: ChainValue(tuple(found), hooks.get(name)) for name, found in rules.items()}

    def elements(self, name: str, count: Optional[int] = None) -> Dict[bytes, Any]:
        """Return all elements of a set: key to True, verdict or data. ``count``: their number, if known."""
        digest = 0

        def dump() -> Dict[bytes, Any]:
            nonlocal digest
            nests = self._dumped_elements(name)
            # The second dump of a large set usually repeats the first, byte by byte.
            previous, digest = digest, hash(tuple(nests))
            if digest == previous:
                return {}
            # Each part is freed when it is decoded: a set may have a million elements.
            nests.reverse()
            return parse_elements(nests.pop() for _number in range(len(nests)))

        return added_up(dump, count, messages.CATCH_ALL)

    def _dumped_elements(self, name: str) -> List[memoryview]:
        """Return the elements of a set as the kernel encodes them, many in each part."""
        payload = self._in_table + text_attribute(NFTA_SET_ELEM_LIST_SET, name)
        return [
            parse_attributes(buffer, start + GENMSG_BYTES, end).get(NFTA_SET_ELEM_LIST_ELEMENTS, memoryview(b""))
            for buffer, _kind, start, end in _dump(self._sock, messages.GET_ELEMENT, payload)
        ]

    def _ranges(self, name: str, value: SetValue) -> Dict[bytes, Any]:
        """Return all elements of a set of ranges: see :func:`ranges`."""
        elements = [raw for nest in self._dumped_elements(name) for _number, raw in each_attribute(nest, 0, len(nest))]
        return ranges(elements, bool(value.flags & SET_CONCAT))

    def everything(self, confirmation: Optional[Confirmation] = None) -> Dict[Key, Value]:
        """Return the whole table as a resource table; empty if it does not exist.

        ``confirmation``: large sets that it confirms are not read.
        """
        table: Dict[Key, Value] = {}
        found = self.table()
        if found is None:
            return table
        table[self._key] = found
        sets = self._counted_sets()
        for name, (value, _count) in sets.items():
            table[ObjectKey("set", name)] = value
        for name, chain in self.chains().items():
            table[ObjectKey("chain", name)] = chain
        for name, (value, count) in sets.items():
            if value.dynamic:
                continue
            known = None
            if confirmation is not None and count is not None and count >= FEWEST_ELEMENTS and not value.is_interval:
                known = confirmation.entries(name, count)
            table.update(known if known is not None else self._contents(name, value, count))
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

    def _contents(self, name: str, value: SetValue, count: Optional[int]) -> Iterator[Tuple[Key, Value]]:
        """Yield the elements of a set as entries of the resource table, one at a time: a set may have a million."""
        elements = self._ranges(name, value) if value.is_interval else self.elements(name, count)
        if value.is_interval or not value.is_list:
            for key, data in elements.items():
                yield ElementKey("element", name, key), data
            return
        lists: Dict[bytes, Dict[int, bytes]] = {}
        catch_all = elements.pop(messages.CATCH_ALL, None)
        shared: Dict[bytes, bytes] = {}
        while elements:
            # Frees what is no longer needed. Weights and hashing repeat few endpoints in many places.
            key, data = elements.popitem()
            items = lists.get(key[:-4])
            if items is None:
                items = lists[key[:-4]] = {}
            items[_INDEX.unpack(key[-4:])[0]] = shared.setdefault(data, data)
        for key, items in lists.items():
            yield ElementKey("list", name, key), list_value(items)
        if catch_all is not None:
            yield ElementKey("element", name, messages.CATCH_ALL), catch_all
