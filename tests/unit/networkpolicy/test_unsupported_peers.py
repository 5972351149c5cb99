# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Peers of ClusterNetworkPolicies that are not supported: refused by name, rule by rule, and failing closed."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.verdicts import Flow, Verdicts

PEERS = {"domainNames": ["*.example.com"], "somethingNew": {}}
POD = {
    "kind": "Pod",
    "metadata": {"namespace": "shop", "name": "web"},
    "spec": {"nodeName": "node1"},
    "status": {"podIPs": [{"ip": "10.244.1.11"}]},
}
DENY_REST = {"action": "Deny", "to": [{"networks": ["0.0.0.0/0"]}]}


def parsed(action, peer):
    """Return a cluster with a rule for a peer and a supported one, before a rule that denies every address."""
    rule = {"action": action, "to": [{"networks": ["203.0.113.0/24"]}, {peer: PEERS[peer]}]}
    spec = {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": [rule, DENY_REST]}
    policy = {"kind": "ClusterNetworkPolicy", "metadata": {"name": "edge"}, "spec": spec}
    return ClusterState.from_objects([{"kind": "Namespace", "metadata": {"name": "shop"}}, POD, policy])


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("action", ["Accept", "Deny", "Pass"])
def test_a_rule_with_an_unsupported_peer_allows_nothing_and_is_named(action, peer):
    state = parsed(action, peer)
    (found,) = state.skipped
    field = f"spec.egress[0].to[1].{peer}: is not supported" if peer != "somethingNew" else "spec.egress[0].to[1]: must"
    assert "ClusterNetworkPolicy edge" in str(found) and field in str(found)
    judge = NodePolicy("node1", state.policy, cluster_policies=True).judge()
    for address in ("203.0.113.7", "198.51.100.1"):
        assert not judge.allows(packed("10.244.1.11"), packed(address), 6, 443)


def test_a_rule_with_the_supported_peer_alone_works():
    rule = {"action": "Accept", "to": [{"networks": ["203.0.113.0/24"]}]}
    spec = {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": [rule, DENY_REST]}
    policy = {"kind": "ClusterNetworkPolicy", "metadata": {"name": "edge"}, "spec": spec}
    state = ClusterState.from_objects([{"kind": "Namespace", "metadata": {"name": "shop"}}, POD, policy])
    judge = NodePolicy("node1", state.policy, cluster_policies=True).judge()
    assert judge.allows(packed("10.244.1.11"), packed("203.0.113.7"), 6, 443) and not state.skipped
    assert not judge.allows(packed("10.244.1.11"), packed("198.51.100.1"), 6, 443)


def test_a_network_with_host_bits_is_read_as_its_range():
    """Kubernetes' v1beta1 refuses it; v1alpha2 stored it."""
    (skipped, denied) = judged("egress", [{"action": "Deny", "to": [{"networks": ["198.51.100.9/24"]}]}])
    assert denied and not skipped


def judged(direction, rules):
    """Return the parts that are skipped of a policy with these rules, and whether it denies egress to an address."""
    spec = {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, direction: rules}
    policy = {"kind": "ClusterNetworkPolicy", "metadata": {"name": "edge"}, "spec": spec}
    state = ClusterState.from_objects([{"kind": "Namespace", "metadata": {"name": "shop"}}, POD, policy])
    assert not state.refusals
    judge = NodePolicy("node1", state.policy, cluster_policies=True).judge()
    return list(map(str, state.skipped)), not judge.allows(packed("10.244.1.11"), packed("198.51.100.1"), 6, 443)


def test_more_rules_than_the_api_server_accepts_today_are_all_in_force():
    rules = [{"action": "Accept", "to": [{"networks": [f"203.0.{number}.0/24"]}]} for number in range(40)]
    assert judged("egress", [*rules, DENY_REST]) == ([], True)


@pytest.mark.parametrize("rules", [{"action": "Accept"}, "all", 7])
def test_rules_that_are_no_list_deny_everything_in_their_direction(rules):
    (skipped,), denied = judged("egress", rules)
    assert denied and skipped.startswith("ClusterNetworkPolicy edge: spec.egress: ")
    (skipped,), denied = judged("ingress", rules)
    assert not denied and skipped.startswith("ClusterNetworkPolicy edge: spec.ingress: ")


def node(name, role, *addresses):
    listed = [{"type": "InternalIP", "address": address} for address in addresses]
    return {"kind": "Node", "metadata": {"name": name, "labels": {"role": role}}, "status": {"addresses": listed}}


@pytest.mark.parametrize("action", ["Accept", "Deny", "Pass"])
def test_nodes_match_by_their_current_labels_and_addresses_once_all_are_known(action):
    """Until then the rule fails closed, in the rows as in explanations."""
    edge = {"action": action, "to": [{"nodes": {"matchLabels": {"role": "edge"}}}]}
    rules = [edge, {"action": "Accept" if action == "Deny" else "Deny", "to": [{"networks": ["0.0.0.0/0"]}]}]
    spec = {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": rules}
    policy = {"kind": "ClusterNetworkPolicy", "metadata": {"name": "edge"}, "spec": spec}
    nodes = [node("n1", "edge", "192.0.2.1", "2001:db8::1"), node("n2", "core", "192.0.2.2")]
    namespace = {"kind": "Namespace", "metadata": {"name": "shop"}}
    state = ClusterState.from_objects([namespace, POD, policy, *nodes])
    objects, own = state.policy, packed("10.244.1.11")
    made = NodePolicy("node1", objects, cluster_policies=True)
    objects.pop_changes()

    def allowed():
        """Return which of the Nodes' addresses, and of another one, the pod reaches."""
        made.update(objects.pop_changes())
        verdicts, found = Verdicts(objects, made.owners, True, {}), []
        for text in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
            by_rows = made.judge().allows(own, packed(text), 6, 443)
            assert verdicts.side("Egress", own, Flow(packed(text), "tcp", 443)).allowed == by_rows
            found.append(by_rows)
        return found

    opened = action != "Deny"
    assert allowed() == [opened, not opened, not opened] and not state.skipped
    state.upsert(node("n2", "edge", "192.0.2.2"))
    state.upsert(node("n1", "edge", "192.0.2.3"))
    assert allowed() == [not opened, opened, opened]
    state.delete(node("n2", "edge"))
    assert allowed() == [not opened, not opened, opened]
    objects.set_nodes_known(False)
    assert allowed() == [False, False, False]
    objects.set_nodes_known(True)
    assert allowed() == [not opened, not opened, opened]
    state.delete(policy)
    state.upsert(node("n3", "edge", "192.0.2.1"))
    assert not objects.changes.nodes and allowed() == [True, True, True]
