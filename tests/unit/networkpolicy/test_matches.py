# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Selectors are limited by what they are compared with, since that costs time on every node of the tenant."""

from __future__ import annotations

import functools

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.policies.selectors import LabelSelector
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy import (
    limits,
    node_policy,
    policy_state,
    rows,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.matching import candidates, port_unions
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy

PODS = 40


def pod(namespace, number, node="node2"):
    address = f"10.244.{2 if node == 'node2' else 1}.{number + (100 if namespace == 'shop' else 0)}"
    return {
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": f"p{number}", "labels": {"app": "x"}},
        "spec": {"nodeName": node},
        "status": {"podIPs": [{"ip": address}]},
    }


def other_than(number):
    return {"matchExpressions": [{"key": "k", "operator": "NotIn", "values": [str(number)]}]}


def policy(namespace, name, *peers):
    rule = {"from": list(peers), "ports": [{"port": 80}]}
    return {
        "kind": "NetworkPolicy",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [rule]},
    }


def selecting(namespace, name, first, count):
    return policy(namespace, name, *({"podSelector": other_than(number)} for number in range(first, first + count)))


CLUSTER = [
    *({"kind": "Namespace", "metadata": {"name": name}} for name in ("tenant", "shop")),
    *(pod(name, number) for name in ("tenant", "shop") for number in range(1, PODS + 1)),
    *(pod(name, 99, "node1") for name in ("tenant", "shop")),
    selecting("shop", "own", 0, 2),
]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(limits, "MOST_CANDIDATES", 1_000)
    monkeypatch.setattr(candidates, "FEWEST_PODS", 1)
    for module in (policy_state, node_policy):
        monkeypatch.setattr(module, "MOST_CANDIDATES_TOGETHER", 2_000)


def made(*items):
    state = ClusterState.from_objects([*CLUSTER, *items])
    assert not state.refusals and not state.skipped
    found = NodePolicy("node1", state.policy)
    state.policy.pop_changes()
    return state, found


def refused(found):
    return {str(key) for key, _direction in found.too_large}


def allowed(found, namespace):
    """Return whether a pod of a namespace may connect to the one on the node."""
    source, own = (("10.244.2.1", "10.244.1.99"), ("10.244.2.101", "10.244.1.199"))[namespace == "shop"]
    return found.judge().allows(packed(source), packed(own), 6, 80)


@pytest.mark.parametrize("wide", [False, True])
def test_a_policy_whose_selectors_match_too_many_pods_is_refused_alone(wide):
    # A selector of namespaces is compared with both of them, too.
    most = 1_000 // (2 * (PODS + 1) + 2 if wide else PODS + 1)
    for count in (most, most + 1):
        _state, found = made(
            policy(
                "tenant",
                "hostile",
                *(
                    {"podSelector": other_than(number), **({"namespaceSelector": {}} if wide else {})}
                    for number in range(count)
                ),
            )
        )
        assert refused(found) == ({"tenant/hostile"} if count > most else set())
        assert allowed(found, "tenant") == (count == most) and allowed(found, "shop")


def test_many_policies_that_match_too_many_pods_together_are_refused_by_namespace():
    hostile = [selecting("tenant", f"n{number}", 20 * number, 20) for number in range(4)]
    _state, found = made(*hostile)
    assert refused(found) and all(name.startswith("tenant/") for name in refused(found))
    assert len(refused(found)) < len(hostile), "as many as fit are kept"
    assert allowed(found, "shop") and allowed(found, "tenant")


def test_a_policy_that_comes_when_there_is_no_room_for_its_matches():
    hostile = [selecting("tenant", f"n{number}", 20 * number, 20) for number in range(2)]
    state, found = made(*hostile)
    assert not found.too_large
    state.upsert(selecting("shop", "own", 0, 12))
    found.update(state.policy.pop_changes(), choose=True)
    assert refused(found) and all(name.startswith("tenant/") for name in refused(found))
    assert allowed(found, "shop")
    state.delete(hostile[0])
    found.update(state.policy.pop_changes())
    found.reconsider()
    assert not found.too_large and allowed(found, "tenant")
    assert found.table.rows == NodePolicy("node1", state.policy).table.rows


def test_a_policy_is_in_force_again_after_its_pods_have_gone():
    state, found = made(selecting("tenant", "hostile", 0, 30))
    assert refused(found) == {"tenant/hostile"}
    for number in range(20, PODS + 1):
        state.delete(pod("tenant", number))
    found.update(state.policy.pop_changes())
    found.reconsider()
    assert not found.too_large and allowed(found, "tenant")


def test_pods_with_the_same_peers_share_their_content():
    _state, found = made()
    contents = [found._state._contents.of(key) for key in found._state._pods if key.namespace == "shop"]
    assert len(contents) == PODS + 1 and len(set(map(id, contents))) == 1


def compared(monkeypatch, action):
    """Return how often a selector is compared with labels."""
    count = 0
    matches = LabelSelector.matches

    def counting(selector, labels):
        nonlocal count
        count += 1
        return matches(selector, labels)

    with monkeypatch.context() as patched:
        patched.setattr(LabelSelector, "matches", counting)
        action()
    return count


@pytest.mark.parametrize("wide", [False, True])
def test_selectors_are_compared_with_their_candidates_only(monkeypatch, wide):
    """Whether all are new, or one more comes."""
    namespaces = {"namespaceSelector": {"matchLabels": {"team": "none"}}} if wide else {}
    peers = [{"podSelector": {"matchLabels": {"app": f"a{number}"}}, **namespaces} for number in range(300)]
    state, found = made()
    for rules in (peers, peers[1:]):
        state.upsert(policy("tenant", "large", *rules))
        changes = state.policy.pop_changes()
        # Each namespace that is selected by its labels, and the pods that the policy itself selects.
        assert compared(monkeypatch, functools.partial(found.update, changes)) < (4 * 300 if wide else 20)


def test_pods_that_come_are_compared_with_few_peers(monkeypatch):
    """Selectors that match no pod are compared with each one that comes."""
    monkeypatch.setattr(candidates, "FEWEST_PODS", 1)
    state, found = made()
    exists = [
        {"podSelector": {"matchExpressions": [{"key": f"z{number}", "operator": "Exists"}]}} for number in range(20)
    ]
    state.upsert(policy("tenant", "hostile", *exists))
    found.update(state.policy.pop_changes())
    assert not found.too_large
    for number in range(PODS + 1, 100 - PODS):
        state.upsert(pod("tenant", number))
    found.update(state.policy.pop_changes(), choose=True)
    assert compared(monkeypatch, functools.partial(found.update, state.policy.pop_changes())) <= 2_000
    assert found.table.rows == NodePolicy("node1", state.policy).table.rows


def test_what_is_remembered_of_port_sets_is_limited(monkeypatch):
    monkeypatch.setattr(port_unions, "MOST_KNOWN_RANGES", 40)
    rules = [
        {"from": [{"podSelector": {"matchLabels": {f"k{number}": "1"}}}], "ports": [{"port": number + 1}]}
        for number in range(8)
    ]
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": rules}
    item = {"kind": "NetworkPolicy", "metadata": {"namespace": "tenant", "name": "ports"}, "spec": spec}
    state, found = made(item)
    for number in range(60):
        labels = {f"k{bit}": "1" for bit in range(8) if number >> bit & 1}
        one = pod("tenant", 1)
        state.upsert({**one, "metadata": {**one["metadata"], "labels": labels}})
        found.update(state.policy.pop_changes())
    assert found.table.rows == NodePolicy("node1", state.policy).table.rows
    assert 0 < found._state.subjects.unions.ranges <= 40 + 2 * 8


def test_the_evaluation_of_grants_is_limited(monkeypatch):
    monkeypatch.setattr(rows, "MOST_STEPS", 30)
    peers = [selecting("tenant", f"n{number}", 20 * number, 20) for number in range(2)]
    _state, found = made(*peers)
    assert refused(found) and all(name.startswith("tenant/") for name in refused(found))
    assert allowed(found, "shop")
