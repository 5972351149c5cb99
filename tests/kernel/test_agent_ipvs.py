# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent in ipvs mode, on a kernel that has IPVS: changes, external changes, restarts."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.servers import IpvsSocket
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_ip, endpoint_slice, service
from tests.waiting import wait_for

pytestmark = pytest.mark.uml


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def servers():
    return output("ipvsadm", "-Ln")


def content():
    """Return everything the mode has programmed, without counters and kernel-only details."""
    rules = [line for line in output("iptables-legacy-save").splitlines() if line[:1] == "-"]
    sets = [line for line in output("ipset", "save").splitlines() if line.startswith("add ")]
    addresses = sorted(word for word in output("ip", "-4", "-o", "address", "show").split() if word.endswith("/32"))
    return (sorted(output("ipvsadm", "-Sn").splitlines()), sorted(sets), addresses, rules)


def repairs(node):
    return node.status()["driftRepaired"]


def real_server(number, index):
    return "-t", f"{cluster_ip(number)}:80", "-r", f"{endpoint_ip(number, index)}:8080"


def manual_changes():
    """Return manual changes to the node: a description, and the commands."""
    device = ("dev", "kube-ipvs0")
    altered = ("KUBE-MARK-MASQ", "1", "-j", "MARK", "--set-xmark", "0x1000/0x1000")
    return {
        "deleted virtual server": [("ipvsadm", "-D", "-t", f"{cluster_ip(2)}:80")],
        "altered virtual server": [("ipvsadm", "-E", "-t", f"{cluster_ip(2)}:80", "-s", "lc")],
        "deleted real server": [("ipvsadm", "-d", *real_server(1, 0))],
        "altered weight": [("ipvsadm", "-e", *real_server(1, 1), "-m", "-w", "7")],
        "real server of another program": [
            ("ipvsadm", "-a", "-t", f"{cluster_ip(4)}:80", "-r", "10.244.99.9:8080", "-m", "-w", "1")
        ],
        "flushed IPVS": [("ipvsadm", "-C")],
        "deleted set element": [("ipset", "del", "KUBE-CLUSTER-IP", f"{cluster_ip(2)},tcp:80")],
        "exchanged set element": [
            ("ipset", "add", "KUBE-CLUSTER-IP", "10.99.9.9,tcp:80"),
            ("ipset", "del", "KUBE-CLUSTER-IP", f"{cluster_ip(2)},tcp:80"),
        ],
        "flushed set": [("ipset", "flush", "KUBE-CLUSTER-IP")],
        "deleted address": [("ip", "address", "del", f"{cluster_ip(3)}/32", *device)],
        "address of another program": [("ip", "address", "add", "10.99.9.9/32", *device)],
        "deleted device": [("ip", "link", "del", "kube-ipvs0")],
        "flushed chain": [("iptables-legacy", "-t", "nat", "-F", "KUBE-SERVICES")],
        "deleted rule": [("iptables-legacy", "-t", "nat", "-D", "KUBE-SERVICES", "1")],
        "deleted jump": [("iptables-legacy", "-t", "nat", "-D", "PREROUTING", "1")],
        "altered rule": [("iptables-legacy", "-t", "nat", "-R", *altered)],
    }


def assert_repaired(node, before, what, commands):
    known = repairs(node)
    for command in commands:
        output(*command)

    def restored():
        return content() == before

    restored.__doc__ = f"the content is restored after: {what}"
    # First the number of repairs: to list the content takes four programs.
    wait_for(lambda: repairs(node) > known, 30.0, 0.05)
    wait_for(restored, 30.0, 0.05)


@pytest.fixture
def node(tmp_path):
    agent_node = AgentNode(tmp_path, "ipvs", "legacy")
    for number in range(1, 6):
        agent_node.store.put(service(number))
        agent_node.store.put(endpoint_slice(number))
    yield agent_node
    agent_node.close()


def test_follows_changes(node):
    node.start()
    assert f"{cluster_ip(5)}:80" in servers()
    node.store.put(endpoint_slice(3, count=3))
    wait_for(lambda: f"{endpoint_ip(3, 2)}:8080" in servers(), 30.0)
    node.store.delete("Service", "default", "svc-5")
    wait_for(lambda: f"{cluster_ip(5)}:80" not in servers(), 30.0)
    wait_for(lambda: f" {cluster_ip(5)}/32 " not in output("ip", "-4", "-o", "address", "show"), 30.0)
    assert node.differences()["changed"] is False
    assert repairs(node) == 0


def test_manual_changes_are_repaired_and_counted(node):
    node.start()
    assert "kube-nlmon0" in output("ip", "-o", "link", "show", "type", "nlmon")
    before = content()
    for what, commands in manual_changes().items():
        assert_repaired(node, before, what, commands)
    assert 'noticed_by="request of another program to IPVS or ipset"' in node.log
    output("ip", "link", "del", "kube-nlmon0")
    wait_for(lambda: "kube-nlmon0" in output("ip", "-o", "link", "show", "type", "nlmon"), 30.0, 0.1)
    assert_repaired(node, before, "after the loss of the device", [("ipvsadm", "-C")])
    assert node.stop() == 0
    assert output("ip", "-o", "link", "show", "type", "nlmon") == ""


#: Asks IPVS again and again, without the right to, to remove everything (linux/ip_vs.h, linux/genetlink.h).
FLUSHES = """
import socket, struct, sys, time
family = int(sys.argv[1])
sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16)
while True:
    sock.send(struct.pack("=IHHIIBBH", 20, family, 5, 1, 0, 17, 1, 0))
    assert struct.unpack_from("=i", sock.recv(4096), 16)[0] == -1
    time.sleep(0.01)
"""


def share_of_processor(node, seconds):
    """Return how much of a processor the agent uses for this time."""
    began, used = time.monotonic(), node.processor_seconds()
    time.sleep(seconds)
    return (node.processor_seconds() - used) / (time.monotonic() - began)


def test_requests_without_rights_keep_the_agent_no_busier_than_a_tenth(node):
    """The monitoring device shows what any user sends, before the kernel refuses it."""
    for number in range(6, 300):
        node.store.put(service(number))
        node.store.put(endpoint_slice(number))
    node.start()
    before = servers().count("->")
    with IpvsSocket() as ipvs:
        command = ["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-c", FLUSHES, str(ipvs.family_id)]
    with subprocess.Popen(command) as flood:
        try:
            wait_for(lambda: "nothing to repair" in node.log and "request of another program" in node.log, 30.0)
            # On a busy machine the work of the start lasts into the first of these times.
            shares = [share_of_processor(node, 5.0)]
            while shares[-1] >= 0.3 and len(shares) < 4:
                shares.append(share_of_processor(node, 5.0))
            assert shares[-1] < 0.3, shares
            assert flood.poll() is None
        finally:
            flood.kill()
    assert servers().count("->") == before
    subprocess.run(["ipvsadm", "-C"], check=True)
    wait_for(lambda: servers().count("->") == before, 30.0, 0.1)


def unload(*names):
    """Unload modules and those whose names begin alike; network namespaces use some for a moment after their end."""
    modules = [line.split()[0] for line in Path("/proc/modules").read_text().splitlines()]
    users = [module for module in modules if module.startswith(tuple(f"{name}_" for name in names))]

    def unloaded():
        return subprocess.run(["rmmod", *users, *names], check=False).returncode == 0

    wait_for(unloaded, 10.0, 0.2)


@pytest.mark.parametrize("loaded_again", [True, False])
def test_ipvs_is_programmed_again_after_its_module_was_unloaded(node, loaded_again):
    node.start()
    before = content()
    with node.paused():
        output("ipvsadm", "-C")
        unload("ip_vs")
        if loaded_again:
            output("modprobe", "ip_vs")

    def restored():
        return Path("/proc/net/ip_vs").exists() and content() == before

    wait_for(restored, 15.0, 0.1)
    wait_for(lambda: not node.status()["lastError"], 15.0, 0.1)
    # The requests of other programs are detected by the new number of the family.
    assert_repaired(node, before, "flushed IPVS", [("ipvsadm", "-C")])
    assert node.log.count('noticed_by="request of another program to IPVS or ipset"') >= 1
    node.store.put(endpoint_slice(3, count=3))
    wait_for(lambda: f"{endpoint_ip(3, 2)}:8080" in servers(), 15.0)


def test_other_modules_may_be_unloaded_as_well(node):
    node.start()
    before = content()
    with node.paused():
        for name in ("kube-ipvs0", "kube-nlmon0"):
            output("ip", "link", "del", name)
        for table in ("nat", "filter", "mangle"):
            output("iptables-legacy", "-t", table, "-F")
            output("ip6tables-legacy", "-t", table, "-F")
        output("ipset", "destroy")
        unload("dummy", "nlmon", "xt_set", "ip_set")
    wait_for(lambda: content() == before, 30.0, 0.2)
    wait_for(lambda: "kube-nlmon0" in output("ip", "-o", "link", "show", "type", "nlmon"), 15.0, 0.2)


@pytest.mark.full
def test_contents_are_polled_without_a_netlink_monitor_device(node):
    output("ip", "link", "add", "kube-nlmon0", "type", "dummy")
    try:
        node.start()
        assert "only detected by polling" in node.log
        before = content()
        for what, commands in manual_changes().items():
            if commands[-1][0] in ("ipvsadm", "ipset"):
                assert_repaired(node, before, what, commands)
        assert node.stop() == 0
        assert node.run("cleanup", "--state-directory", str(node.scratch / "run")).returncode == 0
        assert "kube-nlmon0" in output("ip", "-o", "link", "show")
    finally:
        output("ip", "link", "del", "kube-nlmon0")


def test_state_of_a_killed_agent_is_adopted_by_the_next_one(node):
    node.start()
    before = content()
    assert node.stop(signal.SIGKILL) != 0
    assert content() == before
    node.start()
    assert content() == before
    assert "added=0 replaced=0 removed=0" in node.log
    assert node.stop(signal.SIGKILL) != 0
    assert "kube-nlmon0" in output("ip", "-o", "link", "show", "type", "nlmon")
    state = ("--state-directory", str(node.scratch / "run"))
    checked = node.run("cleanup", "--check", *state)
    assert "devices (monitoring): 0 to add, 0 to replace, 1 to remove" in checked.stdout, checked
    assert "kube-nlmon0" in output("ip", "-o", "link", "show", "type", "nlmon")
    assert node.run("cleanup", *state).returncode == 0
    assert output("ip", "-o", "link", "show", "type", "nlmon") == ""
    assert "kube-ipvs0" not in output("ip", "-o", "link", "show")


def test_a_real_server_with_a_connection_is_drained(node):
    node.start()
    for address in (endpoint_ip(1, 0), endpoint_ip(1, 1)):
        output("ip", "address", "add", f"{address}/32", "dev", "lo")
    wait_for(lambda: f"{cluster_ip(1)}:80" in output("ipvsadm", "-Ln"))
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("", 8080)))
        connections = []
        for _ in range(2):
            client = sockets.enter_context(socket.create_connection((cluster_ip(1), 80), timeout=10))
            connections.append((client, sockets.enter_context(listener.accept()[0])))
        wait_for(lambda: output("ipvsadm", "-Lnc").count("ESTABLISHED") == 2, 10.0, 0.1)
        node.store.put(endpoint_slice(1, count=1))
        gone = f"-a -t {cluster_ip(1)}:80 -r {endpoint_ip(1, 1)}:8080 -m -w 0"
        wait_for(lambda: gone in output("ipvsadm", "-Sn"), 10.0, 0.05)
        assert node.status()["families"]["IPv4"]["draining"] == 1
        node.store.put(endpoint_slice(1, count=2))
        wait_for(lambda: gone not in output("ipvsadm", "-Sn"), 10.0, 0.05)
        assert f"-r {endpoint_ip(1, 1)}:8080 -m -w 1" in output("ipvsadm", "-Sn")
        assert node.status()["families"]["IPv4"]["draining"] == 0
        for client, endpoint in connections:
            for sender, receiver in ((client, endpoint), (endpoint, client)):
                sender.sendall(b"still there")
                receiver.settimeout(10)
                assert receiver.recv(64) == b"still there"


def test_leftovers_of_iptables_mode_are_removed_when_ipvs_mode_starts(node):
    node.write_configuration(mode="iptables")
    node.start()
    assert node.fetch("/proxyMode") == "iptables"
    assert "KUBE-FIREWALL" in output("iptables-legacy-save") and "KUBE-SEP-" in output("iptables-legacy-save")
    assert "ct_state_invalid_dropped_pkts -j DROP" in output("iptables-legacy-save")
    assert "kubeproxy_iptables_ct_state_invalid_dropped_packets_total 0.0" in node.fetch("/metrics")
    node.write_configuration(mode="ipvs")
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: node.fetch("/proxyMode") == "ipvs" and f"{cluster_ip(5)}:80" in servers(), 60.0, 0.2)
    wait_for(lambda: "KUBE-FIREWALL" not in output("iptables-legacy-save"), 60.0, 0.2)
    assert "KUBE-SEP-" not in output("iptables-legacy-save")
    assert "_dropped_packets_total" not in node.fetch("/metrics")
    node.write_configuration(mode="iptables")
    node.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "KUBE-SEP-" in output("iptables-legacy-save") and servers().count("->") == 1, 60.0, 0.2)
    wait_for(lambda: "kube-nlmon0" not in output("ip", "-o", "link", "show"), 30.0, 0.2)
    assert node.differences()["changed"] is False
