# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of SCTP that show what a service proxy does (RFC 9260), over raw sockets.

An INIT is answered by an INIT ACK whose state cookie carries the answer of the endpoint, or by an ABORT. No SCTP
in the kernel is needed on either side.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

PROTOCOL = 132
INIT, INIT_ACK, ABORT = 1, 2, 6
STATE_COOKIE = 7
RECEIVE_WINDOW = 65535
# The fixed part of INIT and INIT ACK: initiate tag, window, two stream counts, initial TSN.
_FIXED = struct.Struct("!IIHHI")


class Packet(NamedTuple):
    """The common header and the first chunk."""

    source_port: int
    destination_port: int
    verification_tag: int
    kind: int
    body: bytes


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return table


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    """Return the CRC32c (Castagnoli), the checksum of SCTP."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def packet(source_port: int, destination_port: int, tag: int, chunk: bytes) -> bytes:
    """Return a packet with one chunk, checksum included."""
    data = struct.pack("!HHII", source_port, destination_port, tag, 0) + chunk
    return data[:8] + struct.pack("<I", crc32c(data)) + data[12:]


def _chunk(kind: int, body: bytes) -> bytes:
    return struct.pack("!BBH", kind, 0, 4 + len(body)) + body


def init(tag: int) -> bytes:
    """Return an INIT chunk."""
    return _chunk(INIT, _FIXED.pack(tag, RECEIVE_WINDOW, 1, 1, tag))


def init_ack(tag: int, cookie: bytes) -> bytes:
    """Return an INIT ACK chunk with a state cookie."""
    parameter = struct.pack("!HH", STATE_COOKIE, 4 + len(cookie)) + cookie + b"\0" * (-len(cookie) % 4)
    return _chunk(INIT_ACK, _FIXED.pack(tag, RECEIVE_WINDOW, 1, 1, tag) + parameter)


def abort() -> bytes:
    """Return an ABORT chunk without a cause."""
    return _chunk(ABORT, b"")


def parse(data: bytes) -> Packet | None:
    """Return the parts of a packet without its IP header; None if it is too short."""
    if len(data) < 16:
        return None
    source_port, destination_port, tag, _checksum = struct.unpack("!HHII", data[:12])
    kind, _flags, length = struct.unpack("!BBH", data[12:16])
    return Packet(source_port, destination_port, tag, kind, data[16 : 12 + length])


def initiate_tag(body: bytes) -> int:
    """Return the tag that the sender of an INIT expects in answers."""
    return int(struct.unpack("!I", body[:4])[0])


def cookie(body: bytes) -> bytes:
    """Return the state cookie of an INIT ACK."""
    offset = _FIXED.size
    _kind, length = struct.unpack("!HH", body[offset : offset + 4])
    return body[offset + 4 : offset + length]


def strip_ipv4_header(data: bytes) -> bytes:
    """Return a packet without the IP header that raw IPv4 sockets, unlike raw IPv6 sockets, deliver as well."""
    return data[(data[0] & 15) * 4 :]
