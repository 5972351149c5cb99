# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connections of the agent's HTTP server: their limits, which one to close first, and how to serve one.

This module uses no clock, selector or thread; the server (``server``) supplies all three.
"""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import Dict, List, NamedTuple, Optional, Tuple

from .message import BadRequest, Responder, Response, encode, head_length, parse_head, text_response

_READ_BYTES = 4096
#: File descriptors that the rest of the agent needs: netlink, the API server, pipes of helper programs, libraries.
OTHER_FILES = 256


class Limits(NamedTuple):
    """Bounds of one server.

    ``connections``: the maximum number at a time; ``per_client``: of one client. ``seconds``: how long one connection
    may last, from accept to the end of the response. ``ports``: the maximum number of listening sockets.
    """

    connections: int = 2048
    per_client: int = 512
    seconds: float = 5.0
    ports: int = 16384


DEFAULT_LIMITS = Limits()


def limits_of(files: int) -> Limits:
    """Return the limits for a process that may open ``files`` files."""
    most = DEFAULT_LIMITS
    connections = min(most.connections, max(16, files // 4))
    return most._replace(
        connections=connections,
        per_client=max(4, connections // 4),
        ports=max(2, min(most.ports, files - connections - OTHER_FILES)),
    )


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, as Go programs do; return the limit in effect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A service manager that forbids the call has set the limit itself.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def client_of(address: str) -> str:
    """Return the identity of a client: its IPv4 address (also if mapped), or the /64 of its IPv6 address."""
    if ":" not in address:
        return address
    raw = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if raw[:12] == bytes(10) + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw[:8] + bytes(8)) + "/64"


class Connection:
    """One connection: reads a request's head, sends the response, and lets the client read it before closing.

    ``idle``: nothing has been received yet. ``deadline``: when to close it in any case, by the server's clock.
    """

    def __init__(self, sock: socket.socket, client: str, responder: Responder, deadline: float) -> None:
        self.sock = sock
        self.client = client
        self.deadline = deadline
        self.idle = True
        self.fault: Optional[BadRequest] = None
        self._responder = responder
        self._received = bytearray()
        self._sending = memoryview(b"")
        self._answered = False
        self._lingering = False

    @property
    def writing(self) -> bool:
        """Whether it waits for space in the send buffer."""
        return bool(self._sending)

    def proceed(self) -> bool:
        """Proceed without blocking; return whether the connection is still needed.

        Raises what the responder raises, while an answer 500 is sent, and OSError if the client has disconnected.
        """
        if not self._answered and not self._receive():
            return False
        if self._answered and self._sending:
            self._send()
        if not self._answered or self._sending:
            return True
        if self._lingering:
            return self._drain()
        return False

    def _receive(self) -> bool:
        """Read; return False if the client has disconnected without a request."""
        while not self._answered:
            try:
                data = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.idle = False
            self._received += data
            self._take_head()
        return True

    def _take_head(self) -> None:
        try:
            length = head_length(bytes(self._received))
            if not length:
                return
            request = parse_head(bytes(self._received[:length]))
        except BadRequest as fault:
            self.fault = fault
            self._lingering = True
            self._answer(text_response(fault.code, str(fault)))
            return
        self._lingering = len(self._received) > length
        try:
            answer = self._responder(request) or text_response(404, "404 page not found")
        except Exception:
            self._answer(text_response(500, "internal error"), request.method != "HEAD")
            raise
        self._answer(answer, request.method != "HEAD")

    def _answer(self, answer: Response, with_body: bool = True) -> None:
        self._answered = True
        self._sending = memoryview(encode(answer, with_body))
        self._received.clear()

    def _send(self) -> None:
        while self._sending:
            try:
                sent = self.sock.send(self._sending)
            except BlockingIOError:
                return
            self._sending = self._sending[sent:]
        if self._lingering:
            self.sock.shutdown(socket.SHUT_WR)

    def _drain(self) -> bool:
        """Read and discard data: closing with unread data would reset the connection and lose the answer."""
        while True:
            try:
                if not self.sock.recv(_READ_BYTES):
                    return False
            except BlockingIOError:
                return True


class _Crowd:
    """Connections that share a limit; ``idle`` has those on which nothing has been received yet, oldest first."""

    def __init__(self) -> None:
        self.count = 0
        self.idle: Dict[int, Connection] = {}

    def oldest_idle(self) -> Optional[Connection]:
        return next(iter(self.idle.values()), None)


class Connections:
    """All open connections in the order in which they were accepted, which is the order of their deadlines."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._all: Dict[int, Connection] = {}
        self._everybody = _Crowd()
        self._clients: Dict[str, _Crowd] = {}

    def __len__(self) -> int:
        return len(self._all)

    def get(self, number: int) -> Optional[Connection]:
        """Return the connection with this file descriptor, or None if it no longer exists."""
        return self._all.get(number)

    @property
    def full(self) -> bool:
        """Return whether there is no room for another connection, and none can be closed for it."""
        return self._everybody.count >= self.limits.connections and not self._everybody.idle

    def make_room(self, client: str) -> Tuple[bool, Optional[Connection]]:
        """Return whether to accept a new connection of a client, and which one to close for it, if any.

        For a client at its own limit, this is one of its own connections. Only connections on which nothing has been
        received yet are closed, oldest first; never a request before its deadline.
        """
        own = self._clients.get(client)
        if own is not None and own.count >= self.limits.per_client:
            victim = own.oldest_idle()
            return victim is not None, victim
        if self._everybody.count < self.limits.connections:
            return True, None
        victim = self._everybody.oldest_idle()
        return victim is not None, victim

    def add(self, connection: Connection) -> None:
        """Add a new connection."""
        number = connection.sock.fileno()
        self._all[number] = connection
        for crowd in (self._everybody, self._clients.setdefault(connection.client, _Crowd())):
            crowd.count += 1
            crowd.idle[number] = connection

    def settle(self, connection: Connection) -> None:
        """Record that data may have been received on a connection."""
        if not connection.idle:
            number = connection.sock.fileno()
            self._everybody.idle.pop(number, None)
            self._clients[connection.client].idle.pop(number, None)

    def remove(self, connection: Connection) -> None:
        """Forget a connection and close it."""
        number = connection.sock.fileno()
        del self._all[number]
        own = self._clients[connection.client]
        for crowd in (self._everybody, own):
            crowd.count -= 1
            crowd.idle.pop(number, None)
        if not own.count:
            del self._clients[connection.client]
        connection.sock.close()

    def first_deadline(self) -> Optional[float]:
        """Return the earliest deadline, None without connections."""
        return next((connection.deadline for connection in self._all.values()), None)

    def overdue(self, now: float) -> List[Connection]:
        """Return the connections whose deadline has passed."""
        found = []
        for connection in self._all.values():
            if connection.deadline > now:
                break
            found.append(connection)
        return found

    def everything(self) -> List[Connection]:
        """Return all connections."""
        return list(self._all.values())
