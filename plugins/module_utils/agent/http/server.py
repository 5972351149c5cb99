# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's HTTP server: one supervised thread with one event loop for every port and every connection.

However many ports are open and whatever clients do, the agent has one more thread, and no more connections than
``connections.Limits`` allows. A port is opened and closed by the calling thread, which learns at once whether that is
possible; the server's thread does everything else.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
import traceback
from typing import Any, Callable, Optional

from ...base.closing import closed_on_error
from ...base.errors import KernelError
from ...base.loop import LONGEST_WAIT_SECONDS, Loop
from ...clients import ClientRule, Shares
from ...kernel.listening import listening_user
from ..telemetry.log import DEBUG, ERROR, INFO, WARNING, LimitedLog
from ..threads.supervision import Supervisor, Task
from .connections import DEFAULT_LIMITS, Connection, Limits
from .message import Responder

_ACCEPT_AT_ONCE = 64
_PORTS_AT_ONCE = 512
_BACKLOG = 1024
_OUT_OF_FILES_SECONDS = 0.2
_STOP_SECONDS = 10.0

DEADLINE, EVICTED = "deadline", "evicted"


class OpenPort:
    """A listening socket of the server. ``port``: its actual number, even if 0 was requested."""

    def __init__(self, server: HttpServer, sock: socket.socket, responder: Responder) -> None:
        self.sock = sock
        self.responder = responder
        self.port: int = sock.getsockname()[1]
        self._server = server

    def close(self) -> None:
        """Refuse new connections from now on; requests in progress are answered."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self._server.forget(self)


class HttpServer:
    """Serves any number of ports. ``closed`` counts connections that were closed before an answer, by reason.

    ``clients``: who is one client, at the limit of connections.

    ``supervisor`` runs the thread, from the first port on. After an exception in it the ports are served again without
    the connections that were open. ``log`` takes lines that clients cause.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        log: LimitedLog,
        clients: ClientRule,
        limits: Limits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.closed: dict[str, int] = dict.fromkeys((DEADLINE, EVICTED), 0)
        self._log = log
        self._clock = clock
        self._limits = limits
        self._clients = clients
        self._connections = self._no_connections()
        self._ports: dict[int, OpenPort] = {}
        self._opened = 0
        self._supervisor = supervisor
        self._task: Optional[Task] = None
        self._acceptable = False
        self._accepting = True
        self._accept_again: Optional[float] = None
        # Listening sockets have a selector of their own inside the loop's, so that all can be disabled at once.
        self._poll_ports = select.epoll()
        self._loop = Loop(clock=clock)
        self._loop.watch(self._poll_ports.fileno(), self._note_acceptable, select.EPOLLIN)
        self._loop.each_round(self._next_moment, self._end_round)

    # -- called by other threads ---------------------------------------------------------------------------------------

    def open(self, address: str, port: int, responder: Responder, both_families: bool = False) -> OpenPort:
        """Listen on an address and port, and answer requests there with ``responder``, in the server's thread.

        ``both_families``: ``::`` and ``0.0.0.0`` include both, as Go's listeners without an explicit family do. Raises
        KernelError.
        """
        if self._opened >= self._limits.ports:
            raise KernelError(
                f"cannot listen on {address} port {port}: {self._opened} ports are open, and the limit of open files "
                "(LimitNOFILE) allows no more"
            )
        try:
            sock = _listen(address, port, both_families)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                user = listening_user(address, port)
                reason = f"{reason} by {'another program' if user is None else f'a program of user id {user}'}"
            raise KernelError(f"cannot listen on {address} port {port}: {reason}") from error
        opened = OpenPort(self, sock, responder)
        self._opened += 1
        self._loop.post(lambda: self._watch(opened))
        if self._task is None:
            self._task = self._supervisor.start("http", self._serve)
        return opened

    def forget(self, port: OpenPort) -> None:
        """Stop serving a port that was closed."""
        self._opened -= 1
        self._loop.post(lambda: self._release(port))

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def stop(self) -> None:
        """Close every port and connection, and end the thread."""
        task, self._task = self._task, None
        if task is not None:
            task.close()
        self._loop.stop()
        if task is not None:
            task.join(_STOP_SECONDS)
        self._loop.run_posted()
        for connection in self._connections:
            self._drop(connection)
        for port in list(self._ports.values()):
            port.sock.close()
        self._ports.clear()
        self._poll_ports.close()
        self._loop.close()

    # -- the server's thread -------------------------------------------------------------------------------------------

    def _serve(self, task: Task) -> None:
        """Serve until stopped. It is called again after an exception, for which any connection may be the cause."""
        for connection in self._connections:
            self._loop.forget(connection.sock.fileno())
            connection.sock.close()
        self._connections = self._no_connections()
        self._loop.run(lambda: task.busy(2 * LONGEST_WAIT_SECONDS))

    def _no_connections(self) -> Shares[Connection]:
        """Return a table of connections, which has them in the order in which they were accepted and are overdue."""
        return Shares(self._clients, self._evict)

    def _note_acceptable(self, _mask: int) -> None:
        self._acceptable = True

    def _next_moment(self) -> Optional[float]:
        """Return when a connection is overdue, or ports accept again; None for neither."""
        oldest = self._connections.oldest()
        moments = [oldest.deadline if oldest is not None else None, self._accept_again]
        return min((moment for moment in moments if moment is not None), default=None)

    def _end_round(self) -> None:
        self._expire()
        # Accept last, so that a request that has arrived is never closed to make room.
        acceptable, self._acceptable = self._acceptable, False
        if acceptable and self._accepting:
            self._accept()
        self._choose_to_accept()

    def _watch(self, port: OpenPort) -> None:
        if port.sock.fileno() >= 0:
            self._ports[port.sock.fileno()] = port
            self._poll_ports.register(port.sock.fileno(), select.EPOLLIN)

    def _release(self, port: OpenPort) -> None:
        if self._ports.pop(port.sock.fileno(), None) is not None:
            self._poll_ports.unregister(port.sock.fileno())
        port.sock.close()

    def _accept(self) -> None:
        for number, _mask in self._poll_ports.poll(0, _PORTS_AT_ONCE):
            port = self._ports.get(number)
            if port is None:
                continue
            for _turn in range(_ACCEPT_AT_ONCE):
                if not self._accept_one(port):
                    break

    def _accept_one(self, port: OpenPort) -> bool:
        """Accept one connection; return whether more may be waiting."""
        try:
            sock, address = port.sock.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._log.write("accept", WARNING, "no connection can be accepted", error=error.strerror)
                self._accept_again = self._clock() + _OUT_OF_FILES_SECONDS
                return False
            # The client has disconnected, or the port was just closed.
            return error.errno == errno.ECONNABORTED
        sock.setblocking(False)
        # Those without a request are closed first.
        self._connections.make_room(address[0], self._limits.connections)
        connection = Connection(sock, address[0], port.responder, self._clock() + self._limits.seconds)
        self._connections.add(connection.address, connection)
        self._loop.watch(sock.fileno(), lambda _mask: self._proceed(connection), select.EPOLLIN)
        # A request often arrives together with its connection.
        self._proceed(connection)
        return True

    def _proceed(self, connection: Connection) -> None:
        wrote = connection.writing
        try:
            needed = connection.proceed()
        except OSError as error:
            # The client has disconnected.
            self._log.write("client", DEBUG, "connection lost", client=connection.address, error=error.strerror)
            self._drop(connection)
            return
        except Exception as error:
            self._crashed(error)
            needed = connection.writing
        if connection.fault is not None:
            self._log.write("fault", INFO, "bad request", client=connection.address, reason=connection.fault)
            connection.fault = None
        if not needed:
            self._drop(connection)
            return
        self._connections.touch(connection)
        if not connection.idle:
            self._connections.prove(connection)
        if connection.writing != wrote:
            mask = select.EPOLLOUT if connection.writing else select.EPOLLIN
            self._loop.change(connection.sock.fileno(), mask)

    def _expire(self) -> None:
        now = self._clock()
        while (oldest := self._connections.oldest()) is not None and oldest.deadline <= now:
            self.closed[DEADLINE] += 1
            self._drop(oldest)

    def _evict(self, connection: Connection) -> None:
        self.closed[EVICTED] += 1
        text = "too many connections: some of the client with the most are closed"
        self._log.write(EVICTED, WARNING, text, client=connection.address, connections=len(self._connections))
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        # Closing is not enough: a helper program that is being started may have inherited the connection.
        self._loop.forget(connection.sock.fileno())
        self._connections.remove(connection)
        connection.sock.close()

    def _choose_to_accept(self) -> None:
        """Stop accepting while the limit of open files is reached."""
        if self._accept_again is not None and self._clock() >= self._accept_again:
            self._accept_again = None
        wanted = self._accept_again is None
        if wanted != self._accepting:
            self._accepting = wanted
            self._loop.change(self._poll_ports.fileno(), select.EPOLLIN if wanted else 0)

    def _crashed(self, error: Exception) -> None:
        lines: list[str] = traceback.format_exception(type(error), error, error.__traceback__)
        last = traceback.extract_tb(error.__traceback__)[-1:]
        where = [(frame.filename, frame.lineno) for frame in last]
        self._log.once(
            ("crash", type(error).__name__, *where), "a request failed", ERROR, error=error, traceback="".join(lines)
        )


def _listen(address: str, port: int, both_families: bool) -> socket.socket:
    if address == "0.0.0.0" and both_families:
        try:
            return _listen("::", port, both_families)
        except OSError as error:
            # Without IPv6 in the kernel, or with disable_ipv6.
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    with closed_on_error(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address == "::" and both_families else 1)
        place: tuple[Any, ...] = (address, port)
        sock.bind(place)
        sock.listen(_BACKLOG)
    return sock
