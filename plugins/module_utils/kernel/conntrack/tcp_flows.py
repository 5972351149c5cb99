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
from typing import Collection, Iterator, List, NamedTuple, Tuple

from ...base.addresses import IPV6
from ..netlink.attributes import attribute, nested, parse_attributes
from ..netlink.outcomes import is_missing
from ..netlink.protocol import Message
from ..netlink.socket import NetlinkSocket
from . import messages as ct
from .socket import ConntrackSocket, collected

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

    ``problem``: why no socket can be destroyed; empty if none needed to be, or all were.
    """

    connections: int = 0
    sockets: int = 0
    problem: str = ""


class _Flow(NamedTuple):
    """An entry: source and destination of the client, each as address and port in network order, and its identity."""

    source: bytes
    destination: bytes
    identity: bytes


def end_connections(family: str, endpoint: Place, frontends: Collection[Place], node_port: int = 0) -> Ended:
    """End the connections to ``frontends``, or to the node port on any address, that lead to an endpoint.

    Raises KernelError if connection tracking cannot be read or changed.
    """
    wanted = {ct.place(*frontend) for frontend in frontends}
    port = node_port.to_bytes(2, "big") if node_port else b"-"
    with ConntrackSocket() as sock:
        flows = [
            flow
            for flow in collected(lambda: _flows(sock, family, ct.place(*endpoint)))
            if flow.destination in wanted or flow.destination[-2:] == port
        ]
        if not flows:
            return Ended()
        sockets, problem = _destroy(family, flows)
        sock.delete(family, [flow.identity for flow in flows])
    return Ended(len(flows), sockets, problem)


def _flows(sock: ConntrackSocket, family: str, endpoint: bytes) -> Iterator[_Flow]:
    """Yield the TCP entries of which an endpoint is the replying source."""
    address = attribute(ct.CTA_IP_V6_SRC if family == IPV6 else ct.CTA_IP_V4_SRC, endpoint[:-2])
    transport = attribute(ct.CTA_PROTO_NUM, bytes((_TCP,))) + attribute(ct.CTA_PROTO_SRC_PORT, endpoint[-2:])
    reply = nested(ct.CTA_TUPLE_IP, address) + nested(ct.CTA_TUPLE_PROTO, transport)
    fields = ct.FILTER_IP_SRC | ct.FILTER_PROTO_NUM | ct.FILTER_PROTO_SRC_PORT
    only = ct.selection(family, ct.CTA_TUPLE_REPLY, reply, ct.CTA_FILTER_REPLY_FLAGS, fields)
    for view, _kind, start, end in sock.dump(family, only):
        parts = parse_attributes(view, start + ct.NFGENMSG.size, end)
        tuples = ct.parse_tuples(parts)
        if tuples is not None and tuples[1][:2] == (_TCP, endpoint):
            _protocol, source, destination = tuples[0]
            yield _Flow(source, destination, ct.identity_of(parts))


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
