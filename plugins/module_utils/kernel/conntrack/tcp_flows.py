# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""End the TCP connections that lead to endpoints: those of local programs at once, forwarded ones by a reset.

Connection tracking knows which endpoint each connection leads to, in every mode: IPVS writes the real server into the
entry as well (net.ipv4.vs.conntrack). The socket of a local program is destroyed (sock_diag(7), SOCK_DESTROY), so that
the program sees an error at once. Then the entry is deleted, and the client of a forwarded connection gets a reset (see
``kernel.tcp_resets``). If it does not answer, its next packet is tracked as a new connection (nf_conntrack_tcp_loose)
and sent to another endpoint, which answers with a reset.
"""

from __future__ import annotations

import socket
import struct
from typing import Collection, Iterable, Iterator, NamedTuple, Optional, Sequence

from ...base.addresses import IPV6, packed_place
from ...base.progress import Progress, unheeded
from ...serviceports.flows import Frontend
from ..netlink.attributes import parse_attributes
from ..netlink.outcomes import is_missing
from ..netlink.protocol import Message
from ..netlink.socket import NetlinkSocket
from ..tcp_resets import Flow, PausingSteps, resetting
from . import messages as ct
from .socket import ConntrackSocket, Steps, collecting

_TCP = socket.IPPROTO_TCP

NETLINK_SOCK_DIAG = 4
_SOCK_DESTROY = 21
# struct inet_diag_req_v2: family, protocol, extensions, padding, states; then the socket: ports, addresses, interface,
# and a cookie of all ones (INET_DIAG_NOCOOKIE), since the socket was not looked up before.
_REQUEST = struct.Struct("=BBBxI2s2s16s16sIII")
_ANY_STATE, _NO_COOKIE = 0xFFFFFFFF, 0xFFFFFFFF
#: Up to this many frontends, the kernel selects entries: it goes through the table once for each of them.
_MOST_SELECTED = 8
#: Entries between two pauses.
_PORTION = 1000
#: Connections that the client has not begun or has ended: SYN_SENT, TIME_WAIT and CLOSE.
_NOT_OPEN = frozenset((ct.SYN_SENT, 7, 8))

Place = tuple[str, int]


class _TcpFlow(NamedTuple):
    """An entry: source and destination of the client, each as address and port in network order, and its identity.

    ``is_open``: whether its client may have the connection.
    """

    source: bytes
    destination: bytes
    identity: bytes
    is_open: bool


class _Leading(NamedTuple):
    """Where connections lead: to one of ``endpoints``, or with ``others`` to any other."""

    endpoints: set[bytes]
    others: bool

    def has(self, destination: bytes, replying: bytes, is_node_port: bool) -> bool:
        """Return whether a connection leads there; one that may not be of a Service, being unchanged, does not."""
        if replying == destination and (self.others or is_node_port):
            return False
        return (replying in self.endpoints) != self.others


class Targets:
    """Which connections to end: by frontend, and by where they lead."""

    def __init__(self) -> None:
        self._addresses: dict[bytes, list[_Leading]] = {}
        self._node_ports: dict[bytes, list[_Leading]] = {}

    def add(self, frontends: Iterable[Frontend], endpoints: Iterable[Place], others: bool = False) -> None:
        """Add the connections to frontends that lead to endpoints, or with ``others`` to anything else."""
        leading = _Leading({packed_place(*endpoint) for endpoint in endpoints}, others)
        for _protocol, address, port in frontends:
            place = packed_place(address, port)
            (self._addresses if address else self._node_ports).setdefault(place, []).append(leading)

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not (self._addresses or self._node_ports)

    def has(self, destination: bytes, replying: bytes) -> bool:
        """Return whether to end a connection to this destination, of which this source replies."""
        here, anywhere = self._addresses.get(destination, ()), self._node_ports.get(destination[-2:], ())
        if not here and not anywhere:
            return False
        return any(leading.has(destination, replying, False) for leading in here) or any(
            leading.has(destination, replying, True) for leading in anywhere
        )

    def selections(self, family: str) -> Iterator[bytes]:
        """Yield the selections of entries that together are those to the frontends; an empty one is the whole table."""
        frontends = [*self._addresses, *self._node_ports]
        if len(frontends) > _MOST_SELECTED:
            yield b""
            return
        for place in frontends:
            yield ct.flow_selection(family, _TCP, place)


def _finding(family: str, targets: Targets, progress: Progress) -> Steps[list[_TcpFlow]]:
    if targets.is_empty:
        return []
    with ConntrackSocket(progress) as sock:
        found = yield from collecting(lambda: _flows(sock, family, targets))
    return list({flow.identity: flow for flow in found}.values())


def _flows(sock: ConntrackSocket, family: str, targets: Targets) -> Iterator[Optional[_TcpFlow]]:
    for only in targets.selections(family):
        for number, (view, _kind, start, end) in enumerate(sock.dump(family, only), 1):
            if number % _PORTION == 0:
                yield None
            entry = ct.read_entry(view, start, end, family == IPV6, "TCP")
            if entry is None or not targets.has(entry.destination, entry.reply_source):
                continue
            parts = parse_attributes(view, start + ct.NFGENMSG.size, end)
            tuples = ct.parse_tuples(parts)
            if tuples is not None:
                is_open = ct.state_number(parts, "TCP") not in _NOT_OPEN
                yield _TcpFlow(*tuples[0][1:], ct.identity_of(parts), is_open)
        yield None


class Ended(NamedTuple):
    """How many connections were ended, of how many the local socket was destroyed, and how many clients were reset.

    ``problem``: why no socket can be destroyed; empty if none needed to be, or all were.
    """

    connections: int = 0
    sockets: int = 0
    reset: int = 0
    problem: str = ""


def ending_connections(
    family: str, targets: Targets, progress: Progress = unheeded, closing: Iterable[int] = ()
) -> PausingSteps[Ended]:
    """End connections, and reset the clients of those that are forwarded. Raises KernelError.

    ``closing``: ends what connection tracking does not, and yields how many connections it resets. It comes after the
    entries have been deleted, because closing connections of IPVS also deletes these.
    """
    ended = Ended()
    left: set[Flow] = set()
    flows = yield from _finding(family, targets, progress)
    with ConntrackSocket(progress) as sock:
        for start in range(0, len(flows), _PORTION):
            part = flows[start : start + _PORTION]
            kept, problem = _destroy(family, part)
            sock.delete(family, [flow.identity for flow in part])
            left.update((flow.source, flow.destination) for flow in kept if flow.is_open)
            sockets = ended.sockets + len(part) - len(kept)
            ended = Ended(ended.connections + len(part), sockets, 0, problem or ended.problem)
            yield None
    closed = 0
    for count in closing:
        closed += count
        yield None
    reset = yield from resetting(family, left)
    return ended._replace(connections=ended.connections + closed, reset=reset + closed)


def _destroy(family: str, flows: Sequence[_TcpFlow]) -> tuple[Collection[_TcpFlow], str]:
    """Destroy the sockets of local clients; return the flows of others, and why the kernel does not destroy sockets."""
    number = socket.AF_INET6 if family == IPV6 else socket.AF_INET
    messages: list[Message] = [(_SOCK_DESTROY, 0, _request(number, flow.source, flow.destination)) for flow in flows]
    with NetlinkSocket(NETLINK_SOCK_DIAG) as sock:
        errors = sock.transact(messages).errors
    # A forwarded connection has no socket here.
    problems = [error for error in errors if not is_missing(error)]
    return [flows[error.position] for error in errors], str(problems[0]) if problems else ""


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
