# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""End the TCP connections that lead to an endpoint: those of local programs at once, forwarded ones at the next packet.

Connection tracking knows which endpoint each connection leads to, in every mode: IPVS writes the real server into the
entry as well (net.ipv4.vs.conntrack). The socket of a local program is destroyed (sock_diag(7), SOCK_DESTROY), so that
the program sees an error at once. Then the entry is deleted. The next packet of a forwarded connection is tracked as a
new connection (nf_conntrack_tcp_loose) and sent to another endpoint, which answers with a reset.
"""

from __future__ import annotations

import socket
import struct
from typing import Collection, List, NamedTuple, Optional, Tuple

from ..addresses import IPV6, packed
from ..errors import KernelError
from .conntrack import ConntrackSocket, parse_tuple
from .netlink.attributes import attribute, nested, parse_attributes
from .netlink.protocol import NETLINK_NETFILTER, Message
from .netlink.socket import DumpInterrupted, NetlinkSocket
from .outcomes import NetlinkRefusal, is_missing, is_not_understood

_GET = 0x0101
_TUPLE_ORIG, _TUPLE_REPLY, _ID, _ZONE, _FILTER = 1, 2, 12, 18, 25
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_IP_V4_SOURCE, _IP_V6_SOURCE, _PROTO_NUMBER, _PROTO_SOURCE_PORT = 1, 3, 1, 2
# CTA_FILTER_REPLY_FLAGS: source address, protocol and source port of the reply have to match (kernel 5.8).
_FILTER_REPLY_FLAGS, _MATCH = 2, 1 << 0 | 1 << 3 | 1 << 4
_NFGENMSG = struct.Struct("=BBH")
_ATTEMPTS = 5
_TCP = socket.IPPROTO_TCP

NETLINK_SOCK_DIAG = 4
_SOCK_DESTROY = 21
# struct inet_diag_req_v2: family, protocol, extensions, padding, states; then the socket: ports, addresses, interface,
# and a cookie of all ones (INET_DIAG_NOCOOKIE), since the socket was not looked up before.
_REQUEST = struct.Struct("=BBBxI2s2s16s16sIII")
_ANY_STATE, _NO_COOKIE = 0xFFFFFFFF, 0xFFFFFFFF

Place = Tuple[str, int]


class Ended(NamedTuple):
    """How many connections were ended, and of how many the local socket was destroyed.

    ``problem``: why no socket can be destroyed; empty if none had to be, or the kernel did.
    """

    connections: int = 0
    sockets: int = 0
    problem: str = ""


class _Flow(NamedTuple):
    """An entry: source and destination of the client, each as address and port in network order, and its identity."""

    source: bytes
    destination: bytes
    identity: bytes


def _bytes(place: Place) -> bytes:
    return (packed(place[0]) or b"") + place[1].to_bytes(2, "big")


def end_connections(family: str, endpoint: Place, frontends: Collection[Place], node_port: int = 0) -> Ended:
    """End the connections to ``frontends``, or to the node port on any address, that lead to an endpoint.

    Raises KernelError if connection tracking cannot be read or changed.
    """
    wanted = {_bytes(place) for place in frontends}
    port = node_port.to_bytes(2, "big") if node_port else b"-"
    flows = [flow for flow in _flows(family, endpoint) if flow.destination in wanted or flow.destination[-2:] == port]
    if not flows:
        return Ended()
    sockets, problem = _destroy(family, flows)
    with ConntrackSocket() as sock:
        sock.delete(family, [flow.identity for flow in flows])
    return Ended(len(flows), sockets, problem)


def _flows(family: str, endpoint: Place) -> List[_Flow]:
    """Return the TCP entries of which an endpoint is the replying source."""
    ipv6 = family == IPV6
    head = _NFGENMSG.pack(socket.AF_INET6 if ipv6 else socket.AF_INET, 0, 0)
    place = _bytes(endpoint)
    reply = nested(_TUPLE_IP, attribute(_IP_V6_SOURCE if ipv6 else _IP_V4_SOURCE, place[:-2]))
    reply += nested(_TUPLE_PROTO, attribute(_PROTO_NUMBER, bytes((_TCP,))) + attribute(_PROTO_SOURCE_PORT, place[-2:]))
    only = nested(_TUPLE_REPLY, reply) + nested(_FILTER, attribute(_FILTER_REPLY_FLAGS, struct.pack("=I", _MATCH)))
    for payload in (head + only, head):
        try:
            return _dump(payload, place)
        except NetlinkRefusal as refusal:
            # Before 5.8 the kernel does not know the filter, and returns all entries without it.
            if payload is head or not is_not_understood(refusal.error):
                raise KernelError(f"connection tracking table cannot be read: {refusal.error}") from refusal
    return []


def _dump(payload: bytes, endpoint: bytes) -> List[_Flow]:
    found: List[_Flow] = []
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        for _attempt in range(_ATTEMPTS):
            found = []
            try:
                for view, _kind, start, end in sock.dump_stream(_GET, payload):
                    flow = _read(view, start, end, endpoint)
                    if flow is not None:
                        found.append(flow)
                break
            except DumpInterrupted:
                continue
    return found


def _read(view: memoryview, start: int, end: int, endpoint: bytes) -> Optional[_Flow]:
    parts = parse_attributes(view, start + _NFGENMSG.size, end)
    if _TUPLE_ORIG not in parts or _TUPLE_REPLY not in parts:
        return None
    reply = parse_tuple(parts[_TUPLE_REPLY], 0, len(parts[_TUPLE_REPLY]))
    if reply is None or reply[0] != _TCP or reply[1] != endpoint:
        return None
    original = parse_tuple(parts[_TUPLE_ORIG], 0, len(parts[_TUPLE_ORIG]))
    if original is None:
        return None
    identity = nested(_TUPLE_ORIG, bytes(parts[_TUPLE_ORIG]))
    identity += b"".join(attribute(kind, bytes(parts[kind])) for kind in (_ZONE, _ID) if kind in parts)
    return _Flow(original[1], original[2], identity)


def _destroy(family: str, flows: List[_Flow]) -> Tuple[int, str]:
    """Destroy the sockets of local clients; return their number, and why the kernel does not destroy sockets."""
    number = socket.AF_INET6 if family == IPV6 else socket.AF_INET
    messages: List[Message] = [(_SOCK_DESTROY, 0, _request(number, flow.source, flow.destination)) for flow in flows]
    with NetlinkSocket(NETLINK_SOCK_DIAG) as sock:
        errors = sock.transact(messages).errors
    # A forwarded connection has no socket here.
    problems = [error for error in errors if not is_missing(error)]
    return len(messages) - len(errors), str(problems[0]) if problems else ""


def _request(family: int, source: bytes, destination: bytes) -> bytes:
    return _REQUEST.pack(
        family,
        _TCP,
        0,
        _ANY_STATE,
        source[-2:],
        destination[-2:],
        source[:-2],
        destination[:-2],
        0,
        _NO_COOKIE,
        _NO_COOKIE,
    )
