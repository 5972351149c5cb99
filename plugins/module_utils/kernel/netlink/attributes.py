# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Netlink attributes (``struct nlattr``): type, length and payload, possibly nested. Source: linux/netlink.h."""

from __future__ import annotations

import struct
from typing import Iterator, Mapping

NLA_F_NESTED = 0x8000
NLA_F_NET_BYTEORDER = 0x4000
NLA_TYPE_MASK = 0x3FFF

_ATTRIBUTE = struct.Struct("=HH")
_PADDING = (b"", b"\x00\x00\x00", b"\x00\x00", b"\x00")


def attribute(kind: int, payload: bytes) -> bytes:
    """Encode one attribute (``struct nlattr``), padded to four bytes."""
    size = len(payload)
    return _ATTRIBUTE.pack(size + 4, kind) + payload + _PADDING[size & 3]


def nested(kind: int, *attributes: bytes) -> bytes:
    """Encode an attribute that contains attributes, with the flag NLA_F_NESTED."""
    payload = b"".join(attributes)
    return _ATTRIBUTE.pack(len(payload) + 4, kind | NLA_F_NESTED) + payload


def text_attribute(kind: int, text: str) -> bytes:
    """Encode an attribute holding a string that ends with a zero byte."""
    return attribute(kind, text.encode() + b"\x00")


def attribute_text(payload: memoryview) -> str:
    """Return the string in an attribute, up to its zero byte."""
    return bytes(payload).split(b"\x00", 1)[0].decode(errors="replace")


def number_in(found: Mapping[int, memoryview], kind: int, default: int = 0) -> int:
    """Return the number in network order in one of these attributes, or ``default`` without it."""
    return int.from_bytes(found[kind], "big") if kind in found else default


def parse_attributes(buffer: memoryview, start: int, end: int) -> dict[int, memoryview]:
    """Return the attributes between two offsets by type (flag bits removed); of repeated ones the last wins."""
    found: dict[int, memoryview] = {}
    unpack = _ATTRIBUTE.unpack_from
    while start + 4 <= end:
        size, kind = unpack(buffer, start)
        if size < 4 or start + size > end:
            break
        found[kind & NLA_TYPE_MASK] = buffer[start + 4 : start + size]
        start += (size + 3) & ~3
    return found


def nested_in(found: Mapping[int, memoryview], kind: int) -> dict[int, memoryview]:
    """Return the attributes in one of these attributes, by type; none without it."""
    raw = found.get(kind, memoryview(b""))
    return parse_attributes(raw, 0, len(raw))


def each_attribute(buffer: memoryview, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the attributes between two offsets in order, as pairs of type (flag bits removed) and payload."""
    while start + 4 <= end:
        size, kind = _ATTRIBUTE.unpack_from(buffer, start)
        if size < 4 or start + size > end:
            break
        yield kind & NLA_TYPE_MASK, buffer[start + 4 : start + size]
        start += (size + 3) & ~3
