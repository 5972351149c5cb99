# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Endpoints of static Services in the network namespace of a test, each with its own address, and their manifests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

from tests.lab import system

ADDRESS = "10.103.97.2"
PORT = 6443
NAME = "static/apiserver"


def endpoint(number: int) -> str:
    """Return the address of a backend."""
    return f"192.0.2.{10 + number}"


def make_network(count: int = 3) -> None:
    """Give the namespace the addresses of the backends, and a default route for addresses of Services."""
    system.ip_batch(
        [
            "link add backends type veth peer name unused",
            "link set unused up",
            "link set backends up",
            "address add 192.0.2.1/24 dev backends",
            *(f"address add {endpoint(number)}/24 dev backends" for number in range(1, count + 1)),
            "route add default dev backends src 192.0.2.1",
        ]
    )


class Backend:
    """A TCP server that sends its number to each client; with ``hold``, connections stay open."""

    def __init__(self, number: int, hold: bool = False) -> None:
        self.number = number
        self._hold = hold
        self._held: List[socket.socket] = []
        self._server: Optional[socket.socket] = None
        self.start()

    def start(self) -> None:
        """Listen and serve in a thread."""
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((endpoint(self.number), PORT))
        server.listen(64)
        self._server = server
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _peer = server.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                connection.sendall(str(self.number).encode())
            if self._hold:
                self._held.append(connection)
            else:
                connection.close()

    def send(self, data: bytes) -> None:
        """Send data through all held connections whose client has not closed them."""
        for connection in self._held:
            with contextlib.suppress(OSError):
                connection.sendall(data)

    def stop(self) -> None:
        """Refuse new connections; held connections stay open."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Close the listener and all connections."""
        self.stop()
        for connection in self._held:
            connection.close()


@contextlib.contextmanager
def three_backends(hold: bool = False) -> Iterator[List[Backend]]:
    """Start three backends, and close them afterwards."""
    servers = [Backend(number, hold) for number in (1, 2, 3)]
    yield servers
    for backend in servers:
        backend.close()


def connected_to(number: str, place: Optional[str] = None) -> socket.socket:
    """Return an open connection to one backend, through the Service's address, from a namespace or from here."""
    for _attempt in range(200):
        sock = system.socket_inside(place, socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(20)
        sock.connect((ADDRESS, PORT))
        if sock.recv(16).decode() == number:
            return sock
        sock.close()
    raise AssertionError(f"backend {number} never answers")


class Routed:
    """A client and the backends, each in a network namespace behind the node, which routes between them."""

    def __init__(self) -> None:
        self.client, self.servers = (f"knfw{os.getpid()}-{part}" for part in ("client", "servers"))
        for number, name in enumerate((self.client, self.servers)):
            system.ip_batch([f"netns add {name}", f"link add port{number} type veth peer name eth0 netns {name}"])
            system.ip_batch(["link set lo up", "link set eth0 up"], name)
        system.ip_batch(
            [
                *("link set port0 up", "link set port1 up"),
                *("address add 203.0.113.1/24 dev port0", "address add 192.0.2.1/24 dev port1"),
                # Addresses of Services need some route.
                "route add default dev port1 src 192.0.2.1",
            ]
        )
        system.ip_batch(["address add 203.0.113.10/24 dev eth0", "route add default via 203.0.113.1"], self.client)
        addresses = [f"address add {endpoint(number)}/24 dev eth0" for number in (1, 2)]
        system.ip_batch([*addresses, "route add default via 192.0.2.1"], self.servers)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")

    def backends(self) -> List[Backend]:
        """Start the backends, which keep connections open."""
        with system.inside(f"/run/netns/{self.servers}"):
            return [Backend(number, hold=True) for number in (1, 2)]

    def connection_to(self, number: str, local: bool = False) -> socket.socket:
        """Return an open connection to one backend, through the Service's address, of the client or of the node."""
        return connected_to(number, None if local else f"/run/netns/{self.client}")

    def close(self) -> None:
        """Remove the namespaces."""
        system.ip_batch([f"netns delete {name}" for name in (self.client, self.servers)])


def ask(seconds: float = 2.0) -> str:
    """Connect to the Service's address; return the number of the backend that answers, or the error."""
    try:
        with socket.create_connection((ADDRESS, PORT), seconds) as connection:
            connection.settimeout(seconds)
            return connection.recv(16).decode()
    except OSError as error:
        return type(error).__name__


def manifests(numbers: Sequence[int] = (1, 2, 3), **annotations: str) -> List[Dict[str, Any]]:
    """Return the manifests of the Service and its EndpointSlice."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "apiserver", "annotations": annotations},
            "spec": {"clusterIP": ADDRESS, "ports": [{"name": "https", "port": PORT}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "apiserver-1", "labels": {"kubernetes.io/service-name": "apiserver"}},
            "addressType": "IPv4",
            "ports": [{"name": "https", "port": PORT}],
            "endpoints": [{"addresses": [endpoint(number)]} for number in numbers],
        },
    ]


def write_manifests(directory: Path, objects: Sequence[Dict[str, Any]], name: str = "apiserver.json") -> None:
    """Write manifests to one file."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))
