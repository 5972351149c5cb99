# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""UDP: listening sockets, and sessions: a client of one listener, with a separate socket to an endpoint.

UDP has no end of a connection, so a session ends after a time without datagrams, sooner if the endpoint never
answered. As with connection tracking, datagrams of one session go to one endpoint as long as the ServicePort has it.
"""

from __future__ import annotations

import errno
import select
import socket
from typing import Callable, NamedTuple, Optional

from ..base.addresses import is_admitted
from ..base.closing import closed_on_error
from ..base.loop import Loop
from ..clients import Shares
from ..rendering.userspace.model import Endpoint, Listener, ListenerKey
from .balancing import Balancer, FailedEndpoints
from .limits import Limits, Totals
from .sockets import EXHAUSTED, bound_socket, hops_of_datagram, limit_hops, open_socket, save_hops

_DATAGRAMS = 64
_ANCILLARY_BYTES = socket.CMSG_SPACE(4)
#: Receive buffer of a listener, in bytes, for bursts; the kernel allows at most net.core.rmem_max.
_RECEIVE_BYTES = 1 << 21
#: The endpoint cannot be reached: what the kernel makes of ICMP destination unreachable (EACCES: prohibited, in IPv6),
#: or the node has no route.
_REFUSED = frozenset(
    (
        errno.ECONNREFUSED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EACCES,
    )
)
#: One datagram is lost, and the next one may pass: it is larger than the path allows, the node lacks memory, or its
#: packet filter dropped it (EPERM), which a full connection tracking table does as well. After any other error the
#: session is closed, but the endpoint is not to blame: for example, the node has lost the address of the socket
#: (EINVAL). The client's next datagram opens another session.
_LOST = frozenset((errno.EMSGSIZE, errno.ENOBUFS, errno.ENOMEM, errno.EPERM, errno.EAGAIN))


class Shared(NamedTuple):
    """State shared by all UDP listeners; see ``tcp.Shared``. ``sessions``: all of them, proven once answered."""

    loop: Loop
    limits: Callable[[], Limits]
    totals: Totals
    failed: FailedEndpoints
    buffer: memoryview
    sessions: Shares[Session]
    is_listener: Callable[[Endpoint], bool]


class Session:
    """A client's session: its socket to the endpoint. ``answered``: the endpoint has sent a datagram."""

    __slots__ = ("active", "address", "answered", "endpoint", "server", "sock")

    def __init__(self, server: UdpServer, address: tuple[str, int], endpoint: Endpoint, hops: int) -> None:
        self.server = server
        self.address = address
        self.endpoint = endpoint
        self.answered = False
        self.active = server.shared.loop.now
        self.sock = open_socket(endpoint[0], socket.SOCK_DGRAM)
        with closed_on_error(self.sock):
            limit_hops(self.sock, hops)
            self.sock.connect(endpoint)
            server.shared.loop.watch(self.sock.fileno(), self._readable, select.EPOLLIN)

    def send(self, datagram: memoryview) -> bool:
        """Send a datagram to the endpoint; return False if it has refused the last one, or cannot be reached."""
        server = self.server
        self.active = server.shared.loop.now
        server.shared.sessions.touch(self)
        try:
            try:
                self.sock.send(datagram)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                # A router reported the MTU of the path for an earlier datagram; the kernel fragments this one.
                self.sock.send(datagram)
        except OSError as error:
            if error.errno in _REFUSED:
                return False
            server.shared.totals.dropped += 1
            if error.errno not in _LOST:
                self.abort()
        return True

    def _readable(self, _mask: int) -> None:
        shared = self.server.shared
        received = False
        for _count in range(_DATAGRAMS):
            try:
                size = self.sock.recv_into(shared.buffer)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in _LOST:
                    continue
                if error.errno in _REFUSED:
                    # The endpoint has refused a datagram. The client's next one is sent to another endpoint.
                    self.fail()
                else:
                    self.abort()
                return
            received = True
            self.server.answer(shared.buffer[:size], self.address)
        if not received:
            return
        self.active = shared.loop.now
        if not self.answered:
            self.answered = True
            shared.sessions.prove(self)
        shared.sessions.touch(self)

    def fail(self) -> None:
        """End the session because its endpoint refuses datagrams."""
        shared = self.server.shared
        shared.totals.connect_failures += 1
        shared.failed.add(self.endpoint)
        self.abort()

    def abort(self) -> None:
        """Close the session."""
        shared = self.server.shared
        shared.loop.forget(self.sock.fileno())
        shared.sessions.remove(self)
        self.server.sessions.pop(self.address, None)
        self.sock.close()


class UdpServer:
    """One UDP socket and its sessions. Raises OSError if the address or port cannot be used."""

    def __init__(self, key: ListenerKey, listener: Listener, shared: Shared, balancer: Balancer) -> None:
        self.key = key
        self.listener = listener
        self.shared = shared
        self.balancer = balancer
        self.sessions: dict[tuple[str, int], Session] = {}
        self._socket = bound_socket(key.address, key.port, socket.SOCK_DGRAM, self._prepare)

    @staticmethod
    def _prepare(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        save_hops(sock)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def accept(self) -> bool:
        """Forward waiting datagrams; return False if the system has run out of files or memory."""
        shared = self.shared
        for _count in range(_DATAGRAMS):
            try:
                size, ancillary, _flags, address = self._socket.recvmsg_into([shared.buffer], _ANCILLARY_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                # A client has refused a datagram of an endpoint.
                continue
            if not is_admitted(address[0], self.listener.sources):
                shared.totals.refused_sources += 1
                continue
            hops = hops_of_datagram(ancillary) - 1
            if hops < 1:
                # Nodes forward to each other in a loop.
                shared.totals.dropped += 1
                continue
            self._forward(shared.buffer[:size], address, hops)
        return True

    def _forward(self, datagram: memoryview, address: tuple[str, int], hops: int) -> None:
        session = self.sessions.get(address)
        if session is not None and session.send(datagram):
            return
        tried: list[Endpoint] = []
        if session is not None:
            tried.append(session.endpoint)
            session.fail()
        while len(tried) < self.shared.limits().attempts:
            endpoint = self.balancer.choose(self.listener, address[0], tried)
            if endpoint is None:
                break
            tried.append(endpoint)
            if self.shared.is_listener(endpoint):
                continue
            session = self._open(address, endpoint, hops)
            if session is None:
                continue
            if session.send(datagram):
                return
            session.fail()
        self.shared.totals.dropped += 1

    def _open(self, address: tuple[str, int], endpoint: Endpoint, hops: int) -> Optional[Session]:
        shared = self.shared
        if not shared.sessions.make_room(address[0], shared.limits().sessions):
            return None
        try:
            session = Session(self, address, endpoint, hops)
        except OSError as error:
            shared.totals.connect_failures += 1
            if error.errno not in EXHAUSTED:
                shared.failed.add(endpoint)
            return None
        shared.totals.sessions += 1
        self.balancer.count(endpoint)
        self.sessions[address] = session
        shared.sessions.add(address[0], session)
        return session

    def answer(self, datagram: memoryview, address: tuple[str, int]) -> None:
        """Send an answer of an endpoint to the client."""
        try:
            self._socket.sendto(datagram, address)
        except OSError:
            self.shared.totals.dropped += 1

    def keep_only(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Close the sessions whose endpoint the ServicePort no longer has."""
        for session in list(self.sessions.values()):
            if session.endpoint not in endpoints:
                session.abort()

    def ignore_new_clients(self) -> None:
        """Do nothing: a datagram needs no connection."""

    def close_listener(self) -> None:
        """Forward waiting datagrams, stop listening and close all sessions, whose answers could no longer be sent."""
        self.accept()
        self.keep_only(())
        self._socket.close()


def expire_silent(shared: Shared) -> None:
    """Close sessions that have been silent too long."""
    limits, now = shared.limits(), shared.loop.now

    def is_due(session: Session) -> bool:
        return session.active + (limits.udp_stream_seconds if session.answered else limits.udp_seconds) <= now

    for session in shared.sessions.due(is_due):
        session.abort()
