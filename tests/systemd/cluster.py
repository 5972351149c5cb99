# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small cluster behind an API server on this machine that containers reach over podman's bridge."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Dict, List, Sequence

from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig

# The first address of podman's default network, which is this machine's on the bridge.
BRIDGE = "10.88.0.1"
POD = "10.244.1.2"


def service(name: str, address: str, node_port: int = 0) -> Dict[str, Any]:
    """A Service with one TCP port, 80."""
    port: Dict[str, Any] = {"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}
    if node_port:
        port["nodePort"] = node_port
    spec = {"clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv4"], "ports": [port]}
    spec["type"] = "NodePort" if node_port else "ClusterIP"
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def endpoint_slice(name: str, addresses: Sequence[str]) -> Dict[str, Any]:
    """The ready endpoints of the Service of that name, at port 8080."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-1",
            "namespace": "default",
            "uid": f"uid-slice-{name}",
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}} for address in addresses],
    }


def node(name: str, address: str) -> Dict[str, Any]:
    """A Node with one internal address."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"kubernetes.io/hostname": name}},
        "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    }


class Cluster:
    """An API server with Services; ``kubeconfig`` is a file for containers, and works here too."""

    def __init__(self, scratch: Path, nodes: Sequence[str]) -> None:
        self.store = Store()
        for name in nodes:
            self.store.put(node(name, "10.88.255.254"))
        for item in self.first_services():
            self.store.put(item)
        self.certificates = make_certificates(scratch / "certificates", addresses=("127.0.0.1", BRIDGE))
        with socket.socket() as probe:
            probe.bind(("", 0))
            self._port = probe.getsockname()[1]
        self.server = self._serve()
        self.url = f"https://{BRIDGE}:{self._port}"
        self.kubeconfig = write_kubeconfig(scratch / "kubeconfig", self.url, self.certificates.authority, "test-token")

    @staticmethod
    def first_services() -> List[Dict[str, Any]]:
        """What the cluster has at first."""
        return [service("web", "10.96.0.10", 30080), endpoint_slice("web", [POD])]

    def _serve(self) -> ApiServer:
        return ApiServer(self.store, self.certificates, address=("0.0.0.0", self._port))

    def go_away(self) -> None:
        """Stop listening."""
        self.server.close()

    def come_back(self) -> None:
        """Listen again at the same port."""
        self.server = self._serve()
