# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the table back: decode netlink dumps to values of the resource table."""

from __future__ import annotations

import struct
from typing import Any, Iterator, Mapping, NamedTuple, Optional

from ...rendering.nftables import objects as nft
from ...rendering.nftables.layout import SERVICES_TABLE
from ..netlink.attributes import attribute_text, each_attribute, number_in, parse_attributes, text_attribute
from ..netlink.outcomes import NetlinkRefusal, is_missing
from ..netlink.socket import NetlinkSocket
from . import attributes as uapi
from . import decoding, messages
from .listing import dumped
from .user_data import rule_comment

_INDEX = struct.Struct("=I")


class _Expressions(dict[bytes, nft.Expression]):
    """Encoded expressions, parsed on first use: thousands of rules share most of them."""

    def __missing__(self, encoded: bytes) -> nft.Expression:
        parsed = self[encoded] = decoding.parse_expression(memoryview(encoded))
        return parsed


class CountedSet(NamedTuple):
    """A set or map, and the number of its elements; None if the kernel does not report it (before 6.16)."""

    value: nft.SetValue
    elements: Optional[int]


def _counted(found: dict[int, memoryview]) -> CountedSet:
    return CountedSet(
        decoding.parse_set(found), number_in(found, uapi.NFTA_SET_COUNT) if uapi.NFTA_SET_COUNT in found else None
    )


class Reader:
    """Reads the table of one family over a socket. ``key``: that of the table itself."""

    def __init__(self, sock: NetlinkSocket, family: str, table: nft.TableIdentity = SERVICES_TABLE) -> None:
        self._sock = sock
        self._encoded_name = table.name.encode() + b"\x00"
        self.key = table.key
        self._expressions = _Expressions()
        self._header = messages.family_header(family)
        self._in_table = self._header + text_attribute(uapi.NFTA_TABLE_NAME, table.name)

    def table(self) -> Optional[nft.TableValue]:
        """Return the table itself, or None if there is none."""
        for buffer, _kind, start, end in dumped(self._sock, uapi.GET_TABLE, self._header):
            found = parse_attributes(buffer, start + uapi.GENMSG_BYTES, end)
            if found[uapi.NFTA_TABLE_NAME] == self._encoded_name:
                flags = number_in(found, uapi.NFTA_TABLE_FLAGS)
                return nft.TableValue(flags if flags != nft.TABLE_PERSIST else 0)
        return None

    def _objects(self, kind: int, more: bytes = b"") -> Iterator[dict[int, memoryview]]:
        for buffer, _kind, start, end in dumped(self._sock, kind, self._in_table + more):
            found = parse_attributes(buffer, start + uapi.GENMSG_BYTES, end)
            # NFTA_CHAIN_TABLE, NFTA_RULE_TABLE and NFTA_SET_TABLE are the same number.
            if found[uapi.NFTA_TABLE_NAME] == self._encoded_name:
                yield found

    def counted_sets(self) -> dict[str, CountedSet]:
        """Return all named sets and maps."""
        found = [
            each
            for each in self._objects(messages.GET_SET)
            if not number_in(each, uapi.NFTA_SET_FLAGS) & nft.SET_ANONYMOUS
        ]
        return {attribute_text(each[uapi.NFTA_SET_NAME]): _counted(each) for each in found}

    def counted_set(self, name: str) -> Optional[CountedSet]:
        """Return a set or map as it is now; None if it is missing."""
        try:
            replies = self._sock.request(messages.GET_SET, self._in_table + text_attribute(uapi.NFTA_SET_NAME, name))
        except NetlinkRefusal as refusal:
            if is_missing(refusal.error):
                return None
            raise
        payload = memoryview(replies[0].payload)
        return _counted(parse_attributes(payload, uapi.GENMSG_BYTES, len(payload)))

    def hooks(self) -> dict[str, Optional[nft.BaseHook]]:
        """Return the names of all chains, each with its hook, None if it has none."""
        chains = self._objects(messages.GET_CHAIN)
        return {attribute_text(each[uapi.NFTA_CHAIN_NAME]): decoding.parse_hook(each) for each in chains}

    def chains(self, wanted: Mapping[str, Optional[nft.BaseHook]]) -> dict[nft.Key, nft.Value]:
        """Return chains with their rules. ``wanted``: the hooks of these chains, by name."""
        return {
            nft.ObjectKey("chain", name): nft.ChainValue(tuple(self._rules(name)), hook)
            for name, hook in wanted.items()
        }

    def _rules(self, chain: str) -> Iterator[nft.Rule]:
        """Yield the rules of one chain: a dump of all rules takes time with the square of their number."""
        for found in self._objects(messages.GET_RULE, text_attribute(uapi.NFTA_RULE_CHAIN, chain)):
            raw = found.get(uapi.NFTA_RULE_EXPRESSIONS, memoryview(b""))
            parts = tuple([self._expressions[bytes(part)] for _kind, part in each_attribute(raw, 0, len(raw))])
            yield nft.Rule(parts, rule_comment(found, uapi.NFTA_RULE_USERDATA))

    def elements(self, name: str, count: Optional[int] = None) -> dict[bytes, Any]:
        """Return all elements of a set: key to True, verdict or data. ``count``: their number, if known."""
        digest = 0

        def dump() -> dict[bytes, Any]:
            nonlocal digest
            nests = self._dumped_elements(name)
            # The second dump of a large set usually repeats the first, byte by byte.
            previous, digest = digest, hash(tuple(nests))
            if digest == previous:
                return {}
            # Each part is freed when it is decoded: a set may have a million elements.
            nests.reverse()
            return decoding.parse_elements(nests.pop() for _number in range(len(nests)))

        return decoding.added_up(dump, count, messages.CATCH_ALL)

    def _dumped_elements(self, name: str) -> list[memoryview]:
        """Return the elements of a set as the kernel encodes them, many in each part."""
        payload = self._in_table + text_attribute(uapi.NFTA_SET_ELEM_LIST_SET, name)
        dump = dumped(self._sock, messages.GET_ELEMENT, payload)
        return [decoding.elements_in(buffer, start, end) for buffer, _kind, start, end in dump]

    def _ranges(self, name: str, value: nft.SetValue) -> dict[bytes, Any]:
        """Return all elements of a set of ranges: see :func:`ranges`."""
        elements = [raw for nest in self._dumped_elements(name) for _number, raw in each_attribute(nest, 0, len(nest))]
        return decoding.ranges(elements, bool(value.flags & nft.SET_CONCAT))

    def contents(self, name: str) -> Iterator[tuple[nft.Key, nft.Value]]:
        """Yield the elements of a set as entries of the resource table, one at a time: a set may have a million.

        There are none in a dynamic set, whose elements only the packet path adds, and in one that is missing.
        """
        value, count = self.counted_set(name) or (nft.SetValue((), dynamic=True), None)
        if value.dynamic:
            return
        elements = self._ranges(name, value) if value.is_interval else self.elements(name, count)
        if value.is_interval or not value.is_list:
            for key, data in elements.items():
                yield nft.ElementKey("element", name, key), data
            return
        lists: dict[bytes, dict[int, bytes]] = {}
        catch_all = elements.pop(messages.CATCH_ALL, None)
        shared: dict[bytes, bytes] = {}
        while elements:
            # Frees what is no longer needed. Weights and hashing repeat few endpoints in many places.
            key, data = elements.popitem()
            items = lists.get(key[:-4])
            if items is None:
                items = lists[key[:-4]] = {}
            items[_INDEX.unpack(key[-4:])[0]] = shared.setdefault(data, data)
        for key, items in lists.items():
            yield nft.ElementKey("list", name, key), nft.list_value(items)
        if catch_all is not None:
            yield nft.ElementKey("element", name, messages.CATCH_ALL), catch_all
