# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Debian's Docker daemon on a node with the agent: no Service and no rule is lost whatever it does."""

from __future__ import annotations

import pytest

from tests.lab.outage import Client
from tests.waiting import wait_for

from .agent import dataplane, start_of, start_pod, wait_for_activity, wait_until_converged

EVENTS = ("start docker", "reload docker", "restart docker", "stop docker.socket docker")


@pytest.fixture(scope="module")
def node(start):
    container = start("docker", packages=("docker.io",))
    container.run("systemctl", "stop", "docker.socket", "docker")
    # Docker sets the policy of FORWARD to DROP where it has enabled forwarding itself, which it did at boot.
    container.run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
    container.run("iptables", "-P", "FORWARD", "ACCEPT")
    start_pod(container)
    return container


# In make test, tests/kernel/test_neighbours.py covers Docker with equivalent rules.
@pytest.mark.full
@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_services_are_served_while_docker_starts_reloads_and_stops(node, cluster, mode):
    configuration = {"mode": mode, "nodePortAddresses": ["0.0.0.0/0"]}
    node.role("agent", {"agent_kubeconfig": str(cluster.kubeconfig), "agent_configuration": configuration})
    wait_for_activity(node)
    wait_until_converged(node)
    address = node.output("hostname", "-I").split()[0]
    clients = [
        Client(f"/proc/{node.pid}/ns/net", "10.96.0.10", 80, b"hello\n"),
        Client("/proc/self/ns/net", address, 30080, b"hello\n"),
    ]
    try:
        for client in clients:
            wait_for(lambda who=client: who.answered_since(0.0), what="an answer")
        began, process, rules = max(client.results[-1][1] for client in clients), start_of(node), dataplane(node)
        for event in EVENTS:
            node.run("systemctl", *event.split())
            wanted = [line for line in rules if line.startswith("-A KUBE") or "KUBE-" in line]
            assert [line for line in wanted if line not in dataplane(node)] == []
            ended = max(client.results[-1][1] for client in clients)
            for client in clients:
                wait_for(lambda who=client, since=ended: who.answered_since(since), what=f"an answer after {event}")
        assert [client.outage(began) for client in clients] == [0.0, 0.0]
        assert start_of(node) == process
    finally:
        for client in clients:
            client.close()
