# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A policy that is too large keeps its pods isolated, loses only its own grants, and is named."""

from __future__ import annotations

import random

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.policy import annotation_warnings
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import desired_table
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.sets import Options
from tests.netpol.interpreter import Interpreter
from tests.netpol.oracle import Packet

POD = {
    "kind": "Pod",
    "metadata": {"namespace": "shop", "name": "db", "labels": {"app": "db"}},
    "spec": {"nodeName": "node1"},
    "status": {"phase": "Running", "podIPs": [{"ip": "10.244.1.11"}]},
}


def network_policy(name, rules, selector=None):
    return {
        "kind": "NetworkPolicy",
        "metadata": {"namespace": "shop", "name": name},
        "spec": {"podSelector": selector or {}, "policyTypes": ["Ingress"], "ingress": rules},
    }


def cluster(*ingress):
    other = [{"from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}], "ports": [{"port": 80}]}]
    policies = [network_policy("hostile", list(ingress)), network_policy("other", other)]
    state = ClusterState.from_objects([POD, *policies])
    assert not state.refusals and not state.skipped
    return NodePolicy("node1", state.policy)


def allowed(policy, source, port=80):
    return Interpreter(desired_table(policy.table.rows, Options())).allowed(Packet(source, "10.244.1.11", "tcp", port))


def except_one(number):
    return {"from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [f"198.51.{number >> 8}.{number & 255}/32"]}}]}


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ([{**except_one(number), "ports": [{"port": number + 1}]} for number in range(1200)], "pieces"),
        (
            [
                {
                    "from": [
                        {
                            "namespaceSelector": {},
                            "podSelector": {"matchExpressions": [{"key": f"k{number}", "operator": "DoesNotExist"}]},
                        }
                        for number in range(5001)
                    ]
                }
            ],
            "5001 selectors that are compared with more than 500000 pods and namespaces",
        ),
        (
            [
                {
                    "from": [{"ipBlock": {"cidr": f"192.{number >> 8}.{number & 255}.0/24"}}],
                    "ports": [{"port": number + 1}],
                }
                for number in range(1001)
            ],
            "1001 rules",
        ),
        ([{"ports": [{"port": 2 * number + 1} for number in range(30000)]}], ""),
        ([{"ports": [{"port": 2 * number + 1}]} for number in range(1500)], ""),
    ],
)
def test_only_the_grants_of_a_policy_that_is_too_large_are_refused(rules, reason):
    policy = cluster(*rules)
    warnings = annotation_warnings(policy)
    if reason:
        (line,) = warnings
        assert line.startswith("NetworkPolicy shop/hostile: spec.ingress: ") and reason in line
        assert not allowed(policy, "192.0.2.1")
    else:
        assert warnings == [] and allowed(policy, "192.0.2.1", 81) and not allowed(policy, "192.0.2.1", 82)
    assert allowed(policy, "203.0.113.7") and not allowed(policy, "192.0.2.1", 8080)


def test_twenty_thousand_ranges_work():
    chosen = random.Random(7)
    octets = [[chosen.randrange(1, 224), chosen.getrandbits(8), chosen.getrandbits(8)] for _ in range(20000)]
    ranges = [".".join(map(str, [*each, 4 * number % 256])) + "/30" for number, each in enumerate(octets)]
    policy = cluster({"from": [{"ipBlock": {"cidr": text}} for text in ranges]})
    assert annotation_warnings(policy) == []
    inside = ranges[12345].partition("/")[0]
    assert allowed(policy, inside, 8080) and not allowed(policy, "255.255.255.254", 8080)


@pytest.mark.parametrize("selector", [{}, {"matchLabels": {"app": "no such pod"}}])
def test_a_policy_that_is_no_longer_too_large_is_no_longer_named(selector):
    rules = [{**except_one(number), "ports": [{"port": number + 1}]} for number in range(1200)]
    state = ClusterState.from_objects([POD, network_policy("hostile", rules)])
    policy = NodePolicy("node1", state.policy)
    assert policy.too_large
    state.policy.pop_changes()
    state.upsert(network_policy("hostile", [], selector))
    policy.update(state.policy.pop_changes())
    assert not policy.too_large


def test_nothing_is_kept_of_namespaces_that_are_gone():
    state = ClusterState.from_objects([POD])
    policy = NodePolicy("node1", state.policy)
    peers = {"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]}
    sizes = []
    for number in range(3):
        name = f"ci-{number}"
        namespace = {"kind": "Namespace", "metadata": {"name": name, "labels": {"team": "a"}}}
        pod = {**POD, "metadata": {"namespace": name, "name": "db"}, "status": {"podIPs": [{"ip": "10.244.1.12"}]}}
        made = [namespace, pod, {**network_policy("web", [peers]), "metadata": {"namespace": name, "name": "web"}}]
        for change in (state.upsert, state.delete):
            for item in made:
                change(item)
            policy.update(state.policy.pop_changes())
        found = policy._state
        sizes.append([len(found._of_namespace), len(found._policies), len(found.peers.index._selected_by)])
    assert sizes == [[1, 0, 0]] * 3
