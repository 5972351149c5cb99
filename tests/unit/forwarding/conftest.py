# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A forwarder in its thread, with real endpoints and clients on loopback addresses."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import ModuleType
from typing import Callable, Iterator, Optional

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.clients import ClientRule
from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding import forwarder as module
from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding.limits import Limits
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.model import Listener, ListenerKey
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change
from tests.lab.ports import free_port
from tests.waiting import PATIENCE

Place = tuple[str, int]


def echo(sock: socket.socket) -> None:
    """Echo data until the end of the stream."""
    while True:
        data = sock.recv(1 << 16)
        if not data:
            break
        sock.sendall(data)


class Endpoint:
    """A TCP server that calls ``serve`` for each connection in a thread."""

    def __init__(self, serve: Callable[[socket.socket], None] = echo, address: str = "127.0.0.1") -> None:
        self._serve = serve
        self._socket = socket.create_server((address, 0), backlog=512)
        self.place: Place = self._socket.getsockname()
        self.accepted = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _client = self._socket.accept()
                self.accepted += 1
                threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            self._serve(sock)

    def close(self) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def lacking(monkeypatch: pytest.MonkeyPatch, where: ModuleType, number: int) -> None:
    """Let the next socket to an endpoint fail with this error in a module of the forwarder."""
    left = [number]
    original = where.open_socket

    def open_socket(address: str, kind: int) -> socket.socket:
        if left:
            raise OSError(left.pop(), os.strerror(number))
        return original(address, kind)

    monkeypatch.setattr(where, "open_socket", open_socket)


class UdpEndpoint:
    """A UDP server that answers each datagram with its name."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.place: Place = self._socket.getsockname()
        self._name = name.encode()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, client = self._socket.recvfrom(1 << 16)
                if client is None:
                    break
                self._socket.sendto(self._name + b" " + data, client)

    def close(self) -> None:
        """Close the socket: datagrams are refused."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def read_all(sock: socket.socket) -> bytes:
    """Return everything that a socket receives until its end."""
    found = bytearray()
    while True:
        data = sock.recv(1 << 16)
        if not data:
            return bytes(found)
        found += data


def named(name: bytes):
    """Return a server function that answers each connection with a name."""
    return lambda sock: sock.sendall(name)


def names(running, key, tries=8, source=""):
    """Return the answers to several connections, one after the other."""
    found = []
    for _number in range(tries):
        with running.connect(key, source) as sock:
            found.append(read_all(sock))
    return found


def assert_reset(running, key, source=""):
    """Check that a client is reset, perhaps before its connect() has returned."""
    with pytest.raises(ConnectionResetError), running.connect(key, source) as sock:
        sock.recv(1)


def closed_port() -> Place:
    """Return a place on loopback on which no program listens."""
    return "127.0.0.1", free_port()


class Running:
    """A running forwarder; ``errors`` collects its defects."""

    def __init__(self, limits: Limits) -> None:
        self.errors: list[Exception] = []
        self.forwarder = module.Forwarder(limits, ClientRule(), self.errors.append)
        self._thread = threading.Thread(target=self.forwarder.run, args=(lambda: None,), daemon=True)
        self._thread.start()
        self._keys: list[ListenerKey] = []

    def listen(
        self, *endpoints: Place, protocol: str = "tcp", key: Optional[ListenerKey] = None, **more: object
    ) -> ListenerKey:
        """Add a listener, or replace one, and return its key."""
        key = key or ListenerKey(protocol, *closed_port())
        listener = Listener("default/web", tuple(sorted(endpoints)), **more)  # type: ignore[arg-type]
        before = self.forwarder.table().get(key)
        if before is None:
            self.forwarder.apply(Change(added={key: listener}))
        else:
            self.forwarder.apply(Change(replaced={key: (before, listener)}))
        return key

    def connect(self, key: ListenerKey, source: str = "") -> socket.socket:
        """Open a client's connection."""
        sock = socket.create_connection((key.address, key.port), PATIENCE, (source, 0) if source else None)
        sock.settimeout(PATIENCE)
        return sock

    def status(self, name: str) -> int:
        """Return one number of the status."""
        value = self.forwarder.status()[name]
        assert isinstance(value, int)
        return value

    def close(self) -> None:
        """Stop the forwarder and close everything."""
        self.forwarder.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.forwarder.close()


@pytest.fixture
def start(monkeypatch) -> Iterator[Callable[..., Running]]:
    """Provide a function that starts a forwarder with changed limits; it must have no defect when the test ends."""
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    running: list[Running] = []

    def begin(**limits: float) -> Running:
        values = {"connect_seconds": 0.3, "drain_seconds": 0.2, **limits}
        running.append(Running(Limits(**values)))  # type: ignore[arg-type]
        return running[-1]

    yield begin
    for item in running:
        item.close()
        assert item.errors == []


@pytest.fixture
def endpoint() -> Iterator[Callable[..., Endpoint]]:
    """Provide a function that starts a TCP endpoint."""
    found: list[Endpoint] = []

    def begin(serve: Callable[[socket.socket], None] = echo) -> Endpoint:
        found.append(Endpoint(serve))
        return found[-1]

    yield begin
    for item in found:
        item.close()


@pytest.fixture
def udp_endpoint() -> Iterator[Callable[[str], UdpEndpoint]]:
    """Provide a function that starts a UDP endpoint."""
    found: list[UdpEndpoint] = []

    def begin(name: str) -> UdpEndpoint:
        found.append(UdpEndpoint(name))
        return found[-1]

    yield begin
    for item in found:
        item.close()
