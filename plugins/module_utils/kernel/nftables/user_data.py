# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""User data: comments, and types of sets, in the form of the nft program. The kernel only stores them.

Sources: libnftnl (include/libnftnl/udata.h), nftables (src/mnl.c, src/expression.c, src/payload.c).
"""

from __future__ import annotations

import struct

from ...rendering.nftables.objects import CLASSID, INDEX, INTERFACE, SetValue


def rule_comment(found: dict[int, memoryview], kind: int) -> str:
    """Return the comment in the user data of a rule, as nft writes it; empty if there is none."""
    raw = bytes(found.get(kind, b""))
    position = 0
    while position + 2 <= len(raw):
        tag, size = raw[position], raw[position + 1]
        if tag == 0:
            return raw[position + 2 : position + 2 + size].rstrip(b"\x00").decode(errors="replace")
        position += 2 + size
    return ""


def comment_bytes(comment: str) -> bytes:
    """Return the user data of a table or a rule with a comment."""
    raw = comment.encode() + b"\x00"
    return bytes((0, len(raw))) + raw


def _typeof(kind: int, payload: bytes) -> bytes:
    return bytes((kind, len(payload))) + payload


def _typeof_u32(kind: int, value: int) -> bytes:
    return bytes((kind, 4)) + struct.pack("=I", value)


def _typeof_expression(part: str) -> bytes:
    """Return the data by which the nft program (since 0.9.4) shows the type of a set's part as an expression."""
    if part == "inet_proto":
        return _typeof_u32(0, 9) + _typeof(1, _typeof_u32(0, 16))
    if part == INDEX:
        return _typeof_u32(0, 23) + _typeof(1, _typeof_u32(0, 1) + _typeof_u32(1, 0x10000) + _typeof_u32(2, 0))
    protocol, field = {"ipv4_addr": (12, 12), "ipv6_addr": (13, 9), "inet_service": (11, 2)}[part]
    return _typeof_u32(0, 7) + _typeof(1, _typeof_u32(0, protocol) + _typeof_u32(1, field))


def _typeof_concatenation(parts: tuple[str, ...]) -> bytes:
    inner = b"".join(_typeof(position, _typeof_expression(part)) for position, part in enumerate(parts))
    return _typeof_u32(0, 13) + _typeof(1, inner)


def set_user_data(value: SetValue) -> bytes:
    """Return the user data of a set: byte orders, and types as expressions.

    Only lists need expressions, for parts without a type name in the nft syntax.
    """
    host = value.key in ((INDEX,), (CLASSID,), (INTERFACE,))
    found = _typeof_u32(0, 1 if host else 0 if len(value.key) > 1 else 2)
    if value.data is not None:
        found += _typeof_u32(1, 1 if value.data == (CLASSID,) else 0)
    if value.is_list and value.data is not None:
        found += _typeof(3, _typeof_concatenation(value.key)) + _typeof(4, _typeof_concatenation(value.data))
    return found
