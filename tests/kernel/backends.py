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
from typing import Any, Iterator, Optional, Sequence

from tests.lab import system

ADDRESS = "10.103.97.2"
ADDRESS_SIX = "fd00:10:103::2"
PORT = 6443
NAME = "static/apiserver"


def endpoint(number: int, family: str = "IPv4") -> str:
    """Return the address of a backend."""
    return f"192.0.2.{10 + number}" if family == "IPv4" else f"fd00:192::{10 + number}"


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

    def __init__(self, number: int, hold: bool = False, family: str = "IPv4") -> None:
        self.number = number
        self._family = family
        self._hold = hold
        self._held: list[socket.socket] = []
        self._server: Optional[socket.socket] = None
        self.start()

    def start(self) -> None:
        """Listen and serve in a thread."""
        server = socket.create_server(
            (endpoint(self.number, self._family), PORT),
            family=socket.AF_INET if self._family == "IPv4" else socket.AF_INET6,
            backlog=64,
        )
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
def three_backends(hold: bool = False) -> Iterator[list[Backend]]:
    """Start three backends, and close them afterwards."""
    servers = [Backend(number, hold) for number in (1, 2, 3)]
    yield servers
    for backend in servers:
        backend.close()


def connected_to(number: str, place: Optional[str] = None, address: str = ADDRESS, port: int = PORT) -> socket.socket:
    """Return an open connection to one backend, through an address of the Service, from a namespace or from here."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _attempt in range(200):
        sock = system.socket_inside(place, family, socket.SOCK_STREAM)
        sock.settimeout(20)
        sock.connect((address, port))
        if sock.recv(16).decode() == number:
            return sock
        sock.close()
    raise AssertionError(f"backend {number} never answers")


def _give_addresses(place: str, addresses: Sequence[str], gateways: Sequence[str]) -> None:
    """Give the interface of a namespace addresses of both families, and default routes."""
    lines = [f"address add {address} dev eth0{' nodad' if ':' in address else ''}" for address in addresses]
    routes = [f"{'-6 ' if ':' in gateway else ''}route add default via {gateway}" for gateway in gateways]
    system.ip_batch([*lines, *routes], place)


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
                "address add fd00:203::1/64 dev port0 nodad",
                "address add fd00:192::1/64 dev port1 nodad",
                "-6 route add default dev port1 src fd00:192::1",
            ]
        )
        _give_addresses(self.client, ["203.0.113.10/24", "fd00:203::10/64"], ["203.0.113.1", "fd00:203::1"])
        held = [f"{endpoint(number)}/24" for number in (1, 2)] + [f"{endpoint(number, 'IPv6')}/64" for number in (1, 2)]
        _give_addresses(self.servers, held, ["192.0.2.1", "fd00:192::1"])
        for parameter in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path(f"/proc/sys/net/{parameter}").write_text("1", encoding="ascii")

    def backends(self, families: Sequence[str] = ("IPv4",)) -> list[Backend]:
        """Start the backends, which keep connections open."""
        with system.inside(f"/run/netns/{self.servers}"):
            return [Backend(number, hold=True, family=family) for number in (1, 2) for family in families]

    def connection_to(
        self, number: str, local: bool = False, address: str = ADDRESS, port: int = PORT
    ) -> socket.socket:
        """Return an open connection to one backend, through an address of the Service, of the client or of the node."""
        return connected_to(number, None if local else f"/run/netns/{self.client}", address, port)

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


def manifests(numbers: Sequence[int] = (1, 2, 3), **annotations: str) -> list[dict[str, Any]]:
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


def write_manifests(directory: Path, objects: Sequence[dict[str, Any]], name: str = "apiserver.json") -> None:
    """Write manifests to one file."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))
