# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
r"""Two nodes behind a load balancer that honours health check node ports, for tests of drains.

    client 203.0.113.10 --- load balancer, the test's own namespace --- node1 172.30.1.2 --- pod 10.244.1.5
                            198.51.100.7:30080                      \-- node2 172.30.2.2 --- pod 10.244.1.5

Each node is a cluster of its own, so that both have the same pod. The load balancer translates addresses in the kernel
and remembers which node each connection uses, as those of clouds do.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any, Iterator, Optional

from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.agent_client import ask_agent
from tests.kernel.agent_node import AgentNode, Object, endpoint_slice, node_object, service
from tests.lab import system
from tests.lab.balancer import LoadBalancer, Target, answer_of
from tests.lab.system import ip_batch
from tests.waiting import wait_for

ADDRESS, PORT, HEALTH_PORT = "198.51.100.7", 30080, 31000
CLIENT, POD = "203.0.113.10", "10.244.1.5"
NODES = (1, 2)


def node_address(number: int) -> str:
    return f"172.30.{number}.2"


class DrainedNode:
    """A node with an agent, in a network namespace of its own."""

    def __init__(self, lab: DrainLab, number: int, scratch: Path, mode: str, variant: str = "") -> None:
        self.number = number
        self.address = node_address(number)
        self.namespace = lab.path(f"node{number}")
        scratch.mkdir()
        with self.inside():
            self.agent = AgentNode(scratch, mode, variant)
        self.file = scratch / "drain.json"
        store = self.agent.store
        store.put(node_object(status={"addresses": [{"type": "InternalIP", "address": self.address}]}))
        item = service(1, type="LoadBalancer", externalTrafficPolicy="Local", healthCheckNodePort=HEALTH_PORT)
        item["spec"]["ports"][0]["nodePort"] = PORT
        store.put(item)
        endpoints = endpoint_slice(1, count=1)
        endpoints["endpoints"] = [{"addresses": [POD], "conditions": {"ready": True}, "nodeName": "node1"}]
        store.put(endpoints)

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Enter the node's network namespace."""
        return system.inside(self.namespace)

    def start(self) -> None:
        """Start the agent and return after its first sync."""
        with self.inside():
            self.agent.start()
        wait_for(lambda: self.service_health()[0] > 0)

    def drain(self, *words: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run ``kubenode-proxy drain``."""
        own = ("--control", str(self.agent.scratch / "agent.sock"), "--drain-file", str(self.file))
        with self.inside():
            return self.agent.run("drain", *words, *own, timeout=timeout)

    def health(self, path: str = "/healthz") -> tuple[int, str]:
        """Return status and body of an answer of the agent's own port."""
        with self.inside():
            return answer_of("127.0.0.1", self.agent.health_port, path)

    def service_health(self) -> tuple[int, str]:
        """Return status and body of the Service's health check node port, as the load balancer sees it."""
        return answer_of(self.address, HEALTH_PORT)

    def metric(self, name: str) -> float:
        """Return a metric of the agent."""
        with self.inside():
            return self.agent.metric(name)


class DrainLab:
    """The namespaces, the nodes that were added, and the load balancer."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._prefix = f"drain{os.getpid()}-"
        self._names: list[str] = []
        self.nodes: dict[int, DrainedNode] = {}
        self.balancer: Optional[LoadBalancer] = None
        self._forward()
        self._add("client")
        self._connect("client", "203.0.113.1/24", f"{CLIENT}/24", "203.0.113.1")

    def path(self, name: str) -> str:
        """Return the path of a namespace."""
        return f"/run/netns/{self._prefix}{name}"

    def add_node(self, number: int, mode: str, variant: str = "") -> DrainedNode:
        """Add a node with a pod; its agent is not started."""
        name, pod = f"node{number}", f"pod{number}"
        self._add(name)
        self._add(pod)
        self._connect(name, f"172.30.{number}.1/24", f"{node_address(number)}/24", f"172.30.{number}.1")
        with system.inside(self.path(name)):
            self._forward()
            self._connect(pod, "10.244.1.1/24", f"{POD}/24", "10.244.1.1")
        self.nodes[number] = DrainedNode(self, number, self._scratch / name, mode, variant)
        return self.nodes[number]

    def balance(self) -> LoadBalancer:
        """Start the load balancer."""
        addresses = {number: node_address(number) for number in NODES}
        self.balancer = LoadBalancer(Target(ADDRESS, PORT, PORT, HEALTH_PORT), addresses)
        return self.balancer

    @staticmethod
    def _forward() -> None:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")

    def _add(self, name: str) -> None:
        system.run(["ip", "netns", "add", self._prefix + name])
        self._names.append(name)
        with system.inside(self.path(name)):
            system.forget_host_settings()
            ip_batch(["link set lo up"])

    def _connect(self, name: str, here: str, there: str, gateway: str) -> None:
        """Connect a namespace with the caller's."""
        ip_batch(
            [
                f"link add {name} type veth peer name eth0 netns {self._prefix}{name}",
                f"addr add {here} dev {name}",
                f"link set {name} up",
            ]
        )
        lines = ["link set eth0 up", f"addr add {there} dev eth0", f"route add default via {gateway}"]
        ip_batch(lines, self._prefix + name)

    def close(self) -> None:
        """Stop everything."""
        if self.balancer is not None:
            self.balancer.close()
        for node in self.nodes.values():
            node.agent.close()
        for name in self._names:
            system.run(["ip", "netns", "del", self._prefix + name])


@contextlib.contextmanager
def drain_lab(scratch: Path) -> Iterator[DrainLab]:
    """Provide a laboratory in the test's namespace."""
    lab = DrainLab(scratch)
    try:
        yield lab
    finally:
        lab.close()


def drained(node: DrainedNode, read: bool = False) -> Object:
    """Return the agent's answer about its drain; with ``read``, after it has read the file."""
    answer: Any = ask_agent(str(node.agent.scratch / "agent.sock"), {"command": "drain", "read": read})
    return dict(answer)
