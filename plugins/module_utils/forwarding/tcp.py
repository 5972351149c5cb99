# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""TCP: listening sockets, and connections forwarded to an endpoint, or to the next one if connecting fails.

Sockets are registered once, edge-triggered, for all their events; each end remembers whether it is readable and
writable.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import Callable, Collection, NamedTuple, Optional

from ..base.addresses import is_admitted
from ..base.closing import closed_on_error
from ..base.loop import Loop
from ..clients import Shares
from ..rendering.userspace.model import Endpoint, Listener, ListenerKey
from . import sockets
from .balancing import Balancer, FailedEndpoints
from .limits import Limits, Totals
from .relay import Relay, RelayContext, RelaySocket
from .sockets import open_socket

_IN, _OUT, _HUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
_READABLE = _IN | _HUP | select.EPOLLHUP | select.EPOLLERR
_WRITABLE = _OUT | select.EPOLLHUP | select.EPOLLERR
_ENDED = _HUP | select.EPOLLHUP | select.EPOLLERR
_EVENTS = _IN | _OUT | _HUP | select.EPOLLET
_ACCEPTS = 32
_BACKLOG = 4096
#: Seconds to wait before accepting again after the system ran out of files or memory.
PAUSE_SECONDS = 0.2
#: How long a connection may be silent after one peer has reset it. What it sent before may still reach the other peer.
RESET_SECONDS = 30.0
#: Connections silent for this long, in seconds, may be closed for a client that has about as many.
PRESSED_SECONDS = 60.0


class Shared(NamedTuple):
    """State shared by all TCP connections.

    ``context``: how their bytes are transferred. ``connections``: all of them. ``connecting``: those that wait for an
    endpoint, in the order of their attempts. ``is_listener`` returns whether an endpoint is one of the listeners.
    """

    loop: Loop
    limits: Callable[[], Limits]
    totals: Totals
    failed: FailedEndpoints
    context: RelayContext
    connections: Shares[Connection]
    connecting: dict[Connection, None]
    is_listener: Callable[[Endpoint], bool]


class Connection:
    """A client's connection and the one to its endpoint. ``active``: when data was last transferred.

    ``hops``: the hop limit of packets to the endpoint.
    """

    __slots__ = (
        "_hops",
        "_queued",
        "_tried",
        "active",
        "client",
        "client_end",
        "endpoint",
        "endpoint_end",
        "relays",
        "server",
    )

    def __init__(self, server: TcpServer, sock: socket.socket, client: str, hops: int) -> None:
        self.server = server
        self.client = client
        self._hops = hops
        self.client_end = RelaySocket(sock)
        self.endpoint: Optional[Endpoint] = None
        self.endpoint_end: Optional[RelaySocket] = None
        self.relays: Collection[Relay] = ()
        self.active = server.shared.loop.now
        self._tried: list[Endpoint] = []
        self._queued = False

    @property
    def half_closed(self) -> bool:
        """Whether one side has closed its half."""
        return any(relay.finished for relay in self.relays)

    def silent_seconds(self, limits: Limits) -> float:
        """Return how long the connection may be silent."""
        allowed = limits.half_closed_seconds if self.half_closed else limits.idle_seconds
        if any(relay.source.failed for relay in self.relays):
            # The reset would be passed on by reading it, but a relay does not read while its own sink takes nothing.
            allowed = min(allowed, RESET_SECONDS)
        return allowed

    def may_yield(self) -> bool:
        """Return whether it has been silent for so long that a client with about as many may replace it."""
        return self.active <= self.server.shared.loop.now - PRESSED_SECONDS

    # ---- connecting

    def connect(self) -> None:
        """Start to connect to the next endpoint; if none is left, reset the client."""
        server, shared = self.server, self.server.shared
        while len(self._tried) < shared.limits().attempts:
            endpoint = server.balancer.choose(server.listener, self.client, self._tried)
            if endpoint is None:
                break
            self._tried.append(endpoint)
            if shared.is_listener(endpoint):
                # A Service whose endpoint is another Service could forward to itself in a loop.
                continue
            try:
                self._begin(endpoint)
            except OSError as error:
                self._failed(endpoint, error.errno)
                continue
            return
        shared.totals.unreachable += 1
        self.abort()

    def _begin(self, endpoint: Endpoint) -> None:
        sock = open_socket(endpoint[0], socket.SOCK_STREAM)
        try:
            sockets.keep_alive(sock)
            sockets.limit_hops(sock, self._hops)
            number = sock.connect_ex(endpoint)
            if number not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
            self.endpoint, self.endpoint_end = endpoint, RelaySocket(sock)
            self._touch()
            self.server.shared.connecting[self] = None
            self.server.shared.loop.watch(sock.fileno(), self._connected, _EVENTS)
        except OSError:
            self.server.shared.connecting.pop(self, None)
            self.endpoint_end = None
            sock.close()
            raise

    def _connected(self, mask: int) -> None:
        """Continue once the connection to the endpoint is established, or try another endpoint."""
        end, endpoint, loop = self.endpoint_end, self.endpoint, self.server.shared.loop
        if end is None or endpoint is None or not mask & (_OUT | _ENDED):
            return
        number = end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number == 0:
            try:
                # On loopback, a connection to a port without a listener can connect to itself.
                if end.sock.getpeername() == end.sock.getsockname():
                    number = errno.ECONNREFUSED
            except OSError as error:
                if error.errno == errno.ENOTCONN and not mask & _ENDED:
                    return
                number = error.errno or errno.ENOTCONN
        if number:
            self.give_up(number)
            return
        del self.server.shared.connecting[self]
        self.server.shared.failed.discard(endpoint)
        self.server.balancer.count(endpoint)
        end.readable = bool(mask & _READABLE)
        end.ended = bool(mask & _ENDED)
        client = self.client_end
        self.relays = (Relay(client, end), Relay(end, client))
        loop.hand_over(end.number, self._endpoint_ready)
        loop.watch(client.number, self._client_ready, _EVENTS)
        self._pump()

    def give_up(self, number: Optional[int] = None) -> None:
        """Abandon the connection attempt, which failed with this error if any, and try another endpoint."""
        end, endpoint = self.endpoint_end, self.endpoint
        self.server.shared.connecting.pop(self, None)
        if end is not None and endpoint is not None:
            self.endpoint_end = None
            self.server.shared.loop.forget(end.number)
            end.sock.close()
            self._failed(endpoint, number)
        self.connect()

    def _failed(self, endpoint: Endpoint, number: Optional[int]) -> None:
        self.server.shared.totals.connect_failures += 1
        if number not in sockets.EXHAUSTED:
            self.server.shared.failed.add(endpoint)

    # ---- carrying

    def _client_ready(self, mask: int) -> None:
        self._ready(self.client_end, mask)

    def _endpoint_ready(self, mask: int) -> None:
        if self.endpoint_end is not None:
            self._ready(self.endpoint_end, mask)

    def _ready(self, end: RelaySocket, mask: int) -> None:
        if mask & _READABLE:
            end.readable = True
        if mask & _WRITABLE:
            end.writable = True
        if mask & _ENDED:
            end.ended = True
        self._pump()
        if mask & select.EPOLLERR:
            end.failed = True
            if any(relay.read_all and relay.source is end for relay in self.relays):
                # The peer sent a reset after its FIN; no read will report it any more.
                self.abort()

    def _again(self) -> None:
        self._queued = False
        if self.relays:
            self._pump()

    def _pump(self) -> None:
        shared = self.server.shared
        self._touch()
        more = False
        try:
            for relay in self.relays:
                more = relay.move(shared.context) or more
        except OSError:
            self.abort()
            return
        if all(relay.finished for relay in self.relays):
            self._end()
        elif more and not self._queued:
            self._queued = True
            shared.loop.again(self._again)

    def _touch(self) -> None:
        now = self.server.shared.loop.now
        if now != self.active:
            self.active = now
            self.server.shared.connections.touch(self)

    # ---- the end

    def _end(self) -> None:
        self._forget()
        self.client_end.sock.close()
        if self.endpoint_end is not None:
            self.endpoint_end.sock.close()

    def abort(self) -> None:
        """Reset both sides, as if the other side had failed."""
        self._forget()
        sockets.reset(self.client_end.sock)
        if self.endpoint_end is not None:
            sockets.reset(self.endpoint_end.sock)

    def _forget(self) -> None:
        shared = self.server.shared
        for relay in self.relays:
            relay.release(shared.context)
        if self.relays:
            shared.loop.forget(self.client_end.number)
        if self.endpoint_end is not None:
            shared.loop.forget(self.endpoint_end.number)
        self.relays = ()
        shared.connecting.pop(self, None)
        shared.connections.remove(self)


class TcpServer:
    """One listening socket and its connections. Raises OSError if the address or port cannot be used.

    ``listener`` may be replaced at any time; open connections keep their endpoint.
    """

    def __init__(self, key: ListenerKey, listener: Listener, shared: Shared, balancer: Balancer) -> None:
        self.key = key
        self.listener = listener
        self.shared = shared
        self.balancer = balancer
        self._socket = sockets.bound_socket(key.address, key.port, socket.SOCK_STREAM, self._prepare)
        with closed_on_error(self._socket):
            self._socket.listen(_BACKLOG)

    @staticmethod
    def _prepare(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit these options.
        sockets.keep_alive(sock)
        sockets.save_hops(sock)

    def fileno(self) -> int:
        """Return the descriptor of the listening socket."""
        return self._socket.fileno()

    def accept(self, limit: int = _ACCEPTS) -> bool:
        """Accept waiting connections; return False if the system has run out of files or memory."""
        shared = self.shared
        for _count in range(limit):
            try:
                sock, address = self._socket.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in sockets.EXHAUSTED:
                    return False
                # The client has already disconnected, or the network reported an error of its connection (accept(2)).
                continue
            client = address[0]
            if not is_admitted(client, self.listener.sources):
                shared.totals.refused_sources += 1
                sockets.reset(sock)
                continue
            sock.setblocking(False)
            hops = sockets.hops_of_connection(sock) - 1
            if hops < 1:
                # Nodes forward to each other in a loop.
                shared.totals.unreachable += 1
                sockets.reset(sock)
                continue
            if not shared.connections.make_room(client, shared.limits().connections):
                shared.totals.refused_limit += 1
                sockets.reset(sock)
                continue
            shared.totals.accepted += 1
            connection = Connection(self, sock, client, hops)
            shared.connections.add(client, connection)
            connection.connect()
        return True

    def ignore_new_clients(self) -> None:
        """Stop accepting clients; a client that tries repeats its SYN after a second and is then refused."""
        sockets.ignore_new_connections(self._socket)

    def close_listener(self) -> None:
        """Accept the clients that are connected, and stop listening; open connections continue."""
        self.accept(_BACKLOG)
        self._socket.close()


def expire_attempts(shared: Shared) -> None:
    """Abandon connection attempts that take too long."""
    late = shared.loop.now - shared.limits().connect_seconds
    due = []
    for connection in shared.connecting:
        if connection.active > late:
            break
        due.append(connection)
    for connection in due:
        connection.give_up()


def expire_idle(shared: Shared) -> None:
    """Close connections that have been silent too long."""
    limits, now = shared.limits(), shared.loop.now
    for connection in shared.connections:
        if now >= connection.active + connection.silent_seconds(limits):
            connection.abort()
