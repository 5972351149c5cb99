# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Endpoints and clients for tests of userspace mode, in the network namespace of the test."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any, Sequence

from tests.kernel.agent_node import AgentNode, Object, service
from tests.lab import manifests, system

SECONDS = 10.0


def family_number(address: str) -> int:
    """Return the address family of an address, for a socket."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Backend:
    """An endpoint that answers connections and datagrams with its name, the client's address and the received data."""

    def __init__(self, address: str, port: int = 8080) -> None:
        self.address, self.port = address, port
        self.requests = 0
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        six = ":" in address
        line = f"-6 address replace {address}/128 dev lo nodad" if six else f"address replace {address}/32 dev lo"
        system.ip_batch([line])
        self._tcp = socket.create_server((address, port), family=family_number(address), backlog=1024)
        self._udp = socket.socket(family_number(address), socket.SOCK_DGRAM)
        self._udp.bind((address, port))
        for body in (self._accept, self._answer_datagrams):
            threading.Thread(target=body, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, client = self._tcp.accept()
                with self._lock:
                    self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock, client[0]), daemon=True).start()

    def _serve(self, sock: socket.socket, client: str) -> None:
        with contextlib.suppress(OSError), sock:
            while True:
                data = sock.recv(65536)
                if not data:
                    break
                self.requests += 1
                sock.sendall(f"{self.address} {client} ".encode() + data)

    def _answer_datagrams(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, client = self._udp.recvfrom(65536)
                if client is None:
                    break
                self._udp.sendto(f"{self.address} {client[0]} ".encode() + data, client)

    def close(self) -> None:
        """Stop it and reset its connections."""
        for sock in (self._tcp, self._udp):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        with self._lock:
            for item in self._open:
                with contextlib.suppress(OSError):
                    item.shutdown(socket.SHUT_RDWR)


def ask(address: str, port: int, source: str = "", kind: int = socket.SOCK_STREAM, text: bytes = b"hello") -> str:
    """Return the answer to one request. Raises OSError."""
    with socket.socket(family_number(address), kind) as sock:
        sock.settimeout(SECONDS)
        if source:
            sock.bind((source, 0))
        sock.connect((address, port))
        sock.sendall(text)
        return sock.recv(65536).decode()


def answering(address: str, port: int, tries: int = 8, source: str = "", kind: int = socket.SOCK_STREAM) -> set[str]:
    """Return the addresses of the endpoints that answer."""
    return {ask(address, port, source, kind).split()[0] for _number in range(tries)}


def endpoints_of(
    number: int, addresses: Sequence[str], protocols: Sequence[str] = ("TCP",), node: str = "node1", port: int = 8080
) -> Object:
    """Return a slice of Service ``svc-NUMBER`` with ready endpoints at these addresses."""
    endpoints = [manifests.endpoint(address, node) for address in addresses]
    family = "ipv6" if addresses and ":" in addresses[0] else "ipv4"
    ports = [manifests.port(port, name=f"p80-{item.lower()}", protocol=item) for item in protocols]
    return manifests.endpoint_slice(f"svc-{number}", endpoints, ports, name=f"svc-{number}-{family}")


def service_of(number: int, protocols: Sequence[str] = ("TCP",), **spec: Any) -> Object:
    """Service ``svc-NUMBER`` with port 80 of each protocol."""
    item = service(number, **spec)
    item["spec"]["ports"] = [{"name": f"p80-{name.lower()}", "protocol": name, "port": 80} for name in protocols]
    return item


def userspace_node(scratch: Path, mode: str = "userspace", api: bool = True, variant: str = "") -> AgentNode:
    """Return an agent whose control socket is where one-shot commands look for it."""
    node = AgentNode(scratch, mode, variant, api=api)
    control = scratch / "run" / "agent" / "agent.sock"
    control.parent.mkdir(parents=True)
    (scratch / "agent.sock").symlink_to(control)
    node.options = ["--control", str(control)]
    return node


def node_in_mode(scratch: Path, mode: str, api: bool = True) -> AgentNode:
    """Return an agent in any mode, with the legacy iptables where the mode uses it."""
    if mode == "userspace":
        return userspace_node(scratch, api=api)
    return AgentNode(scratch, mode, variant="" if mode.endswith("nftables") else "legacy", api=api)


def descriptors(process: int) -> dict[str, str]:
    """Return the open files of a process: number -> what it is."""
    found = {}
    folder = f"/proc/{process}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"{folder}/{name}")
    return found


def addresses_on(device: str) -> list[tuple[str, bool]]:
    """Return the addresses on a device, each with whether the kernel avoids it as a source."""
    links = json.loads(system.run(["ip", "-j", "address", "show"]))
    return [
        (item["local"], bool(item.get("deprecated")))
        for link in links
        if link["ifname"] == device
        for item in link["addr_info"]
        if item["scope"] == "global"
    ]
