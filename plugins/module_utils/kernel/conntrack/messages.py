# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Messages of ctnetlink: the entries of the connection tracking table, and their identity.

Tables with a million entries are expected: addresses remain bytes, and only the necessary fields of each entry are
read. Source: linux/netfilter/nfnetlink_conntrack.h.
"""

from __future__ import annotations

import socket
import struct
from typing import Mapping, NamedTuple, Optional

from ...base.addresses import IPV6
from ..netlink.attributes import attribute, each_attribute, nested, nested_in, parse_attributes

IPCTNL_MSG_CT_GET, IPCTNL_MSG_CT_DELETE = 0x0101, 0x0102
CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_STATUS, CTA_ID, CTA_ZONE, CTA_FILTER = 1, 2, 3, 12, 18, 25
_CTA_STATUS_MASK = 26
# In CTA_PROTOINFO: CTA_PROTOINFO_TCP or _SCTP, and in that the state.
_CTA_PROTOINFO, _STATE = 4, 1
_INFO = {"TCP": 1, "SCTP": 3}
CTA_TUPLE_IP, CTA_TUPLE_PROTO = 1, 2
CTA_IP_V4_SRC, CTA_IP_V6_SRC, CTA_IP_V4_DST, CTA_IP_V6_DST = 1, 3, 2, 4
CTA_PROTO_NUM, CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT = 1, 2, 3
_PORTS = (CTA_PROTO_SRC_PORT, CTA_PROTO_DST_PORT)
CTA_FILTER_ORIG_FLAGS, CTA_FILTER_REPLY_FLAGS = 1, 2
# CTA_FILTER_F_...: the fields of a tuple that a dump selects by (kernel 5.8).
FILTER_IP_SRC, FILTER_IP_DST, FILTER_PROTO_NUM = 1 << 0, 1 << 1, 1 << 3
FILTER_PROTO_SRC_PORT, FILTER_PROTO_DST_PORT = 1 << 4, 1 << 5
NFGENMSG = struct.Struct("=BBH")
# IPS_...: the bits of CTA_STATUS.
SEEN_REPLY, ASSURED = 1 << 1, 1 << 2
#: Selects entries that no endpoint has answered (kernel 5.17).
UNREPLIED = attribute(CTA_STATUS, bytes(4)) + attribute(_CTA_STATUS_MASK, struct.pack(">I", SEEN_REPLY))
#: TCP_CONNTRACK_SYN_SENT: the state of a TCP entry that has not been answered.
SYN_SENT = 1
PROTOCOLS = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP, "SCTP": socket.IPPROTO_SCTP}

# A tuple as the kernel writes it: CTA_TUPLE_IP (source, destination), CTA_TUPLE_PROTO (number, source port, destination
# port). Fields: length and type of the whole, then type and value of each part.
_TUPLE_V4 = struct.Struct("=HH4x2xH4s2xH4s4x2xHB3x2xH2s2x2xH2s2x")
_TUPLE_V6 = struct.Struct("=HH4x2xH16s2xH16s4x2xHB3x2xH2s2x2xH2s2x")
_TYPES_V4, _TYPES_V6 = (1, 2, 1, 2, 3), (3, 4, 1, 2, 3)
TYPE_MASK = 0x3FFF

#: Protocol, source and destination place.
ParsedTuple = tuple[int, bytes, bytes]


class RawEntry(NamedTuple):
    """An entry: the client's destination and the replying source, as address and port in network order.

    ``view``, ``start`` and ``end`` delimit its message in a buffer that is only valid until the next entry is read.
    """

    destination: bytes
    reply_source: bytes
    view: memoryview
    start: int
    end: int


def header(family: str) -> bytes:
    """Return the ``struct nfgenmsg`` of a request about one family."""
    return NFGENMSG.pack(socket.AF_INET6 if family == IPV6 else socket.AF_INET, 0, 0)


def selection(family: str, tuple_kind: int, parts: bytes, flags_kind: int, flags: int) -> bytes:
    """Return attributes by which a dump selects entries (CTA_FILTER, kernel 5.8): a tuple and the fields to compare.

    The caller must compare the fields, too, since older kernels return all entries. Addresses of IPv6 are left to the
    caller: Linux 6.18 returns the entries whose address differs from the given one. Empty if no field is left.
    """
    if family == IPV6:
        flags &= ~(FILTER_IP_SRC | FILTER_IP_DST)
    if not flags:
        return b""
    return nested(tuple_kind, parts) + nested(CTA_FILTER, attribute(flags_kind, struct.pack("=I", flags)))


def flow_selection(family: str, protocol: int, destination: bytes, source: bytes = b"") -> bytes:
    """Return the :func:`selection` of the entries of a protocol from a source to a destination.

    Each is a :func:`place`; without an address, or with port 0, it means any.
    """
    addresses, transport, fields = b"", attribute(CTA_PROTO_NUM, bytes((protocol,))), FILTER_PROTO_NUM
    kinds = (CTA_IP_V6_SRC, CTA_IP_V6_DST) if family == IPV6 else (CTA_IP_V4_SRC, CTA_IP_V4_DST)
    fields_of_address, fields_of_port = (FILTER_IP_SRC, FILTER_IP_DST), (FILTER_PROTO_SRC_PORT, FILTER_PROTO_DST_PORT)
    for number, end in enumerate((source, destination)):
        if end[:-2]:
            addresses += attribute(kinds[number], end[:-2])
            fields |= fields_of_address[number]
        if any(end[-2:]):
            transport += attribute(_PORTS[number], end[-2:])
            fields |= fields_of_port[number]
    parts = (nested(CTA_TUPLE_IP, addresses) if addresses else b"") + nested(CTA_TUPLE_PROTO, transport)
    return selection(family, CTA_TUPLE_ORIG, parts, CTA_FILTER_ORIG_FLAGS, fields)


def parse_tuple(found: Mapping[int, memoryview], kind: int) -> Optional[ParsedTuple]:
    """Return protocol, source and destination place of a direction of an entry; None without addresses.

    The port is 0 for protocols without ports.
    """
    parts = nested_in(found, kind)
    if CTA_TUPLE_IP not in parts or CTA_TUPLE_PROTO not in parts:
        return None
    addresses = [bytes(value) for _kind, value in sorted(_pairs(parts[CTA_TUPLE_IP]))]
    proto = nested_in(parts, CTA_TUPLE_PROTO)
    if len(addresses) != 2 or CTA_PROTO_NUM not in proto:
        return None
    source, destination = (address + bytes(proto.get(kind, bytes(2))) for kind, address in zip(_PORTS, addresses))
    return proto[CTA_PROTO_NUM][0], source, destination


def parse_tuples(found: Mapping[int, memoryview]) -> Optional[tuple[ParsedTuple, ParsedTuple]]:
    """Return what :func:`parse_tuple` does for both directions of an entry; None without one of them."""
    original, reply = parse_tuple(found, CTA_TUPLE_ORIG), parse_tuple(found, CTA_TUPLE_REPLY)
    return None if original is None or reply is None else (original, reply)


def state_number(found: Mapping[int, memoryview], protocol: str) -> Optional[int]:
    """Return the number of the state of an entry's protocol; None for one without states, or where it is missing."""
    if protocol not in _INFO:
        return None
    state = nested_in(nested_in(found, _CTA_PROTOINFO), _INFO[protocol]).get(_STATE)
    return None if state is None else state[0]


def _pairs(view: memoryview) -> list[tuple[int, bytes]]:
    return [(kind, bytes(value)) for kind, value in each_attribute(view, 0, len(view))]


def read_entry(view: memoryview, start: int, end: int, ipv6: bool, wanted: str = "UDP") -> Optional[RawEntry]:
    """Parse a ctnetlink message (from ``struct nfgenmsg`` on) as an entry of a protocol; None for other protocols."""
    number = PROTOCOLS[wanted]
    layout, types = (_TUPLE_V6, _TYPES_V6) if ipv6 else (_TUPLE_V4, _TYPES_V4)
    size = layout.size
    offset = start + NFGENMSG.size
    if offset + 2 * size <= end:
        length, kind, t1, _source, t2, destination, t3, protocol, t4, _port, t5, port = layout.unpack_from(view, offset)
        if (t1, t2, t3, t4, t5) == types and kind & TYPE_MASK == CTA_TUPLE_ORIG:
            if protocol != number:
                return None
            second = offset + ((length + 3) & ~3)
            if second + size <= end:
                _length, kind, t1, source, t2, _to, t3, _protocol, t4, source_port, t5, _to_port = layout.unpack_from(
                    view, second
                )
                if (t1, t2, t3, t4, t5) == types and kind & TYPE_MASK == CTA_TUPLE_REPLY:
                    return RawEntry(destination + port, source + source_port, view, start, end)
    return _read_slowly(view, start, end, number)


def _read_slowly(view: memoryview, start: int, end: int, number: int) -> Optional[RawEntry]:
    """Parse a message whose attributes come in an unexpected order."""
    found = parse_attributes(view, start + NFGENMSG.size, end)
    tuples = parse_tuples(found)
    if tuples is None or tuples[0][0] != number:
        return None
    original, reply = tuples
    return RawEntry(original[2], reply[1], view, start, end)


def identity(entry: RawEntry) -> bytes:
    """Return the attributes that identify exactly this entry for deletion: see :func:`identity_of`."""
    return identity_of(parse_attributes(entry.view, entry.start + NFGENMSG.size, entry.end))


def identity_of(attributes: Mapping[int, memoryview]) -> bytes:
    """Return those attributes of an entry that identify it for deletion: original tuple, zone and the kernel's id."""
    parts = [nested(CTA_TUPLE_ORIG, bytes(attributes[CTA_TUPLE_ORIG]))]
    parts += [attribute(kind, bytes(attributes[kind])) for kind in (CTA_ZONE, CTA_ID) if kind in attributes]
    return b"".join(parts)
