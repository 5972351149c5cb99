# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One HTTP/1.1 connection to an API server, over TLS or in the clear, direct or through a proxy.

http.client of the standard library implements the protocol; this module adds timeouts, reuse of the connection,
decompression in bounded pieces, and short error messages.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import time
import zlib
from typing import Any, Callable, Iterator, NamedTuple, Optional

from ..connection import Access
from .credentials import Headers
from .tunnels import InnerTls, open_tunnel, secured

_PIECE_BYTES = 1 << 16
_GZIP = 16 + zlib.MAX_WBITS
#: Detect a dead connection within half a minute, and send small requests immediately. Linux has all of these.
_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
)

Dial = Callable[[float], http.client.HTTPConnection]


class TransportError(Exception):
    """A request cannot be sent or its answer cannot be read. The message is a few words long."""


class Patience(NamedTuple):
    """Timeouts of a request in seconds: to connect, between two pieces of the answer, and in total."""

    connect: float
    silence: float
    total: float


class Response:
    """The answer to a request; ``status`` is its HTTP status. The caller reads it to its end or closes it."""

    def __init__(self, response: http.client.HTTPResponse, end: float, clock: Callable[[], float]) -> None:
        self.status = response.status
        self._response = response
        self._end = end
        self._clock = clock
        self._whole = False

    def header(self, name: str) -> str:
        """Return a header, empty if there is none."""
        return self._response.getheader(name) or ""

    @property
    def reusable(self) -> bool:
        """Whether the answer has been read to its end and the connection remains open."""
        return self._whole and not self._response.will_close

    def pieces(self) -> Iterator[bytes]:
        """Yield the content as it arrives, decompressed, in pieces of at most 64 KiB. Raises TransportError."""
        encoding = self.header("Content-Encoding").strip().lower()
        if encoding in ("", "identity"):
            return self._raw()
        if encoding == "gzip":
            return self._unpacked()
        raise TransportError("the answer has a Content-Encoding that was not requested")

    def _raw(self) -> Iterator[bytes]:
        response = self._response
        left = response.length
        while left is None or left > 0:
            if self._clock() > self._end:
                raise TransportError("timed out before the end of the answer")
            try:
                piece = response.read1(_PIECE_BYTES if left is None else min(left, _PIECE_BYTES))
            except (http.client.HTTPException, OSError, ValueError) as error:
                raise TransportError(_reading_failed(error)) from error
            if not piece:
                break
            if left is not None:
                left -= len(piece)
            yield piece
        if left:
            raise TransportError("the connection broke before the end of the answer")
        self._whole = True
        response.close()

    def _unpacked(self) -> Iterator[bytes]:
        decoder = zlib.decompressobj(_GZIP)
        for piece in self._raw():
            while not decoder.eof:
                try:
                    text = decoder.decompress(piece, _PIECE_BYTES)
                except zlib.error as error:
                    raise TransportError("the answer is not valid gzip data") from error
                if text:
                    yield text
                piece = decoder.unconsumed_tail
                if not piece and len(text) < _PIECE_BYTES:
                    break
        if not decoder.eof:
            raise TransportError("the answer's gzip data is truncated")

    def close(self) -> None:
        """Close the answer, discarding what has not been read."""
        self._response.close()


class Transport:
    """Sends one request at a time over a connection that is opened when needed and kept open.

    Used by one thread, except for :meth:`interrupt`. ``dial`` opens a connection within the given seconds.
    """

    def __init__(
        self, access: Access, dial: Optional[Dial] = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._access = access
        self._dial = dial or self._connect
        self._clock = clock
        self._connection: Optional[http.client.HTTPConnection] = None
        self._socket: Optional[socket.socket] = None
        self._answer: Optional[Response] = None
        scheme, _host, _port = access.address()
        proxy = access.proxy()
        # An HTTP proxy forwards plain requests; to a TLS server it opens a tunnel, and that of SOCKS always.
        self._forwarder = proxy if scheme == "http" and proxy is not None and proxy.scheme != "socks5" else None

    def request(self, method: str, path: str, headers: Headers, body: Optional[bytes], patience: Patience) -> Response:
        """Send a request and return the answer as soon as its headers have been received.

        ``path`` is appended to the server's URL. A GET request is sent a second time if a connection that was kept open
        turns out to be closed. Raises TransportError, or ConfigurationError for a certificate that cannot be used.
        """
        end = self._clock() + patience.total
        kept = self._kept()
        if kept is not None:
            try:
                return self._exchange(kept, method, path, headers=headers, body=body, patience=patience, end=end)
            except TransportError as error:
                self.close()
                if method != "GET" or not isinstance(error.__cause__, ConnectionError):
                    raise
        self.close()
        connection = self._dial(patience.connect)
        self._connection = connection
        self._socket = connection.sock.outer if isinstance(connection.sock, InnerTls) else connection.sock
        return self._exchange(connection, method, path, headers=headers, body=body, patience=patience, end=end)

    def interrupt(self) -> None:
        """Shut down the connection to wake the thread that is waiting for it; may be called from any thread."""
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                # SSLSocket.shutdown is not used: it modifies the object while the other thread reads from it.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        if self._answer is not None:
            self._answer.close()
        if self._connection is not None:
            self._connection.close()
        self._connection = self._socket = self._answer = None

    def _kept(self) -> Optional[http.client.HTTPConnection]:
        """Return the open connection if it can be reused: its last answer is complete and no more data is pending."""
        if self._connection is None or self._socket is None or self._answer is None or not self._answer.reusable:
            return None
        try:
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            readable = waiting.poll(0)
        except (OSError, ValueError):
            return None
        return None if readable else self._connection

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        *,
        headers: Headers,
        body: Optional[bytes],
        patience: Patience,
        end: float,
    ) -> Response:
        try:
            if self._socket is not None:
                self._socket.settimeout(patience.silence)
            connection.putrequest(method, self._target(path), skip_host=True, skip_accept_encoding=True)
            place = self._access.server.partition("://")[2].partition("/")[0].rstrip(":")
            for name, value in [("Host", place), *headers, *(self._forwarder.headers if self._forwarder else ())]:
                connection.putheader(name, value.encode())
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise TransportError(_reading_failed(error)) from error
        self._answer = Response(response, end, self._clock)
        return self._answer

    def _target(self, path: str) -> str:
        """Return the target of the request line: an absolute URL if a proxy forwards the request (RFC 9112, 3.2)."""
        server = self._access.server
        if self._forwarder is not None:
            return server + path
        prefix = server.partition("://")[2].partition("/")[2]
        return f"/{prefix}{path}" if prefix else path

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        scheme, host, port = self._access.address()
        proxy = self._access.proxy()
        over_tls, proxy_over_tls = scheme == "https", proxy is not None and proxy.scheme == "https"
        # Read the certificates first, so that an unusable file is not reported as a failure of the server.
        context = self._access.tls_context() if over_tls or proxy_over_tls else None
        connection = http.client.HTTPConnection(host, port)
        try:
            place = (host, port) if proxy is None else (proxy.host, proxy.port)
            # http.client uses of a socket only what TLS inside TLS has as well.
            sock: Any = socket.create_connection(place, seconds)
            connection.sock = sock
            for level, name, value in _SOCKET_OPTIONS:
                if hasattr(socket, name):
                    sock.setsockopt(level, getattr(socket, name), value)
            if proxy is not None and context is not None and proxy_over_tls:
                sock = connection.sock = secured(sock, context, self._access.server_name or proxy.host)
            if proxy is not None and self._forwarder is None:
                open_tunnel(sock, proxy, host, port)
            if context is not None and over_tls:
                connection.sock = secured(sock, context, self._access.server_name or host)
        except (http.client.HTTPException, OSError, ValueError) as error:
            connection.close()
            through = f" (through the proxy {proxy.host}:{proxy.port})" if proxy is not None else ""
            raise TransportError(_connecting_failed(error) + through) from error
        return connection


def _connecting_failed(error: Exception) -> str:
    if isinstance(error, socket.timeout):
        return "timed out while connecting"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error}"
    return f"cannot be reached: {error}"


def _reading_failed(error: Exception) -> str:
    if isinstance(error, socket.timeout):
        return "timed out while waiting for the answer"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error}"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection broke in the middle of the answer"
    if isinstance(error, (http.client.RemoteDisconnected, OSError)):
        return f"the connection broke: {error}"
    return f"the answer is not valid HTTP: {type(error).__name__}"
