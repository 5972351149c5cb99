# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent in ipvs mode, on a kernel that has IPVS: changes, foreign hands, restarts."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_ip, endpoint_slice, service, wait_for

pytestmark = pytest.mark.uml


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def servers():
    return output("ipvsadm", "-Ln")


def content():
    """All that the mode has programmed, counters and kernel-only details aside."""
    rules = [line for line in output("iptables-legacy-save").splitlines() if line[:1] == "-"]
    sets = [line for line in output("ipset", "save").splitlines() if line.startswith("add ")]
    addresses = sorted(word for word in output("ip", "-4", "-o", "address", "show").split() if word.endswith("/32"))
    return (sorted(output("ipvsadm", "-Sn").splitlines()), sorted(sets), addresses, rules)


def repairs(node):
    return node.status()["driftRepaired"]


@pytest.fixture
def node(tmp_path):
    found = AgentNode(tmp_path, "ipvs", "legacy")
    for number in range(1, 6):
        found.store.put(service(number))
        found.store.put(endpoint_slice(number))
    yield found
    found.close()


def test_changes_foreign_hands_and_restart(node):
    node.start()
    assert f"{cluster_ip(5)}:80" in servers()
    node.store.put(endpoint_slice(3, count=3))
    assert wait_for(lambda: f"{endpoint_ip(3, 2)}:8080" in servers()) < 2.0
    node.store.delete("Service", "default", "svc-5")
    assert wait_for(lambda: f"{cluster_ip(5)}:80" not in servers()) < 2.0
    wait_for(lambda: f" {cluster_ip(5)}/32 " not in output("ip", "-4", "-o", "address", "show"))
    time.sleep(7.0)
    assert repairs(node) == 0
    before = content()
    repaired = 0.0
    first, second = (("-t", f"{cluster_ip(1)}:80", "-r", f"{endpoint_ip(1, index)}:8080") for index in range(2))
    for what, command in (
        ("deleted real server", ("ipvsadm", "-d", *first)),
        ("altered weight", ("ipvsadm", "-e", *second, "-m", "-w", "7")),
        ("flushed IPVS", ("ipvsadm", "-C")),
        ("deleted set element", ("ipset", "del", "KUBE-CLUSTER-IP", f"{cluster_ip(2)},tcp:80")),
        ("deleted address", ("ip", "address", "del", f"{cluster_ip(3)}/32", "dev", "kube-ipvs0")),
        ("deleted device", ("ip", "link", "del", "kube-ipvs0")),
        ("flushed chain", ("iptables-legacy", "-t", "nat", "-F", "KUBE-SERVICES")),
    ):
        output(*command)
        assert wait_for(lambda known=repaired: repairs(node) > known, 10.0, 0.05) < 3.0, what
        assert content() == before, what
        repaired = repairs(node)
        time.sleep(0.5)
    time.sleep(3.0)
    assert repairs(node) == repaired
    assert node.stop(signal.SIGKILL) != 0
    assert content() == before
    node.start()
    assert content() == before
    assert "added=0 replaced=0 removed=0" in node.log


def test_a_real_server_with_a_connection_is_drained(node):
    node.start()
    for address in (endpoint_ip(1, 0), endpoint_ip(1, 1)):
        output("ip", "address", "add", f"{address}/32", "dev", "lo")
    wait_for(lambda: f"{cluster_ip(1)}:80" in output("ipvsadm", "-Ln"))
    listener = subprocess.Popen(["socat", "TCP-LISTEN:8080,fork,reuseaddr", "EXEC:cat"])
    clients = []
    try:
        time.sleep(0.5)
        clients = [
            subprocess.Popen(["socat", f"TCP:{cluster_ip(1)}:80", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        wait_for(lambda: output("ipvsadm", "-Lnc").count("ESTABLISHED") == 2, 10.0, 0.1)
        node.store.put(endpoint_slice(1, count=1))
        gone = f"-a -t {cluster_ip(1)}:80 -r {endpoint_ip(1, 1)}:8080 -m -w 0"
        wait_for(lambda: gone in output("ipvsadm", "-Sn"), 10.0, 0.05)
        assert node.status()["families"]["IPv4"]["draining"] == 1
        node.store.put(endpoint_slice(1, count=2))
        wait_for(lambda: gone not in output("ipvsadm", "-Sn"), 10.0, 0.05)
        assert f"-r {endpoint_ip(1, 1)}:8080 -m -w 1" in output("ipvsadm", "-Sn")
        assert node.status()["families"]["IPv4"]["draining"] == 0
        for client in clients:
            client.stdin.write(b"still there\n")
            client.stdin.flush()
            assert client.stdout.readline() == b"still there\n"
    finally:
        for process in (*clients, listener):
            process.kill()
            process.wait()
