# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An API server without a network or real time: a function answers each request with bytes as on the wire.

The bytes go through http.client and everything above it. Time is a number that waiting increases.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
from typing import Any, Callable, Iterable, Optional, Union

from tests.lab.clock import Clock

Faults = Union[bytes, BaseException]


class Answer:
    """An answer of a connection: pieces of bytes, exceptions that reading raises, and seconds that pass (floats)."""

    def __init__(self, *parts: Union[bytes, float, BaseException]) -> None:
        self.parts = list(parts)


class _Stream(io.RawIOBase):
    def __init__(self, answer: Answer, clock: Clock) -> None:
        self._parts = list(answer.parts)
        self._clock = clock

    def readable(self) -> bool:
        """Return true: the stream can be read, not written."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Return the next piece, raise an exception, or let time pass."""
        while self._parts:
            part = self._parts.pop(0)
            if isinstance(part, float):
                self._clock.wait(part)
            elif isinstance(part, BaseException):
                raise part
            elif part:
                count = min(len(buffer), len(part))
                buffer[:count] = part[:count]
                if count < len(part):
                    self._parts.insert(0, part[count:])
                return count
        return 0


class _Socket:
    """The methods of a socket that http.client calls."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._sent = b""

    def sendall(self, data: bytes) -> None:
        """Record a part of the request."""
        self._sent += bytes(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Begin the answer to what was sent."""
        self._wire.sent = self._sent
        target = self._sent.split(b" ", 2)[1].decode("ascii")
        return io.BufferedReader(_Stream(self._wire.answer(target), self._wire.clock))

    def settimeout(self, seconds: float) -> None:
        """Ignore the timeout; timeouts are parts of answers."""

    def fileno(self) -> int:
        """Return no descriptor: a connection is never kept."""
        return -1

    def close(self) -> None:
        """Do nothing; nothing is open."""


class Wire:
    """Connections whose requests ``answer`` answers by their target. ``sent``: the last request as a whole."""

    def __init__(self, clock: Clock, answer: Callable[[str], Answer]) -> None:
        self.clock = clock
        self.answer = answer
        self.sent = b""

    def dial(self, seconds: float) -> http.client.HTTPConnection:
        """Return a connection for one request."""
        connection = http.client.HTTPConnection("api.example", timeout=seconds)
        connection.sock = _Socket(self)
        return connection


def response(body: bytes, status: str = "200 OK", headers: Optional[dict[str, str]] = None) -> bytes:
    """Return an answer with its length."""
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    return head(status, fields) + body


def head(status: str, headers: dict[str, str]) -> bytes:
    """Return the beginning of an answer."""
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chunked(pieces: Iterable[bytes], status: str = "200 OK") -> list[bytes]:
    """Return an answer in chunks, as a watch is, with its end."""
    found = [head(status, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})]
    found += [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece]
    return [*found, b"0\r\n\r\n"]


def failure(code: int, reason: str = "Expired", message: str = "") -> bytes:
    """Return an answer of kind Status."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    status.update({"message": message} if message else {})
    return response(json.dumps(status).encode(), f"{code} {reason}")


def broken() -> BaseException:
    """Return the exception of a connection that breaks."""
    return ConnectionResetError(104, "Connection reset by peer")


def silent() -> BaseException:
    """Return the exception of a connection that sends nothing for longer than the client waits."""
    return socket.timeout("timed out")
