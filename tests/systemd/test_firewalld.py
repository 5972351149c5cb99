# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Debian's firewalld on a node with the agent: Services recover whatever it does, and its rules are kept.

No check depends on how long a repair takes; the durations are printed (``pytest -rP``).
"""

from __future__ import annotations

import errno
import socket
import time

import pytest

from tests.lab.outage import Client
from tests.waiting import wait_for

from .agent import UNIT, dataplane, start_of, start_pod, wait_for_activity, wait_until_converged
from .node import Node

PATIENCE = 120.0
NODE_PORT = 30080
EVENTS = (("firewall-cmd", "--reload"), ("systemctl", "restart", "firewalld"))


@pytest.fixture(scope="module")
def node(start):
    container = start("firewalld")
    start_pod(container)
    container.run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
    container.run("systemctl", "unmask", "firewalld")
    container.run("systemctl", "start", "firewalld")
    wait_for_firewalld(container)
    # Rules to keep beside the package's defaults.
    container.run("firewall-cmd", "--permanent", "--add-port=4443/tcp")
    container.run("firewall-cmd", "--permanent", "--add-masquerade")
    container.run("firewall-cmd", "--reload")
    return container


def wait_for_firewalld(node: Node) -> None:
    """Wait until firewalld has loaded its rules."""
    wait_for(lambda: node.run("firewall-cmd", "--state", check=False).returncode == 0, PATIENCE, what="firewalld")


def firewalld_rules(node: Node) -> str:
    """Return firewalld's table, as the kernel prints it without counters."""
    return node.output("nft", "--stateless", "list", "table", "inet", "firewalld")


def address_of(node: Node) -> str:
    return node.output("hostname", "-I").split()[0]


def refusal(node: Node, port: int) -> int:
    """Return the errno with which a connection from this machine to a port of the node fails."""
    with socket.socket() as probe:
        probe.settimeout(10)
        return probe.connect_ex((address_of(node), port))


# In make test, tests/kernel/test_living_with_others.py covers firewalld with equivalent rules.
@pytest.mark.full
@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_services_recover_and_firewalld_keeps_its_rules(node, cluster, mode):
    # The container's address differs from the Node object's, the only one in nftables mode by default.
    configuration = {"mode": mode, "nodePortAddresses": ["0.0.0.0/0"]}
    variables = {"agent_kubeconfig": str(cluster.kubeconfig), "agent_configuration": configuration}
    before, everything = firewalld_rules(node), dataplane(node)
    # firewalld is active: a port that it does not allow is prohibited, not merely closed.
    assert refusal(node, 4443) == errno.ECONNREFUSED
    assert refusal(node, 4444) == errno.EHOSTUNREACH
    node.role("agent", variables)
    wait_for_activity(node)
    wait_until_converged(node, PATIENCE)
    assert firewalld_rules(node) == before
    clients = {
        "cluster IP from the node": Client(f"/proc/{node.pid}/ns/net", "10.96.0.10", 80, b"hello\n"),
        "node port from outside": Client("/proc/self/ns/net", address_of(node), NODE_PORT, b"hello\n"),
    }
    try:
        for name, client in clients.items():
            wait_for(lambda who=client: who.answered_since(0.0), PATIENCE, what=f"{name} answers")
        served, process = dataplane(node), start_of(node)
        for event in EVENTS:
            moment = time.monotonic()
            node.run(*event)
            took = time.monotonic() - moment
            wait_for_firewalld(node)
            # All rules, including firewalld's.
            wait_for(lambda rules=served: dataplane(node) == rules, PATIENCE, what=f"all rules after {event}")
            assert firewalld_rules(node) == before
            settled = time.monotonic()
            for name, client in clients.items():
                what = f"{name} answers after {event}"
                wait_for(lambda who=client, since=settled: who.answered_since(since), PATIENCE, what=what)
                outage = client.outage(moment)
                print(f"{mode}: {' '.join(event)}: took {took:.2f} s, {name} answered again after {outage:.2f} s")
        assert refusal(node, 4444) == errno.EHOSTUNREACH
        assert start_of(node) == process
    finally:
        for client in clients.values():
            client.close()
    node.role("agent", {**variables, "agent_state": "absent", "agent_remove_dataplane": True})
    assert node.unit(UNIT, "LoadState")["LoadState"] == "not-found"
    assert firewalld_rules(node) == before
    assert dataplane(node) == everything
