# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A connection that goes through a proxy: the tunnels of HTTP and SOCKS 5, and TLS inside TLS."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import struct
from typing import Any, Callable, TypeVar, Union

from ....base.addresses import address_and_port, canonical_address
from .proxies import Proxy

_PIECE_BYTES = 1 << 16

_T = TypeVar("_T")


class InnerTls:
    """TLS inside a TLS connection, with what http.client needs of a socket. Raises OSError."""

    def __init__(self, outer: ssl.SSLSocket, context: ssl.SSLContext, name: str) -> None:
        self.outer = outer
        self.close = outer.close
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sent, server_hostname=name)
        self._carry(self._tls.do_handshake)

    def sendall(self, data: bytes) -> None:
        """Send all data."""
        self._carry(lambda: self._tls.write(data))

    def recv_into(self, buffer: Any) -> int:
        """Put what has arrived into a buffer and return its size, 0 at the end."""
        try:
            piece = self._carry(lambda: self._tls.read(len(buffer)))
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return 0
        buffer[: len(piece)] = piece
        return len(piece)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return a reader, whose connection stays open until both are closed."""
        return io.BufferedReader(_Reader(self))

    def _carry(self, action: Callable[[], _T]) -> _T:
        """Return what an action does, after carrying between the two connections what it waits for."""
        while True:
            try:
                result = action()
            except ssl.SSLWantReadError:
                self.outer.sendall(self._sent.read())
                piece = self.outer.recv(_PIECE_BYTES)
                self._received.write(piece) if piece else self._received.write_eof()
                continue
            self.outer.sendall(self._sent.read())
            return result


class _Reader(io.RawIOBase):
    def __init__(self, connection: InnerTls) -> None:
        super().__init__()
        self._connection = connection
        self._keeps_open = connection.outer.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._connection.recv_into(buffer)

    def close(self) -> None:
        self._keeps_open.close()
        super().close()


def secured(sock: socket.socket, context: ssl.SSLContext, name: str) -> Union[ssl.SSLSocket, InnerTls]:
    """Return TLS over a connection, which may be TLS itself. Raises OSError and ValueError."""
    # Names of certificates have no final dot.
    name = name.rstrip(".")
    if isinstance(sock, ssl.SSLSocket):
        return InnerTls(sock, context, name)
    return context.wrap_socket(sock, server_hostname=name)


def open_tunnel(sock: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Let a proxy, to which there is a connection, connect to a server. Raises OSError, ValueError, HTTPException."""
    if proxy.scheme == "socks5":
        _open_socks(sock, proxy, host, port)
        return
    place = address_and_port(host, port)
    fields = [f"CONNECT {place} HTTP/1.1", f"Host: {place}", *(f"{name}: {value}" for name, value in proxy.headers)]
    sock.sendall("\r\n".join([*fields, "", ""]).encode())
    answer = http.client.HTTPResponse(sock, method="CONNECT")
    answer.begin()
    if answer.status != http.client.OK:
        raise OSError(f"the proxy refuses to connect: {answer.status} {answer.reason}")


def _open_socks(sock: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Open a tunnel by SOCKS 5 (RFC 1928), with a user name and password if there are any (RFC 1929)."""
    sock.sendall(b"\x05\x02\x00\x02" if proxy.user else b"\x05\x01\x00")
    with sock.makefile("rb") as answers:
        method = answers.read(2)
        if method == b"\x05\x02" and proxy.user:
            sock.sendall(b"\x01" + _counted(proxy.user.encode()) + _counted(proxy.password.encode()))
            if answers.read(2) != b"\x01\x00":
                raise OSError("the proxy refuses the user name and password")
        elif method != b"\x05\x00":
            raise OSError("the proxy refuses every method of authentication")
        address = canonical_address(host)
        if address is None:
            place = b"\x03" + _counted(host.encode("idna"))
        else:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            place = (b"\x04" if ":" in address else b"\x01") + socket.inet_pton(family, address)
        sock.sendall(b"\x05\x01\x00" + place + struct.pack("!H", port))
        head = answers.read(4)
        if head[:2] != b"\x05\x00":
            raise OSError(f"the proxy refuses to connect: reply {head[1:2].hex() or 'missing'} of RFC 1928")
        answers.read({1: 4, 4: 16}.get(head[3]) or answers.read(1)[0])
        answers.read(2)


def _counted(text: bytes) -> bytes:
    return bytes([len(text)]) + text
