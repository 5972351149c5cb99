# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""TCP: listening sockets, and connections forwarded to an endpoint.

Sockets are registered once, edge-triggered, for all their events; each end remembers whether it is readable and
writable. A half of a connection is read only when everything read before has been written, so a slow reader stops the
writer through TCP's own flow control, and a half holds at most one buffer or one pipe of bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from typing import Callable, Collection, Dict, Iterable, List, NamedTuple, Optional, Set

from ..rendering.userspace.model import Endpoint, Listener, ListenerKey
from .balancing import Balancer, FailedEndpoints
from .limits import Limits, Totals
from .loop import Loop
from .sources import Sources, is_allowed
from .splice import Pipe, Pipes, Splice

_IN, _OUT, _HUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
_READABLE = _IN | _HUP | select.EPOLLHUP | select.EPOLLERR
_WRITABLE = _OUT | select.EPOLLHUP | select.EPOLLERR
_ENDED = _HUP | select.EPOLLHUP | select.EPOLLERR
_EVENTS = _IN | _OUT | _HUP | select.EPOLLET
BUFFER_BYTES = 1 << 16
#: Bytes after which a half is spliced; for fewer a pipe is not worth its system calls.
_BULK_BYTES = 1 << 18
#: Bytes that one half may transfer before other descriptors are served.
_TURN_BYTES = 1 << 21
_ACCEPTS = 32
_BACKLOG = 4096
#: Seconds to wait before accepting again after the system ran out of files or memory.
PAUSE_SECONDS = 0.2
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RESET = struct.pack("=ii", 1, 0)
#: A vanished peer is detected after 10 minutes of silence and 5 probes, a minute apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 600), (socket.TCP_KEEPINTVL, 60), (socket.TCP_KEEPCNT, 5))


class Shared(NamedTuple):
    """State shared by all TCP connections.

    ``buffer``: the copy buffer, used by one connection at a time. ``connecting``: connections that wait for an
    endpoint, in the order of their attempts. ``is_listener`` returns whether an endpoint is one of the listeners.
    """

    loop: Loop
    limits: Callable[[], Limits]
    totals: Totals
    failed: FailedEndpoints
    pipes: Pipes
    splice: Optional[Splice]
    buffer: memoryview
    connecting: Dict[Connection, None]
    is_listener: Callable[[Endpoint], bool]


def keep_alive(sock: socket.socket) -> None:
    """Enable TCP keepalive, and send small segments at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def reset(sock: socket.socket) -> None:
    """Close a connected socket with a reset instead of a FIN."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


class _End:
    """One end of a connection: its socket and readiness. ``ended``: the peer has sent its FIN."""

    __slots__ = ("ended", "number", "readable", "sock", "writable")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.number = sock.fileno()
        self.readable = True
        self.writable = True
        self.ended = False


class _Half:
    """One direction: bytes read from ``source`` and not yet written to ``sink``, in ``held`` or in ``pipe``."""

    __slots__ = ("finished", "held", "in_pipe", "moved", "pipe", "read_all", "sink", "source")

    def __init__(self, source: _End, sink: _End) -> None:
        self.source = source
        self.sink = sink
        self.held = b""
        self.pipe: Optional[Pipe] = None
        self.in_pipe = 0
        self.moved = 0
        self.read_all = False
        self.finished = False


class Connection:
    """A client's connection and the one to its endpoint. ``active``: when data was last transferred."""

    __slots__ = ("_queued", "_tried", "active", "client", "client_end", "endpoint", "endpoint_end", "halves", "server")

    def __init__(self, server: TcpServer, sock: socket.socket, client: str) -> None:
        self.server = server
        self.client = client
        self.client_end = _End(sock)
        self.endpoint: Optional[Endpoint] = None
        self.endpoint_end: Optional[_End] = None
        self.halves: Collection[_Half] = ()
        self.active = server.shared.loop.now
        self._tried: List[Endpoint] = []
        self._queued = False

    @property
    def half_closed(self) -> bool:
        """Whether one side has closed its half."""
        return any(half.finished for half in self.halves)

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
            except OSError:
                self._failed(endpoint)
                continue
            return
        shared.totals.unreachable += 1
        self.abort()

    def _begin(self, endpoint: Endpoint) -> None:
        family = socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            keep_alive(sock)
            number = sock.connect_ex(endpoint)
            if number not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
            self.endpoint, self.endpoint_end = endpoint, _End(sock)
            self.active = self.server.shared.loop.now
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
            self.give_up()
            return
        del self.server.shared.connecting[self]
        self.server.shared.failed.discard(endpoint)
        end.readable = bool(mask & _READABLE)
        end.ended = bool(mask & _ENDED)
        client = self.client_end
        self.halves = (_Half(client, end), _Half(end, client))
        loop.hand_over(end.number, self._endpoint_ready)
        loop.watch(client.number, self._client_ready, _EVENTS)
        self._pump()

    def give_up(self) -> None:
        """Abandon the connection attempt, and try another endpoint."""
        end, endpoint = self.endpoint_end, self.endpoint
        self.server.shared.connecting.pop(self, None)
        if end is not None and endpoint is not None:
            self.endpoint_end = None
            self.server.shared.loop.forget(end.number)
            end.sock.close()
            self._failed(endpoint)
        self.connect()

    def _failed(self, endpoint: Endpoint) -> None:
        self.server.shared.totals.connect_failures += 1
        self.server.shared.failed.add(endpoint)

    # ---- carrying

    def _client_ready(self, mask: int) -> None:
        self._ready(self.client_end, mask)

    def _endpoint_ready(self, mask: int) -> None:
        if self.endpoint_end is not None:
            self._ready(self.endpoint_end, mask)

    def _ready(self, end: _End, mask: int) -> None:
        if mask & _READABLE:
            end.readable = True
        if mask & _WRITABLE:
            end.writable = True
        if mask & _ENDED:
            end.ended = True
        self._pump()
        if mask & select.EPOLLERR and any(half.read_all and half.source is end for half in self.halves):
            # The peer sent a reset after its FIN; no read will report it any more.
            self.abort()

    def _again(self) -> None:
        self._queued = False
        if self.halves:
            self._pump()

    def _pump(self) -> None:
        shared = self.server.shared
        self.active = shared.loop.now
        more = False
        try:
            for half in self.halves:
                more = self._move(half) or more
        except OSError:
            self.abort()
            return
        if all(half.finished for half in self.halves):
            self._end()
        elif more and not self._queued:
            self._queued = True
            shared.loop.again(self._again)

    def _move(self, half: _Half) -> bool:
        """Transfer bytes of one half until it would block; return whether its quota is used up. Raises OSError."""
        if half.finished:
            return False
        left = _TURN_BYTES
        while left > 0:
            if half.in_pipe or half.held:
                if not half.sink.writable or not self._write(half):
                    return False
            elif half.read_all:
                # The other side may have reset the connection by now, which its own half reports.
                with contextlib.suppress(OSError):
                    half.sink.sock.shutdown(socket.SHUT_WR)
                half.finished = True
                return False
            elif not half.source.readable:
                return False
            else:
                left -= self._read(half)
        return True

    def _read(self, half: _Half) -> int:
        """Read once, and write as much of it as possible; return the number of bytes read."""
        shared, source = self.server.shared, half.source
        if half.pipe is None and half.moved >= _BULK_BYTES and shared.splice is not None:
            half.pipe = shared.pipes.borrow()
        try:
            if half.pipe is not None and shared.splice is not None:
                size = half.pipe.size
                count = half.in_pipe = shared.splice(source.number, half.pipe.write_end, size)
            else:
                size = BUFFER_BYTES
                count = source.sock.recv_into(shared.buffer)
        except (BlockingIOError, InterruptedError):
            source.readable = False
            return 0
        half.moved += count
        shared.totals.bytes += count
        if not count:
            half.read_all = True
        elif half.pipe is None:
            sent = 0
            if half.sink.writable:
                try:
                    sent = half.sink.sock.send(shared.buffer[:count])
                except BlockingIOError:
                    half.sink.writable = False
            if sent < count:
                half.held = bytes(shared.buffer[sent:count])
            elif count < size and not source.ended:
                # The socket was drained; further bytes, or the end, cause a new event.
                source.readable = False
        return count

    def _write(self, half: _Half) -> bool:
        """Write the bytes that the half holds; return whether all were written."""
        shared, sink = self.server.shared, half.sink
        try:
            if half.in_pipe and half.pipe is not None and shared.splice is not None:
                half.in_pipe -= shared.splice(half.pipe.read_end, sink.number, half.in_pipe)
            else:
                half.held = half.held[sink.sock.send(half.held) :]
        except BlockingIOError:
            sink.writable = False
            return False
        return True

    # ---- the end

    def _end(self) -> None:
        self._forget()
        self.client_end.sock.close()
        if self.endpoint_end is not None:
            self.endpoint_end.sock.close()

    def abort(self) -> None:
        """Reset both sides, as if the other side had failed."""
        self._forget()
        reset(self.client_end.sock)
        if self.endpoint_end is not None:
            reset(self.endpoint_end.sock)

    def _forget(self) -> None:
        shared = self.server.shared
        for half in self.halves:
            if half.pipe is not None:
                shared.pipes.give_back(half.pipe, half.in_pipe == 0)
                half.pipe = None
        if self.halves:
            shared.loop.forget(self.client_end.number)
        if self.endpoint_end is not None:
            shared.loop.forget(self.endpoint_end.number)
        self.halves = ()
        self.server.gone(self)


class TcpServer:
    """One listening socket and its connections. Raises OSError if the address or port cannot be used.

    ``listener`` may be replaced at any time; open connections keep their endpoint. ``everyone`` is
    the account of connections by client.
    """

    def __init__(
        self,
        key: ListenerKey,
        listener: Listener,
        shared: Shared,
        balancer: Balancer,
        everyone: Sources[Connection],
    ) -> None:
        self.key = key
        self.listener = listener
        self.shared = shared
        self.balancer = balancer
        self.connections: Set[Connection] = set()
        self._everyone = everyone
        family = socket.AF_INET6 if ":" in key.address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Accepted sockets inherit these options.
            keep_alive(self._socket)
            self._socket.bind((key.address, key.port))
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor of the listening socket."""
        return self._socket.fileno()

    def accept(self) -> bool:
        """Accept waiting connections; return False if the system has run out of files or memory."""
        shared = self.shared
        for _count in range(_ACCEPTS):
            try:
                sock, address = self._socket.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    return False
                # The client is already gone, or the network reported an error of its connection (accept(2)).
                continue
            client = address[0]
            if not is_allowed(self.listener.sources, client):
                shared.totals.refused_sources += 1
                reset(sock)
                continue
            sock.setblocking(False)
            if not self._everyone.admit(client, shared.limits().connections):
                shared.totals.refused_limit += 1
                reset(sock)
                continue
            shared.totals.accepted += 1
            connection = Connection(self, sock, client)
            self.connections.add(connection)
            self._everyone.add(client, connection)
            connection.connect()
        return True

    def gone(self, connection: Connection) -> None:
        """Forget a closed connection."""
        if connection in self.connections:
            self.connections.discard(connection)
            self.shared.connecting.pop(connection, None)
            self._everyone.remove(connection.client, connection)

    def close_listener(self) -> None:
        """Stop listening; open connections continue."""
        self._socket.close()

    def abort(self) -> None:
        """Reset all connections."""
        for connection in list(self.connections):
            connection.abort()


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


def expire_idle(connections: Iterable[Connection], shared: Shared) -> None:
    """Close connections that have been silent too long."""
    limits, now = shared.limits(), shared.loop.now
    for connection in list(connections):
        allowed = limits.half_closed_seconds if connection.half_closed else limits.idle_seconds
        if now >= connection.active + allowed:
            connection.abort()
