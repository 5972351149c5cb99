# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small cluster behind an API server on this machine that containers reach over podman's bridge."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Sequence, Union

from tests.apiserver.real import VARIABLE, Gate, RealStore
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.lab import manifests

# The first address of podman's default network, which is this machine's on the bridge.
BRIDGE = "10.88.0.1"
POD = "10.244.1.2"
TOKEN = "test-token"


def service(name: str, address: str, node_port: int = 0, protocols: Sequence[str] = ("TCP",)) -> dict[str, Any]:
    """Return a Service with port 80 of each protocol; only the first may have a node port."""
    ports = [
        manifests.port(80, name=f"{protocol.lower()}-web", protocol=protocol, targetPort=8080) for protocol in protocols
    ]
    if node_port:
        ports[0]["nodePort"] = node_port
    kind = "NodePort" if node_port else "ClusterIP"
    return manifests.service(name, address, ports, metadata={"uid": f"uid-{name}"}, type=kind)


def endpoint_slice(name: str, addresses: Sequence[str], protocols: Sequence[str] = ("TCP",)) -> dict[str, Any]:
    """Return the slice of the Service's ready endpoints, on port 8080."""
    ports = [manifests.port(8080, name=f"{protocol.lower()}-web", protocol=protocol) for protocol in protocols]
    endpoints = map(manifests.endpoint, addresses)
    return manifests.endpoint_slice(name, endpoints, ports, metadata={"uid": f"uid-slice-{name}"})


def numbered(number: int, first: int = 0, count: int = 2) -> list[dict[str, Any]]:
    """Return the Service ``svc-NUMBER`` (below 10,000) at 10.97.x.y and ``count`` of its endpoints, from one on."""
    address = f"10.97.{number >> 8}.{number & 255}"
    places = [number * 8 + index for index in range(first, first + count)]
    addresses = [f"10.{245 + (place >> 16)}.{place >> 8 & 255}.{place & 255}" for place in places]
    return [service(f"svc-{number}", address), endpoint_slice(f"svc-{number}", addresses)]


def node(name: str, address: str) -> dict[str, Any]:
    """Return a Node with one internal address."""
    return manifests.node(name, address, "10.244.1.0/24", metadata={"uid": f"uid-{name}"})


class Cluster:
    """An API server with Services; the file ``kubeconfig`` works in containers and on this machine.

    With ``real``, use the server of the kubeconfig that ``KUBENODE_TEST_KUBECONFIG`` names, if it is set.
    """

    def __init__(self, scratch: Path, nodes: Sequence[str], *, real: bool = False) -> None:
        self._names = nodes
        self._real = os.environ.get(VARIABLE, "") if real else ""
        self.store: Any = RealStore(self._real) if self._real else Store()
        for item in [*self.nodes(), *self.first_services()]:
            self.store.put(item)
        self.certificates = make_certificates(scratch / "certificates", addresses=("127.0.0.1", BRIDGE))
        with socket.socket() as probe:
            probe.bind(("", 0))
            self._port = probe.getsockname()[1]
        self.server = self._serve()
        self.url = f"https://{BRIDGE}:{self._port}"
        #: The fields of an administrator's kubeconfig beside the address.
        self.admin = self.certificates.authority, TOKEN
        self.kubeconfig = write_kubeconfig(scratch / "kubeconfig", self.url, *self.admin)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the Nodes."""
        return [node(name, "10.88.255.254") for name in self._names]

    @staticmethod
    def first_services() -> list[dict[str, Any]]:
        """Return the cluster's initial objects."""
        return [service("web", "10.96.0.10", 30080), endpoint_slice("web", [POD])]

    def forget_history(self, items: Sequence[dict[str, Any]], resource_version: int) -> None:
        """Replace the objects by these, at that resourceVersion and without any earlier event.

        This is the state of a server restored from a backup. Call it only while the server is down.
        """
        self.store = Store()
        version = str(resource_version)
        for item in items:
            item["metadata"]["resourceVersion"] = version
        self.store.restore(list(items), resource_version)

    def _serve(self) -> Union[ApiServer, Gate]:
        address = ("0.0.0.0", self._port)
        if self._real:
            return Gate(self._real, self.certificates, TOKEN, address)
        return ApiServer(self.store, self.certificates, TOKEN, address)

    def go_away(self) -> None:
        """Stop listening."""
        self.server.close()

    def come_back(self) -> None:
        """Listen again on the same port."""
        before, self.server = self.server, self._serve()
        if isinstance(before, ApiServer) and isinstance(self.server, ApiServer):
            self.server.accounts = before.accounts

    def close(self) -> None:
        """Stop the server; on a real one, delete the objects."""
        self.go_away()
        if self._real:
            self.store.close()
