# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server on one port that is API server and proxy of every kind, and records what reaches it."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import ssl
import threading
from typing import Any

from tests.apiserver.tls import Certificates

#: Serves as a list, and as a version.
_ANSWER = json.dumps(
    {
        "kind": "NodeList",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": "1"},
        "items": [],
        "major": "1",
        "minor": "34",
        "gitVersion": "v1.34.0",
    }
).encode()
_SHOWN = ("Authorization", "Proxy-Authorization", "Accept-Encoding")
_SECONDS = 10.0

Hop = dict[str, Any]


class Witness:
    """Records in ``hops`` each proxy that a request passed, and the request itself.

    A proxy connects to this server, whatever its target is. ``certificates`` are those of the server, whose
    authority's client certificates are accepted.
    """

    def __init__(self, certificates: Certificates) -> None:
        self.hops: list[Hop] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.certificate, certificates.key)
        self._context.load_verify_locations(certificates.authority)
        self._context.verify_mode = ssl.CERT_OPTIONAL
        self._context.sni_callback = _note_name
        self._listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                client.settimeout(_SECONDS)
                threading.Thread(target=self._handle, args=(client,), daemon=True).start()

    def _handle(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(client):
            first = client.recv(1, socket.MSG_PEEK)
            if first == b"\x05":
                self._socks(client)
            elif first == b"\x16":
                with self._context.wrap_socket(client, server_side=True) as secured:
                    found: Any = (secured.getpeercert() or {}).get("subject", ())
                    subject = dict(pair[0] for pair in found)
                    tls = {"name": getattr(secured, "asked_name", None), "client": subject.get("commonName")}
                    self._http(secured, {"tls": tls})
            else:
                self._http(client, {})

    def _http(self, client: socket.socket, hop: Hop) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = client.recv(65536)
            if not piece:
                return
            head += piece
        first, *lines = head.decode().split("\r\n\r\n")[0].split("\r\n")
        method, target, _version = first.split(" ")
        parts = [line.partition(":") for line in lines]
        headers = [(part[0].title(), part[2].strip()) for part in parts]
        hop["headers"] = sorted(f"{n}: {v}" for n, v in headers if n in _SHOWN or n.startswith("Impersonate-"))
        hop.update(method=method, target=_target(target))
        self.hops.append(hop)
        if method == "CONNECT":
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            self._pump(client)
            return
        hop["host"] = dict(headers).get("Host", "").lower()
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + _ANSWER)

    def _socks(self, client: socket.socket) -> None:
        """Serve SOCKS 5 (RFC 1928) with a user name and password (RFC 1929) if the client has them."""
        hop: Hop = {"method": "SOCKS5"}
        methods = _exactly(client, _exactly(client, 2)[1])
        if 2 in methods:
            client.sendall(b"\x05\x02")
            user = _exactly(client, _exactly(client, 2)[1])
            password = _exactly(client, _exactly(client, 1)[0])
            hop["user"] = f"{user.decode()}:{password.decode()}"
            client.sendall(b"\x01\x00")
        else:
            client.sendall(b"\x05\x00")
        kind = _exactly(client, 4)[3]
        if kind == 3:
            host = _exactly(client, _exactly(client, 1)[0]).decode()
        else:
            family, size = (socket.AF_INET, 4) if kind == 1 else (socket.AF_INET6, 16)
            host = socket.inet_ntop(family, _exactly(client, size))
        hop["target"] = f"{host} {int.from_bytes(_exactly(client, 2), 'big')}"
        self.hops.append(hop)
        client.sendall(b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00")
        self._pump(client)

    def _pump(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self.port), _SECONDS) as inner:
            while True:
                waiting = isinstance(client, ssl.SSLSocket) and client.pending()
                readable = [client] if waiting else select.select([client, inner], [], [], _SECONDS)[0]
                if not readable:
                    return
                for end in readable:
                    data = end.recv(65536)
                    if not data:
                        return
                    (inner if end is client else client).sendall(data)


def _target(target: str) -> str:
    """Return the target of a request without what its client requests."""
    return re.sub(r"/(version|api/v1/nodes)$", "", target.partition("?")[0])


def _note_name(connection: Any, name: Any, _context: ssl.SSLContext) -> None:
    connection.asked_name = name and name.lower()


def _exactly(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = client.recv(size - len(data))
        if not piece:
            raise OSError("the client closed the connection")
        data += piece
    return data
