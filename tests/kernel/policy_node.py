# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node whose agent enforces network policies, for a pod that one policy isolates."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any, Iterator

from tests.kernel.agent_node import NODE, AgentNode, Object
from tests.lab.system import ip_batch

TABLE = "inet kubenode-network-policy"
#: The table of the ports of bridges.
PORTS = "bridge kubenode-network-policy"


def pod(name: str, address: str, labels: Object, node: str = NODE) -> Object:
    """Return a pod of the namespace ``shop``."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": name, "labels": labels},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "x"}]},
        "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
    }


def policy(name: str, **spec: Any) -> Object:
    """Return an ingress policy of the namespace ``shop``."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"namespace": "shop", "name": name},
        "spec": {"policyTypes": ["Ingress"], **spec},
    }


FROM_WEB = policy(
    "db",
    podSelector={"matchLabels": {"app": "db"}},
    ingress=[{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}], "ports": [{"port": 80}]}],
)


@contextlib.contextmanager
def bridge_port(address: str, gateway: str) -> Iterator[str]:
    """Yield the network namespace of a pod with an address (empty: none yet) behind port0 of the bridge cni0."""
    name = f"behind-port0-{os.getpid()}"
    lines = ["link add cni0 type bridge", "link set cni0 up", f"addr add {gateway} dev cni0", f"netns add {name}"]
    lines += [f"link add port0 type veth peer eth0 netns {name}", "link set port0 master cni0 up"]
    try:
        ip_batch(lines)
        if address:
            ip_batch([f"addr add {address} dev eth0", "link set eth0 up"], name)
        yield name
    finally:
        ip_batch([f"netns del {name}", "link del cni0"])


def policy_node(scratch: Path, **configuration: Any) -> AgentNode:
    """Return a node that is not started, with fields of its NodeProxyConfiguration."""
    node = AgentNode(scratch, "nftables")
    node.node_configuration.update(configuration)
    node.write_configuration()
    node.store.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}})
    node.store.put(pod("db", "10.244.0.5", {"app": "db"}))
    node.store.put(pod("web", "10.244.1.7", {"app": "web"}, "node2"))
    node.store.put(FROM_WEB)
    return node


def elements(name: str, table: str = TABLE) -> str:
    """Return a set or map of a table, as nft lists it."""
    done = subprocess.run(["nft", "list", "set", *table.split(), name], capture_output=True, text=True, check=False)
    if done.returncode:
        done = subprocess.run(["nft", "list", "map", *table.split(), name], capture_output=True, text=True, check=False)
    return done.stdout


def isolated() -> bool:
    """Return whether the pod is in the set of isolated pods."""
    return "10.244.0.5" in elements("isolated-in4")


def granted() -> bool:
    """Return whether the peer is in a class that is granted access."""
    return "10.244.1.7" in elements("pods4") and "10.244.0.5" in elements("grants-in4")
