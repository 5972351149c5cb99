# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's HTTP servers: health, metrics, and one per Service health check node port.

A server that cannot bind is tried again by its owner; nothing here ends the agent.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from typing import Callable, Dict, List, Optional, Tuple

from ...cluster.model import NamespacedName
from ...errors import KernelError
from .health import Answer, ProxyHealth, service_health_answer

#: Answers a GET for a path (without its query); None is 404.
Responder = Callable[[str], Optional[Answer]]

_PLAIN = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
_NOT_FOUND = Answer(404, _PLAIN, b"404 page not found\n")


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: Tuple[str, int], responder: Responder, both_families: bool, delete: Responder) -> None:
        self.both_families = both_families
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.responder = responder
        self.delete = delete
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            # "::" may answer for IPv4 as well, as Go's listener does where it is not asked for one family.
            only = 0 if self.server_address[0] == "::" and self.both_families else 1
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def do_GET(self) -> None:
        """Answer one request by the server's responder."""
        self._send(self.server.responder(self.path.partition("?")[0]) or _NOT_FOUND)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        """Have the server's other responder do what the path stands for."""
        self._send(self.server.delete(self.path.partition("?")[0]) or _NOT_FOUND)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.code)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are counted by metrics, not logged one by one."""


class HttpServer:
    """A threaded HTTP server on one address; binds in the constructor and raises KernelError if that fails.

    ``both_families``: ``::`` stands for IPv4 as well. ``delete`` answers DELETE requests.
    """

    def __init__(
        self,
        address: str,
        port: int,
        responder: Responder,
        both_families: bool = True,
        delete: Responder = lambda _path: None,
    ) -> None:
        try:
            self._server = _Server((address, port), responder, both_families, delete)
        except OSError as error:
            raise KernelError(f"cannot listen on {address} port {port}: {error.strerror}") from error
        self.port: int = self._server.server_port
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"http-{self.port}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Not serve_forever: that wakes up several times a second to see whether it should end.
        while not self._closing:
            self._server.handle_request()

    def close(self) -> None:
        """Stop listening; requests under way are finished by their threads."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.server_close()


class ServiceHealthServers:
    """The health check node ports of Services, opened and closed as the Services come and go."""

    def __init__(self, addresses: Tuple[str, ...], health: ProxyHealth) -> None:
        self._addresses = addresses
        self._health = health
        self._counts: Dict[NamespacedName, int] = {}
        self._open: Dict[NamespacedName, Tuple[int, List[HttpServer]]] = {}

    def sync(
        self, ports: Dict[NamespacedName, int], counts: Dict[NamespacedName, int]
    ) -> List[Tuple[NamespacedName, str]]:
        """Serve these ports with these counts of ready local endpoints; returns (Service, reason) of each failure.

        A Service that could not be opened is tried again at the next sync.
        """
        self._counts = {service: counts.get(service, 0) for service in ports}
        for service in [name for name, (port, _servers) in self._open.items() if ports.get(name) != port]:
            self._close(service)
        return [
            failure
            for service, port in ports.items()
            if service not in self._open
            for failure in self._start(service, port)
        ]

    def _start(self, service: NamespacedName, port: int) -> List[Tuple[NamespacedName, str]]:
        def respond(_path: str) -> Answer:
            return service_health_answer(service, self._counts.get(service, 0), self._health.healthy)

        servers: List[HttpServer] = []
        try:
            for address in self._addresses:
                servers.append(HttpServer(address, port, respond, both_families=False))
        except KernelError as error:
            for server in servers:
                server.close()
            return [(service, str(error))]
        self._open[service] = (port, servers)
        return []

    def _close(self, service: NamespacedName) -> None:
        for server in self._open.pop(service)[1]:
            server.close()

    def close(self) -> None:
        """Close every port."""
        for service in list(self._open):
            self._close(service)
