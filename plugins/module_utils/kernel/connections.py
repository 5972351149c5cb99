# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All entries of connection tracking, whatever their protocol, and the removal of some of them (ctnetlink)."""

from __future__ import annotations

import socket
import struct
from typing import Callable, Iterator, List, NamedTuple, Tuple

from ..addresses import IPV6
from ..errors import KernelError
from .conntrack import ConntrackSocket
from .netlink.attributes import attribute, nested, parse_attributes
from .netlink.protocol import NETLINK_NETFILTER
from .netlink.socket import DumpInterrupted, NetlinkSocket
from .outcomes import NetlinkRefusal

# linux/netfilter/nfnetlink_conntrack.h
_GET = 0x0101
_TUPLE_ORIG, _TUPLE_REPLY, _ID, _ZONE = 1, 2, 12, 18
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_PROTO_NUM, _SOURCE_PORT = 1, 2
_SOURCES = (1, 3)
_NFGENMSG = struct.Struct("=BBH")
_ATTEMPTS = 5


class Connection(NamedTuple):
    """A tracked connection: who opened it, who answers, and where (0 for protocols without ports).

    ``identity``: the attributes by which exactly this entry is deleted.
    """

    source: bytes
    destination: bytes
    protocol: int
    port: int
    identity: bytes


def _source(view: memoryview) -> Tuple[bytes, int, int]:
    """Return source address, protocol and source port of a tuple."""
    parts = parse_attributes(view, 0, len(view))
    addresses = parse_attributes(parts[_TUPLE_IP], 0, len(parts[_TUPLE_IP]))
    transport = parse_attributes(parts[_TUPLE_PROTO], 0, len(parts[_TUPLE_PROTO]))
    address = next(bytes(addresses[kind]) for kind in _SOURCES if kind in addresses)
    port = int.from_bytes(transport.get(_SOURCE_PORT, b""), "big")
    return address, bytes(transport[_PROTO_NUM])[0], port


def _connections(sock: NetlinkSocket, family: str) -> Iterator[Connection]:
    head = _NFGENMSG.pack(socket.AF_INET6 if family == IPV6 else socket.AF_INET, 0, 0)
    for view, _kind, start, end in sock.dump_stream(_GET, head):
        found = parse_attributes(view, start + 4, end)
        if _TUPLE_ORIG not in found or _TUPLE_REPLY not in found:
            continue
        source, protocol, _port = _source(found[_TUPLE_ORIG])
        destination, _protocol, port = _source(found[_TUPLE_REPLY])
        identity = nested(_TUPLE_ORIG, bytes(found[_TUPLE_ORIG]))
        identity += b"".join(attribute(kind, bytes(found[kind])) for kind in (_ZONE, _ID) if kind in found)
        yield Connection(source, destination, protocol, port, identity)


def cut_connections(family: str, unwanted: Callable[[Connection], bool]) -> int:
    """Delete the entries of a family that are unwanted; return how many existed. Raises KernelError."""
    chosen: List[bytes] = []
    sock = NetlinkSocket(NETLINK_NETFILTER)
    try:
        for _attempt in range(_ATTEMPTS):
            try:
                chosen = [each.identity for each in _connections(sock, family) if unwanted(each)]
                break
            except DumpInterrupted:
                continue
    except NetlinkRefusal as refusal:
        raise KernelError(f"connection tracking table cannot be read: {refusal.error}") from refusal
    finally:
        sock.close()
    if not chosen:
        return 0
    with ConntrackSocket() as deleting:
        return deleting.delete(family, chosen)
