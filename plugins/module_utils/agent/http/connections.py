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
from typing import NamedTuple, Optional

from .message import BadRequest, Responder, Response, encode, head_length, parse_head, text_response

_READ_BYTES = 4096
#: File descriptors that the rest of the agent needs: netlink, the API server, pipes of helper programs, libraries.
OTHER_FILES = 256


class Limits(NamedTuple):
    """Bounds of one server.

    ``connections``: the maximum number at a time. ``seconds``: how long one connection may last, from accept to the end
    of the response. ``ports``: the maximum number of listening sockets.
    """

    connections: int = 2048
    seconds: float = 5.0
    ports: int = 16384


DEFAULT_LIMITS = Limits()


def limits_of(files: int) -> Limits:
    """Return the limits for a process that may open ``files`` files."""
    most = DEFAULT_LIMITS
    connections = min(most.connections, max(16, files // 4))
    return most._replace(connections=connections, ports=max(2, min(most.ports, files - connections - OTHER_FILES)))


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, as Go programs do; return the limit in effect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A service manager that forbids the call has set the limit itself.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class Connection:
    """One connection: reads a request's head, sends the response, and lets the client read it before closing.

    ``address``: that of the client. ``idle``: nothing has been received yet. ``deadline``: when to close it in any
    case, by the server's clock.
    """

    def __init__(self, sock: socket.socket, address: str, responder: Responder, deadline: float) -> None:
        self.sock = sock
        self.address = address
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
