# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An agent on a host outside the cluster: cluster IPs of chosen Services, and nothing that nodes do for others."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from typing import Any, Iterator

import pytest

from tests.kernel.agent_node import NODE, AgentNode, cluster_ip, free_port, service
from tests.lab.background import Background
from tests.waiting import wait_for

ENDPOINT = "192.0.2.31"
ANSWER = """
import socket, sys
server = socket.create_server((sys.argv[1], 8080))
print("ready", flush=True)
while True:
    connection, _peer = server.accept()
    connection.sendall(b"served")
    connection.close()
"""


@pytest.fixture
def node(tmp_path) -> Iterator[AgentNode]:
    subprocess.run(["ip", "address", "add", f"{ENDPOINT}/32", "dev", "lo"], check=True)
    subprocess.run(["ip", "route", "add", "10.96.0.0/16", "dev", "lo"], check=True)
    found = AgentNode(tmp_path, "nftables")
    found.store.delete("Node", "", NODE)
    yield found
    # Shown if the test fails.
    print(found.log)
    found.close()


def exposed(number: int, namespace: str, health: int = 0, **labels: str) -> dict[str, Any]:
    """A Service with everything that nodes offer to clients elsewhere."""
    found = service(
        number,
        namespace=namespace,
        type="LoadBalancer",
        externalIPs=[f"198.51.100.{number}"],
        externalTrafficPolicy="Local",
        healthCheckNodePort=health,
    )
    found["spec"]["ports"][0]["nodePort"] = 30000 + number
    found["status"] = {"loadBalancer": {"ingress": [{"ip": f"203.0.113.{number}"}]}}
    found["metadata"]["labels"] = labels
    return found


def endpoints(number: int, namespace: str) -> dict[str, Any]:
    """Its slice, with the endpoint on this machine."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": namespace,
            "name": f"svc-{number}-1",
            "labels": {"kubernetes.io/service-name": f"svc-{number}"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "p80", "protocol": "TCP", "port": 8080}],
        "endpoints": [{"addresses": [ENDPOINT], "conditions": {"ready": True}, "nodeName": "node2"}],
    }


def put(node: AgentNode, number: int, namespace: str, health: int = 0, **labels: str) -> None:
    node.store.put(exposed(number, namespace, health, **labels))
    node.store.put(endpoints(number, namespace))


def configure(node: AgentNode, **settings: Any) -> None:
    node.node_configuration["outsideHost"] = settings
    node.write_configuration()


def ask(address: str) -> str:
    with contextlib.closing(socket.create_connection((address, 80), 10)) as connection:
        return connection.recv(16).decode()


def test_cluster_ips_are_served_and_nothing_else(node):
    health = free_port()
    put(node, 1, "shop", health)
    configure(node, enabled=True)
    with Background(["python3", "-c", ANSWER, ENDPOINT]):
        node.start()
        assert ask(cluster_ip(1)) == "served"
    text = node.kernel_text("")
    for absent in ("30001", "198.51.100.1", "203.0.113.1"):
        assert absent not in text, absent
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", health), 5)
    # Nothing needs a Node, and none is read: the account need not be allowed to.
    assert "nodes" not in node.status()["apiServer"] and not any("/nodes" in path for path in node.api.requests)
    assert node.metric("kubenode_proxy_api_connected") == 1.0
    assert "no Node" not in node.log


def test_services_are_chosen_by_namespace_or_label_and_a_reload_follows(node):
    put(node, 1, "shop")
    put(node, 2, "bank")
    put(node, 3, "bank", **{"kubenode.proxy/outside-hosts": "true"})

    def served() -> set[int]:
        text = node.kernel_text("")
        return {number for number in (1, 2, 3) if f"{cluster_ip(number)} " in text}

    configure(node, enabled=True, namespaces=["shop"], labelled=True)
    node.start()
    assert served() == {1, 3}
    # The label goes: the Service is no longer served.
    put(node, 3, "bank")
    wait_for(lambda: served() == {1}, 60.0)
    put(node, 2, "bank", **{"kubenode.proxy/outside-hosts": "true"})
    wait_for(lambda: served() == {1, 2}, 60.0)

    configure(node, enabled=True)
    assert node.process is not None
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: served() == {1, 2, 3}, 60.0)
    configure(node, enabled=False)
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "30001" in node.kernel_text(""), 60.0)
    wait_for(lambda: node.status()["apiServer"].get("nodes") == "watching", 60.0)
