# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Encode values of the resource table as nf_tables messages. Source: linux/netfilter/nf_tables.h.

Payloads begin with ``struct nfgenmsg``; types are those of the nfnetlink subsystem NFNL_SUBSYS_NFTABLES.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Iterable, Iterator, Optional, Sequence

from ...base.addresses import IPV6
from ...rendering.nftables import objects as nft
from ...rendering.nftables.layout import SERVICES_TABLE
from ..netlink.attributes import NLA_F_NESTED, attribute, nested, text_attribute
from ..netlink.protocol import NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, Message
from . import attributes as uapi
from .expression_schema import SCHEMA
from .user_data import comment_bytes, set_user_data

NEW_TABLE, DELETE_TABLE = uapi.SUBSYSTEM | 0, uapi.SUBSYSTEM | 2
NEW_CHAIN, GET_CHAIN, DELETE_CHAIN = uapi.SUBSYSTEM | 3, uapi.SUBSYSTEM | 4, uapi.SUBSYSTEM | 5
NEW_RULE, GET_RULE, DELETE_RULE = uapi.SUBSYSTEM | 6, uapi.SUBSYSTEM | 7, uapi.SUBSYSTEM | 8
NEW_SET, GET_SET, DELETE_SET = uapi.SUBSYSTEM | 9, uapi.SUBSYSTEM | 10, uapi.SUBSYSTEM | 11
NEW_ELEMENT, GET_ELEMENT, DELETE_ELEMENT = uapi.SUBSYSTEM | 12, uapi.SUBSYSTEM | 13, uapi.SUBSYSTEM | 14

_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_BATCH_HEADER = struct.pack(">BBH", 0, 0, 10)
BATCH_BEGIN: Message = (_BATCH_BEGIN, 0, _BATCH_HEADER)
BATCH_END: Message = (_BATCH_END, 0, _BATCH_HEADER)

FAMILY_NUMBERS = {"inet": 1, "IPv4": 2, "bridge": 7, "IPv6": 10}

VERDICT_CODES = {"drop": 0, "accept": 1, "continue": -1, "break": -2, "jump": -3, "goto": -4, "return": -5}
VERDICT_NAMES = {code: name for name, code in VERDICT_CODES.items()}
DATA_TYPE_VERDICT = 0xFFFFFF00

_U32 = struct.Struct(">I")
_LENGTH_AND_KIND = struct.Struct("=HH")
#: An attribute holds less than 64 KiB.
_ELEMENT_BYTES = 60_000
#: The word at which the key begins in an element: after the headers of the element, its key and the key's value.
_KEY_WORD = 3
ELEMENT_INTERVAL_END, ELEMENT_CATCH_ALL = 0x1, 0x2
#: The key of the catch-all element `*`. Only other programs create it.
CATCH_ALL = b""
#: The bytes of a part of a concatenation that are compared, without those that pad it to a register.
FIELD_BYTES = {"ipv4_addr": 4, "ipv6_addr": 16, "inet_proto": 1, "inet_service": 2, nft.CLASSID: 4}

#: Part of a list: key of the frontend, indices and data, each as one concatenated string.
ListPart = tuple[bytes, bytes, bytes]


def family_header(family: str) -> bytes:
    """Return ``struct nfgenmsg`` for a family: IPv4, IPv6, ``inet`` for tables of both, or ``bridge``."""
    return struct.pack(">BBH", FAMILY_NUMBERS[family], 0, 0)


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, _U32.pack(value & 0xFFFFFFFF))


def verdict_data(text: str) -> bytes:
    """Return the attribute NFTA_DATA_VERDICT for ``drop``, ``goto CHAIN`` and so on."""
    word, _space, chain = text.partition(" ")
    target = text_attribute(uapi.NFTA_VERDICT_CHAIN, chain) if chain else b""
    return nested(uapi.NFTA_DATA_VERDICT, _u32(uapi.NFTA_VERDICT_CODE, VERDICT_CODES[word]), target)


def _attribute_bytes(kind: str, number: int, value: object) -> bytes:
    if isinstance(value, bytes):
        return nested(number, attribute(uapi.NFTA_DATA_VALUE, value)) if kind == "data" else attribute(number, value)
    if isinstance(value, str):
        return nested(number, verdict_data(value)) if kind == "data" else text_attribute(number, value)
    form = {"u8": ">B", "u16": ">H", "u64": ">Q"}.get(kind, ">I")
    return attribute(number, struct.pack(form, value))


# Most expressions of the rules of session affinity, of which there are two for each endpoint, are the same.
@lru_cache(maxsize=1024)
def expression_bytes(expression: nft.Expression) -> bytes:
    """Encode one expression as an element of NFTA_RULE_EXPRESSIONS."""
    schema = SCHEMA[expression.name]
    parts = [_attribute_bytes(schema[number], number, value) for number, value in expression.attributes]
    return nested(
        uapi.NFTA_LIST_ELEM, text_attribute(uapi.NFTA_EXPR_NAME, expression.name), nested(uapi.NFTA_EXPR_DATA, *parts)
    )


def type_number(parts: tuple[str, ...]) -> int:
    """Return the number of a concatenated type: six bits for each part."""
    number = 0
    for part in parts:
        number = number << 6 | nft.DATA_TYPES[part][0]
    return number


def columns(template: bytes, count: int, fields: Iterable[tuple[int, int, bytes]]) -> memoryview:
    """Return ``count`` copies of a template of whole words, in which some fields have a value for each copy.

    A field is (its first word, its number of words, all values concatenated). Copying one word of all elements at a
    time is ten times as fast as building one element after the other.
    """
    made = memoryview(bytearray(template * count))
    words, size = made.cast("I"), len(template) // 4
    for first, width, values in fields:
        source = memoryview(values).cast("I")
        for word in range(width):
            words[first + word :: size] = source[word::width]
    return made


def _element(key_length: int, data: bytes) -> bytes:
    """Return an element as part of NFTA_SET_ELEM_LIST_ELEMENTS, with a key of zeros."""
    key = nested(uapi.NFTA_SET_ELEM_KEY, attribute(uapi.NFTA_DATA_VALUE, bytes(key_length)))
    return nested(uapi.NFTA_LIST_ELEM, key, data)


def _element_data(value: object) -> bytes:
    """Return the data of an element: a verdict in text, bytes, or nothing in a set."""
    if isinstance(value, str):
        return nested(uapi.NFTA_SET_ELEM_DATA, verdict_data(value))
    return nested(uapi.NFTA_SET_ELEM_DATA, attribute(uapi.NFTA_DATA_VALUE, value)) if isinstance(value, bytes) else b""


class Encoder:
    """Encodes the messages for the table of one family."""

    def __init__(self, family: str, table: nft.TableIdentity = SERVICES_TABLE) -> None:
        self.family = family
        self.table_key = table.key
        self.identity = table
        self._header = family_header(family)
        self._in_table = self._header + text_attribute(uapi.NFTA_TABLE_NAME, table.name)

    def table(self) -> Message:
        """Create the table unless it exists."""
        user_data = attribute(uapi.NFTA_TABLE_USERDATA, comment_bytes(self.identity.comment))
        return (NEW_TABLE, NLM_F_CREATE, self._in_table + _u32(uapi.NFTA_TABLE_FLAGS, 0) + user_data)

    def table_flags(self, flags: int) -> Message:
        """Set the flags of the existing table; the kernel accepts a change of TABLE_DORMANT only."""
        return (NEW_TABLE, 0, self._in_table + _u32(uapi.NFTA_TABLE_FLAGS, flags))

    def delete_table(self) -> Message:
        """Delete the table with its contents."""
        return (DELETE_TABLE, 0, self._in_table)

    def set(self, name: str, value: nft.SetValue, number: int) -> Message:
        """Create a set or a map; ``number`` is unique in the transaction."""
        flags = value.flags
        parts = [self._in_table, text_attribute(uapi.NFTA_SET_NAME, name)]
        if value.data is not None:
            flags |= nft.SET_MAP
        if value.dynamic:
            flags |= nft.SET_EVAL
        if value.timeout:
            flags |= nft.SET_TIMEOUT
        parts += [
            _u32(uapi.NFTA_SET_FLAGS, flags),
            _u32(uapi.NFTA_SET_KEY_TYPE, type_number(value.key)),
            _u32(uapi.NFTA_SET_KEY_LEN, nft.key_length(value.key)),
        ]
        if value.data == (nft.VERDICT,):
            parts += [_u32(uapi.NFTA_SET_DATA_TYPE, DATA_TYPE_VERDICT), _u32(uapi.NFTA_SET_DATA_LEN, 16)]
        elif value.data is not None:
            parts += [
                _u32(uapi.NFTA_SET_DATA_TYPE, type_number(value.data)),
                _u32(uapi.NFTA_SET_DATA_LEN, nft.key_length(value.data)),
            ]
        # The kernel allocates the hash table of a set with a size at once, 2 MiB for this one, and lets others grow.
        if value.size and value.size != nft.DEFAULT_DYNAMIC_SIZE:
            parts.append(nested(uapi.NFTA_SET_DESC, _u32(uapi.NFTA_SET_DESC_SIZE, value.size)))
        if value.flags & nft.SET_CONCAT:
            fields = [
                nested(uapi.NFTA_LIST_ELEM, _u32(uapi.NFTA_SET_FIELD_LEN, FIELD_BYTES[part])) for part in value.key
            ]
            parts.append(nested(uapi.NFTA_SET_DESC, nested(uapi.NFTA_SET_DESC_CONCAT, *fields)))
        if value.counted:
            parts.append(nested(uapi.NFTA_SET_EXPR, text_attribute(uapi.NFTA_EXPR_NAME, "counter")))
        parts.append(_u32(uapi.NFTA_SET_ID, number))
        if value.timeout:
            parts.append(attribute(uapi.NFTA_SET_TIMEOUT, struct.pack(">Q", value.timeout)))
        parts.append(attribute(uapi.NFTA_SET_USERDATA, set_user_data(value)))
        return (NEW_SET, NLM_F_CREATE | NLM_F_EXCL, b"".join(parts))

    def delete_set(self, name: str) -> Message:
        """Delete a set with its elements."""
        return (DELETE_SET, 0, self._in_table + text_attribute(uapi.NFTA_SET_NAME, name))

    def chain(self, name: str, base: Optional[nft.BaseHook]) -> Message:
        """Create an empty chain."""
        parts = [self._in_table, text_attribute(uapi.NFTA_CHAIN_NAME, name)]
        if base is not None:
            number = _u32(uapi.NFTA_HOOK_HOOKNUM, nft.HOOKS.index(base.hook))
            priority = attribute(uapi.NFTA_HOOK_PRIORITY, struct.pack(">i", base.priority))
            parts.append(nested(uapi.NFTA_CHAIN_HOOK, number, priority))
            parts += [_u32(uapi.NFTA_CHAIN_POLICY, base.policy), text_attribute(uapi.NFTA_CHAIN_TYPE, base.type)]
        return (NEW_CHAIN, NLM_F_CREATE | NLM_F_EXCL, b"".join(parts))

    def delete_chain(self, name: str) -> Message:
        """Delete a chain; no object may refer to it."""
        return (DELETE_CHAIN, 0, self._in_table + text_attribute(uapi.NFTA_CHAIN_NAME, name))

    def rule(self, chain: str, rule: nft.Rule) -> Message:
        """Append a rule."""
        expressions = nested(uapi.NFTA_RULE_EXPRESSIONS, *map(expression_bytes, rule.expressions))
        parts = [self._in_table, text_attribute(uapi.NFTA_RULE_CHAIN, chain), expressions]
        if rule.comment:
            parts.append(attribute(uapi.NFTA_RULE_USERDATA, comment_bytes(rule.comment)))
        return (NEW_RULE, NLM_F_CREATE | NLM_F_APPEND, b"".join(parts))

    def flush_chain(self, name: str) -> Message:
        """Delete all rules of a chain."""
        return (DELETE_RULE, 0, self._in_table + text_attribute(uapi.NFTA_RULE_CHAIN, name))

    def _element_messages(self, kind: int, flags: int, name: str, elements: memoryview, size: int) -> Iterator[Message]:
        """Yield messages with encoded elements of equal size, as many in each as an attribute can hold."""
        head = self._in_table + text_attribute(uapi.NFTA_SET_ELEM_LIST_SET, name)
        step = _ELEMENT_BYTES // size * size
        for start in range(0, len(elements), step):
            body = elements[start : start + step]
            nest = _LENGTH_AND_KIND.pack(len(body) + 4, uapi.NFTA_SET_ELEM_LIST_ELEMENTS | NLA_F_NESTED)
            yield (kind, flags, b"".join((head, nest, body)))

    def add_elements(self, name: str, items: Iterable[tuple[bytes, object]]) -> Iterator[Message]:
        """Add elements: (key, True) to a set, (key, verdict text) or (key, data) to a map."""
        by_value: dict[object, list[bytes]] = {}
        for key, value in items:
            keys = by_value.get(value)
            if keys is None:
                keys = by_value[value] = []
            keys.append(key)
        for value, keys in by_value.items():
            yield from self._of_kind(NEW_ELEMENT, NLM_F_CREATE | NLM_F_EXCL, name, keys, value)

    def delete_elements(self, name: str, keys: Iterable[bytes]) -> Iterator[Message]:
        """Delete elements by their keys, CATCH_ALL among them."""
        return self._by_keys(DELETE_ELEMENT, name, list(keys))

    def get_elements(self, name: str, keys: Iterable[bytes]) -> Iterator[Message]:
        """Request elements by their keys, CATCH_ALL among them."""
        return self._by_keys(GET_ELEMENT, name, list(keys))

    def _by_keys(self, kind: int, name: str, keys: list[bytes]) -> Iterator[Message]:
        with_key = [key for key in keys if key != CATCH_ALL]
        if len(with_key) < len(keys):
            element = nested(uapi.NFTA_LIST_ELEM, _u32(uapi.NFTA_SET_ELEM_FLAGS, ELEMENT_CATCH_ALL))
            yield from self._element_messages(kind, 0, name, memoryview(element), len(element))
        if with_key:
            yield from self._of_kind(kind, 0, name, with_key, True)

    def _of_kind(self, kind: int, flags: int, name: str, keys: list[bytes], value: object) -> Iterator[Message]:
        """Yield messages for elements with the same value: single keys, or ranges where the set has ranges."""
        ranges = self.identity.intervals.get(name)
        if ranges is None:
            yield from self._elements(kind, flags, name, keys, value)
        elif ranges.flags & nft.SET_CONCAT:
            yield from self._concatenated_ranges(kind, flags, name, keys, value)
        else:
            yield from self._ranges(kind, flags, name, keys, value)

    def _concatenated_ranges(
        self, kind: int, flags: int, name: str, keys: list[bytes], value: object
    ) -> Iterator[Message]:
        """Yield messages for ranges in each field of a concatenation: an element with first and last key."""
        half = len(keys[0]) // 2
        last = nested(uapi.NFTA_SET_ELEM_KEY_END, attribute(uapi.NFTA_DATA_VALUE, bytes(half)))
        template = _element(half, last + _element_data(value))
        fields = [
            (_KEY_WORD, half // 4, b"".join([key[:half] for key in keys])),
            (_KEY_WORD + half // 4 + 2, half // 4, b"".join([key[half:] for key in keys])),
        ]
        block = columns(template, len(keys), fields)
        yield from self._element_messages(kind, flags, name, block, len(template))

    def _ranges(self, kind: int, flags: int, name: str, keys: list[bytes], value: object) -> Iterator[Message]:
        """Yield messages for ranges as two elements each: where it begins, and after its last key where it ends.

        A range that ends with the last key of all has no end. The two elements must follow each other: the kernel
        refuses a range that begins within another one.
        """
        half = len(keys[0]) // 2
        highest = b"\xff" * half
        begin = _element(half, _element_data(value))
        end = _element(half, _u32(uapi.NFTA_SET_ELEM_FLAGS, ELEMENT_INTERVAL_END))
        # The word of the key is behind the headers of the element, its key and the key's value.
        end_word = len(begin) // 4 + _KEY_WORD
        bounded = [key for key in keys if key[half:] != highest]
        if bounded:
            ends = b"".join([(int.from_bytes(key[half:], "big") + 1).to_bytes(half, "big") for key in bounded])
            fields = [(_KEY_WORD, half // 4, b"".join([key[:half] for key in bounded])), (end_word, half // 4, ends)]
            block = columns(begin + end, len(bounded), fields)
            yield from self._element_messages(kind, flags, name, block, len(begin) + len(end))
        for key in keys:
            if key[half:] == highest:
                block = columns(begin, 1, [(_KEY_WORD, half // 4, key[:half])])
                yield from self._element_messages(kind, flags, name, block, len(begin))

    def _elements(self, kind: int, flags: int, name: str, keys: list[bytes], value: object) -> Iterator[Message]:
        """Yield messages for elements with keys of equal length and the same value."""
        length = len(keys[0])
        template = _element(length, _element_data(value))
        block = columns(template, len(keys), [(_KEY_WORD, length // 4, b"".join(keys))])
        yield from self._element_messages(kind, flags, name, block, len(template))

    def add_lists(self, name: str, lists: Sequence[ListPart]) -> Iterator[Message]:
        """Add elements of lists: (key of a frontend, indices as in registers, data), all concatenated."""
        data_size = 20 if self.family == IPV6 else 8
        key_size = len(lists[0][0])
        data = nested(uapi.NFTA_SET_ELEM_DATA, attribute(uapi.NFTA_DATA_VALUE, bytes(data_size)))
        template = _element(key_size + 4, data)
        indices = b"".join([part[1] for part in lists])
        keys = b"".join([key * (len(positions) // 4) for key, positions, _data in lists])
        fields = [
            (_KEY_WORD, key_size // 4, keys),
            (_KEY_WORD + key_size // 4, 1, indices),
            (_KEY_WORD + key_size // 4 + 3, data_size // 4, b"".join([part[2] for part in lists])),
        ]
        block = columns(template, len(indices) // 4, fields)
        yield from self._element_messages(NEW_ELEMENT, NLM_F_CREATE | NLM_F_EXCL, name, block, len(template))
