# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Echo servers of all pods of a node in one process: each answers with its own name and the peer it saw.

``python -m tests.lab.echo CONFIGURATION``: a JSON list of ``{"name": ..., "namespace": path or null,
"ports": [["TCP", 8080], ["UDP", 53]]}``. It prints ``ready`` when all sockets listen.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
from pathlib import Path
from typing import Callable, Optional, Sequence

from tests.lab import wire
from tests.lab.system import socket_inside

Handler = Callable[[], None]


def _peer(address: str) -> str:
    return address[len("::ffff:") :] if address.startswith("::ffff:") else address


class EchoServer:
    """One event loop for any number of listening sockets in any network namespaces."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def listen(self, name: str, namespace: Optional[str], protocol: str, port: int) -> None:
        """Answer as ``name`` on a port, over IPv4 and IPv6, in the network namespace at the given path."""
        kind = socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM
        server = socket_inside(namespace, socket.AF_INET6, kind)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setblocking(False)
        server.bind(("::", port))
        if protocol == "TCP":
            server.listen(512)
            self._selector.register(server, selectors.EVENT_READ, lambda: self._accept(server, name, port))
        else:
            self._selector.register(server, selectors.EVENT_READ, lambda: self._datagram(server, name, port))

    def _accept(self, server: socket.socket, name: str, port: int) -> None:
        try:
            connection, peer = server.accept()
        except OSError:
            return
        text = f"{name} {_peer(peer[0])}"
        if port == wire.DNS_PORT:
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._dns_stream(connection, text))
            return
        with connection:
            connection.settimeout(1)
            self._send(lambda: connection.sendall(text.encode("ascii") + b"\n"))

    def _dns_stream(self, connection: socket.socket, text: str) -> None:
        self._selector.unregister(connection)
        with connection:

            def answer() -> None:
                query = connection.recv(4096)
                if len(query) > 2:
                    response = wire.dns_response(query[2:], text)
                    connection.sendall(struct.pack("!H", len(response)) + response)

            self._send(answer)

    def _datagram(self, server: socket.socket, name: str, port: int) -> None:
        def answer() -> None:
            data, peer = server.recvfrom(4096)
            text = f"{name} {_peer(peer[0])}"
            server.sendto(wire.dns_response(data, text) if port == wire.DNS_PORT else text.encode("ascii"), peer)

        self._send(answer)

    @staticmethod
    def _send(action: Handler) -> None:
        """Send an answer; ignore a peer that has closed its connection or sent an invalid request."""
        try:
            action()
        except (OSError, ValueError, struct.error) as error:
            sys.stderr.write(f"echo: {error}\n")

    def serve(self) -> None:
        """Answer forever."""
        while True:
            for key, _ in self._selector.select():
                key.data()


def main(arguments: Sequence[str]) -> int:
    """Open every socket of the configuration, print ``ready``, and serve."""
    configuration = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    server = EchoServer()
    for pod in configuration:
        for protocol, port in pod["ports"]:
            server.listen(pod["name"], pod["namespace"], protocol, port)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
