# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Traffic of clients through nodes in ipvs mode, each with its own kernel, and the output of ipvsadm."""

from __future__ import annotations

import re

import pytest

from tests.molecule_support.checks import within

FIRST = {"pod-1-2", "pod-2-2"}
REAL = {"10.244.1.2:8080", "10.244.2.2:8080"}


def virtual_servers(node, *options):
    """Return the lines of real servers by virtual server, as ipvsadm prints them."""
    found, current = {}, None
    for line in node.host.check_output(f"ipvsadm -L -n {' '.join(options)}").splitlines():
        if re.match(r"(TCP|UDP|SCTP) ", line):
            current = " ".join(line.split()[:2])
            found[current] = [line]
        elif line.lstrip().startswith("->") and current:
            found[current].append(line)
    return found


@pytest.mark.parametrize("module", ["ip_vs", "ip_vs_rr", "nf_conntrack"])
def test_module_is_loaded(node, module):
    assert module in node.host.check_output("lsmod | cut -d' ' -f1").split()


def test_kernel_parameters_are_in_force(node):
    assert node.host.sysctl("net.ipv4.vs.conntrack") == 1
    assert node.host.sysctl("net.ipv4.ip_forward") == 1
    assert node.host.sysctl("net.netfilter.nf_conntrack_max") == 50000


@pytest.mark.parametrize("server", ["10.96.0.10:80", "10.96.0.30:80", "198.51.100.20:80"])
def test_virtual_server_has_the_pods_of_both_nodes(node, server):
    head, *real = virtual_servers(node)[f"TCP {server}"]
    assert head.split()[2] == "rr"
    assert {line.split()[1] for line in real} == REAL
    assert {line.split()[2] for line in real} == {"Masq"}


def test_node_port_is_a_virtual_server_of_the_nodes_address(node):
    assert f"TCP {node.address}:30080" in virtual_servers(node)


def test_addresses_are_on_the_dummy_device(node):
    found = node.host.check_output("ip -o -4 addr show dev kube-ipvs0")
    assert {"10.96.0.10/32", "10.96.0.50/32", "198.51.100.20/32", "198.51.100.21/32"} <= set(found.split())


@pytest.mark.parametrize("protocol, port", [("TCP", 80), ("UDP", 53)])
def test_cluster_ip_uses_the_pods_of_both_nodes_in_turn(node, protocol, port):
    answers = [node.ask("10.96.0.10", port, protocol) for _ in range(8)]
    assert {answer.backend for answer in answers} == FIRST
    if protocol == "TCP":
        assert all(one.backend != other.backend for one, other in zip(answers, answers[1:]))


def test_pods_reach_pods_of_the_other_node_through_virtual_addresses(node):
    for address in ("10.96.0.10", "198.51.100.20"):
        answers = node.ask_inside(address, 80, node.pods[0], 6)
        assert {answer.backend for answer in answers} == FIRST


def test_the_node_itself_is_served(node):
    assert {answer.backend for answer in node.ask_inside("10.96.0.10", 80, count=6)} == FIRST


def test_node_port_and_load_balancer_answer(node):
    for address, port in ((node.address, 30080), (node.address, 30090), ("198.51.100.20", 80)):
        assert {node.ask(address, port).outcome for _ in range(4)} == {"answer"}


def test_service_without_endpoints_refuses(node):
    assert node.ask("10.96.0.50", 80).outcome == "refused"


def test_counters_count_the_connections(node):
    def connections():
        head = virtual_servers(node, "--stats")["TCP 10.96.0.10:80"][0]
        return int(head.split()[2])

    before = connections()
    for _ in range(5):
        assert node.ask("10.96.0.10", 80).outcome == "answer"
    # The kernel sums its counters up every two seconds, perhaps together with those of an earlier check.
    within(60, "five more connections are counted", lambda: connections() >= before + 5)
