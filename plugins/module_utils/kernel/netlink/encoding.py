# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Encode messages as the bytes of sends. In each send, only the last message requests an acknowledgement.

The first message of each send contains the port number of its socket (``origin``), so that netlink monitors can
distinguish this process's requests from others.
"""

from __future__ import annotations

import struct
from array import array
from typing import Sequence

from .protocol import HEADER, NLM_F_ACK, NLM_F_REQUEST, Message

_NUMBER = struct.Struct("=I")
_FLAGS = struct.Struct("=H")
_PADDING = (b"", b"\x00\x00\x00", b"\x00\x00", b"\x00")


def encode_sends(
    messages: Sequence[Message], first: int, *, origin: int, most_bytes: int, most_messages: int, acknowledge: bool
) -> list[tuple[bytes, int, int]]:
    """Encode messages as triples (bytes, first sequence number, last sequence number), one per send.

    ``first`` is the sequence number of the first message; the others count up from it. ``most_bytes`` and
    ``most_messages`` limit one send.
    """
    sends: list[tuple[bytes, int, int]] = []
    pack = HEADER.pack
    parts: list[bytes] = []
    append = parts.append
    size = 0
    sequence = started = first
    last_kind = last_flags = last_length = 0

    def finish() -> None:
        if acknowledge:
            carried = origin if len(parts) == 2 else 0
            parts[-2] = pack(last_length, last_kind, last_flags | NLM_F_REQUEST | NLM_F_ACK, sequence - 1, carried)
        sends.append((b"".join(parts), started, sequence - 1))
        parts.clear()

    for kind, flags, payload in messages:
        length = len(payload) + 16
        if parts and (size + length > most_bytes or sequence - started >= most_messages):
            finish()
            size = 0
            started = sequence
        append(pack(length, kind, flags | NLM_F_REQUEST, sequence, 0 if parts else origin))
        if length & 3:
            payload += _PADDING[length & 3]
        append(payload)
        size += (length + 3) & ~3
        sequence += 1
        last_kind, last_flags, last_length = kind, flags, length
    if parts:
        finish()
    return sends


def encode_ready(messages: Sequence[bytes], first: int, origin: int) -> bytearray:
    """Encode whole messages as one send: header with length, type and NLM_F_REQUEST, sequence number 0, padded.

    Messages of equal length are numbered in one operation.
    """
    data = bytearray().join(messages)
    size = len(messages[0])
    numbers = array("I", range(first, first + len(messages)))
    if size * len(messages) == len(data) and len(set(map(len, messages))) == 1:
        words = memoryview(data).cast("I")
        words[2 :: size // 4] = memoryview(numbers)
    else:
        offset = 0
        for number, message in zip(numbers, messages):
            _NUMBER.pack_into(data, offset + 8, number)
            offset += len(message)
    _NUMBER.pack_into(data, 12, origin)
    last = len(data) - len(messages[-1]) + 6
    _FLAGS.pack_into(data, last, _FLAGS.unpack_from(data, last)[0] | NLM_F_ACK)
    return data
