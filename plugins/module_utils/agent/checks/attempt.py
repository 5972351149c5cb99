# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One non-blocking check of an endpoint: connect, TLS handshake, and the status line of an HTTP answer."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from typing import NamedTuple, Optional

from ...base.addresses import IPV6, address_and_port, family_of
from ...cluster.model import HealthCheck, NamespacedName

_MOST_HEAD_BYTES = 4096
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Target(NamedTuple):
    """The target of a check: an endpoint's address and port, and the kind of check."""

    service: NamespacedName
    address: str
    port: int
    check: HealthCheck

    def __str__(self) -> str:
        return address_and_port(self.address, self.port)


class TlsContexts:
    """TLS contexts by CA file; a changed file is read again."""

    def __init__(self) -> None:
        self._contexts: dict[str, tuple[tuple[int, int], ssl.SSLContext]] = {}

    def get(self, ca: str) -> ssl.SSLContext:
        """Return the context of a CA file; without one no certificate is verified. Raises OSError (or ssl.SSLError)."""
        status = os.stat(ca) if ca else None
        version = (status.st_mtime_ns, status.st_ino) if status is not None else (0, 0)
        known = self._contexts.get(ca)
        if known is not None and known[0] == version:
            return known[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if ca:
            context.load_verify_locations(ca)
        else:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        self._contexts[ca] = (version, context)
        return context


class Failed(Exception):
    """The check has failed; the text says why."""


class Attempt:
    """A check in progress. ``events``: the events to wait for. The constructor raises Failed on an early failure."""

    def __init__(self, target: Target, contexts: TlsContexts) -> None:
        self.target = target
        self.events = WRITE
        self._contexts = contexts
        self._received = b""
        self._phase = self._connected
        family = socket.AF_INET6 if family_of(target.address) == IPV6 else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.setblocking(False)
        error = self.socket.connect_ex((target.address, target.port))
        if error not in (0, errno.EINPROGRESS):
            self.close()
            raise Failed(os.strerror(error))

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def advance(self) -> bool:
        """Continue when the descriptor is ready; return whether the check has passed. Raises Failed."""
        try:
            while True:
                step = self._phase
                if step():
                    return True
                if self._phase == step:
                    return False
        except ssl.SSLWantReadError:
            self.events = READ
        except ssl.SSLWantWriteError:
            self.events = WRITE
        except BlockingIOError:
            pass
        except ssl.SSLCertVerificationError as error:
            raise Failed(f"certificate: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise Failed(f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}") from error
        except OSError as error:
            raise Failed(error.strerror or str(error)) from error
        except ValueError as error:
            # Python cannot encode the host name (a label is too long) or the path.
            raise Failed(str(error)) from error
        return False

    def _connected(self) -> bool:
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise Failed(os.strerror(error))
        check = self.target.check
        if check.scheme == "tcp":
            return True
        if check.scheme == "https":
            context = self._context()
            name = check.server_name or self.target.address
            self.socket = context.wrap_socket(self.socket, do_handshake_on_connect=False, server_hostname=name)
            self._phase = self._encrypted
        else:
            self._phase = self._ask
        return False

    def _context(self) -> ssl.SSLContext:
        ca = self.target.check.ca
        try:
            return self._contexts.get(ca)
        except ssl.SSLError as error:
            raise Failed(f"{ca}: holds no certificate") from error
        except OSError as error:
            raise Failed(f"{ca}: {error.strerror or error}") from error

    def _encrypted(self) -> bool:
        if isinstance(self.socket, ssl.SSLSocket):
            self.socket.do_handshake()
        self._phase = self._ask
        return False

    def _ask(self) -> bool:
        check = self.target.check
        request = (
            f"GET {check.path} HTTP/1.1\r\nHost: {check.server_name or self.target}\r\n"
            "User-Agent: kubenode-proxy\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        )
        # Smaller than any send buffer of a new connection.
        self.socket.send(request.encode("ascii"))
        self.events = READ
        self._phase = self._answered
        return False

    def _answered(self) -> bool:
        part = self.socket.recv(_MOST_HEAD_BYTES)
        self._received += part
        line, end, _rest = self._received.partition(b"\r\n")
        if end or len(self._received) >= _MOST_HEAD_BYTES or not part:
            status = _status(line)
            if status is None:
                raise Failed("no HTTP answer" if self._received else "the connection was closed without an answer")
            if not any(low <= status <= high for low, high in self.target.check.statuses):
                raise Failed(f"HTTP status {status}")
            return True
        return False


def _status(line: bytes) -> Optional[int]:
    words = line.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or len(words[1]) != 3 or not words[1].isdigit():
        return None
    return int(words[1])
