# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Traffic of the cluster's clients through nodes that the roles have converged."""

from __future__ import annotations

import pytest

from tests.molecule_support.checks import MANY, within
from tests.molecule_support.cluster import endpoint_slice, save, service

FIRST = {"pod-1-2", "pod-2-2", "pod-3-2"}
ALL = FIRST | {"pod-1-3", "pod-2-3", "pod-3-3"}


def backends(answers):
    return {answer.backend for answer in answers}


@pytest.mark.parametrize("protocol, port", [("TCP", 80), ("UDP", 53)])
def test_cluster_ip_is_balanced_over_all_endpoints(node, protocol, port):
    assert backends(node.ask_often("10.96.0.10", port, protocol)) == FIRST


def test_endpoints_on_other_nodes_see_the_node(node):
    answers = node.ask_often("10.96.0.10", 80)
    elsewhere = [answer for answer in answers if answer.backend not in node.pods]
    assert elsewhere
    assert {answer.peer for answer in elsewhere} == {node.address}


def test_node_port_answers_on_the_node_and_reaches_other_nodes(node):
    found = backends(node.ask_often(node.address, 30080))
    assert found <= ALL
    assert {name[:5] for name in found} == {"pod-1", "pod-2", "pod-3"}


def test_load_balancer_address_answers(node):
    assert backends(node.ask_often("198.51.100.20", 80)) == FIRST


def test_local_policy_keeps_the_clients_address_and_serves_only_nodes_with_an_endpoint(node):
    if node.name == "node1":
        answers = node.ask_often("198.51.100.21", 80)
        assert {(answer.backend, answer.peer) for answer in answers} == {("pod-1-2", node.lab.client)}
    else:
        assert node.ask("198.51.100.21", 80, timeout=1).outcome == "timeout"


def test_affinity_keeps_a_client_at_one_endpoint(node):
    assert len(backends(node.ask_often("10.96.0.40", 80))) == 1


def test_service_without_endpoints_refuses(node):
    assert node.ask("10.96.0.50", 80).outcome == "refused"


def test_pods_and_the_node_itself_are_served_and_a_pod_reaches_itself(node):
    for pod in (*node.pods, None):
        answers = node.ask_inside("10.96.0.10", 80, pod, MANY)
        assert {answer.outcome for answer in answers} == {"answer"}
        assert backends(answers) == FIRST


def test_counters_count_the_connections(node):
    rule = ("-A KUBE-SERVICES", "-d 10.96.0.10/32", "-p tcp", "--dport 80 ")
    before = node.packets(*rule)
    node.ask_often("10.96.0.10", 80)
    assert node.packets(*rule) == before + MANY


def test_agent_follows_the_cluster_and_a_single_run_does_not(nodes, scenario):
    document = scenario.document()
    late = {"10.244.1.3": "node1"}
    more = [service("late", "10.96.0.60"), endpoint_slice("late", late)]
    try:
        save(scenario.directory / "cluster.json", {**document, "items": document["items"] + more})
        for name in ("node1", "node2"):
            within(
                60,
                f"{name} serves it",
                lambda name=name: nodes[name].ask("10.96.0.60", 80, timeout=1).backend == "pod-1-3",
            )
        assert nodes["node3"].ask("10.96.0.60", 80, timeout=1).outcome != "answer"
    finally:
        save(scenario.directory / "cluster.json", document)
    for name in ("node1", "node2"):
        within(
            60, f"{name} forgets it", lambda name=name: nodes[name].ask("10.96.0.60", 80, timeout=1).outcome != "answer"
        )
