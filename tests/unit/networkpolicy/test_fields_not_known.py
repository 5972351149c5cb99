# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fields of a later version of an API: they may be conditions, so that what has one must not allow more without it."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy

NEW = {"newField": ["value"]}
BLOCK = {"ipBlock": {"cidr": "10.0.0.0/8"}}
WEB, DB, TOOL, CLIENT = "10.244.1.11", "10.244.2.12", "10.244.2.13", "192.0.2.1"
# A number of the protocol, and a port.
HTTP, DNS, PING = (6, 80), (17, 53), (1, 0)


def pod(namespace: str, name: str, address: str, node: str) -> dict[str, Any]:
    metadata = {"namespace": namespace, "name": name, "labels": {"app": name}}
    return {
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": node},
        "status": {"podIPs": [{"ip": address}]},
    }


CLUSTER = [
    {"kind": "Namespace", "metadata": {"name": "shop"}},
    {"kind": "Namespace", "metadata": {"name": "bank", "labels": {"name": "bank"}}},
    pod("shop", "web", WEB, "node1"),
    pod("shop", "db", DB, "node2"),
    pod("bank", "tool", TOOL, "node2"),
]


def judged(policy: dict[str, Any]) -> tuple[list[str], Any]:
    """Return the parts that are skipped of a policy, and what judges connections by it."""
    state = ClusterState.from_objects([*CLUSTER, policy])
    assert not state.refusals
    judge = NodePolicy("node1", state.policy, cluster_policies=True).judge()

    def allows(source: str, destination: str, what: tuple[int, int]) -> bool:
        return bool(judge.allows(packed(source), packed(destination), *what))

    return list(map(str, state.skipped)), allows


def network_policy(**spec: Any) -> dict[str, Any]:
    return {"kind": "NetworkPolicy", "metadata": {"namespace": "shop", "name": "x"}, "spec": spec}


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"ports": [{"portName": "web"}]}, ".ports[0]"),
        ({"ports": [{"protocol": "TCP", "port": 80, **NEW}]}, ".ports[0]"),
        (NEW, ""),
        ({"from": [BLOCK], **NEW}, ""),
        ({"to": [{"podSelector": {}}]}, ""),
        ({"from": [{"podSelector": {}, **NEW}]}, ".from[0]"),
        ({"from": [{"namespaceSelector": {}, **NEW}]}, ".from[0]"),
        ({"from": [{**BLOCK, **NEW}]}, ".from[0]"),
        ({"from": [{"ipBlock": {"cidr": "10.0.0.0/8", **NEW}}]}, ".from[0].ipBlock"),
        ({"from": [{"podSelector": NEW}]}, ".from[0].podSelector"),
        (
            {"from": [{"podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists", **NEW}]}}]},
            ".from[0].podSelector.matchExpressions[0]",
        ),
    ],
)
def test_a_part_with_a_field_that_is_not_known_allows_nothing_and_is_named(rule, field):
    (skipped,), allows = judged(network_policy(podSelector={}, ingress=[rule]))
    name = next(name for name in ("portName", "newField", "to") if f"'{name}'" in str(rule))
    assert skipped == f'NetworkPolicy shop/x: spec.ingress[0]{field}: has the field "{name}", which is not known'
    for source in (DB, TOOL, CLIENT):
        assert not any(allows(source, WEB, what) for what in (HTTP, DNS, PING)), source


def test_the_other_parts_of_a_policy_still_allow_what_they_allow():
    peers = [{"podSelector": {"matchLabels": {"app": "db"}}}, {"namespaceSelector": {}, **NEW}]
    _skipped, allows = judged(network_policy(podSelector={}, ingress=[NEW, {"from": peers}]))
    assert allows(DB, WEB, HTTP) and not allows(TOOL, WEB, HTTP)


def test_egress_rules_have_other_fields_than_ingress_rules():
    rule = {"from": [{"podSelector": {}}], "ports": [{"port": 80}]}
    (skipped,), allows = judged(network_policy(podSelector={}, egress=[rule]))
    assert "spec.egress[0]" in skipped and not allows(WEB, TOOL, HTTP)


def test_a_spec_with_a_field_that_is_not_known_isolates_and_allows_nothing():
    (skipped,), allows = judged(network_policy(podSelector={}, ingress=[{}], egress=[{}], **NEW))
    assert skipped.startswith('NetworkPolicy shop/x: spec: has the field "newField"')
    assert not allows(DB, WEB, HTTP) and not allows(WEB, DB, HTTP)


def test_null_is_the_absence_of_a_field():
    port = {"port": 80, "newField": None}
    peer = {"podSelector": {"newField": None}, "newField": None}
    skipped, allows = judged(network_policy(podSelector={}, ingress=[{"from": [peer], "ports": [port], "x": None}]))
    assert not skipped and allows(DB, WEB, HTTP) and not allows(DB, WEB, DNS)


def cluster_policy(action: str, rule: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return a policy with a rule, before one that accepts packets from all pods."""
    rest = {"action": "Accept", "from": [{"namespaces": {}}]}
    rules = [{"action": action, **rule}, rest] if action != "Accept" else [{"action": action, **rule}]
    spec = {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "ingress": rules, **spec}
    return {"kind": "ClusterNetworkPolicy", "metadata": {"name": "c"}, "spec": spec}


ISOLATING = network_policy(podSelector={}, policyTypes=["Ingress"])
ALL = [{"namespaces": {}}]
OF_BANK = [{"namespaces": {"matchLabels": {"name": "bank"}}}]
CLUSTER_RULES = [
    ({"from": OF_BANK, "ports": [{"portNumber": {"protocol": "TCP", "port": 80}}]}, ""),
    ({"from": OF_BANK, **NEW}, ""),
    ({"from": OF_BANK, "protocols": [{"tcp": {"destinationPort": {"number": 80}, **NEW}}]}, ".protocols[0].tcp"),
    (
        {"from": OF_BANK, "protocols": [{"tcp": {"destinationPort": {"range": {"start": 1, "end": 9, **NEW}}}}]},
        ".protocols[0].tcp.destinationPort.range",
    ),
    ({"from": [{"pods": {"podSelector": {}, **NEW}}]}, ".from[0].pods"),
    ({"from": [{"namespaces": {"matchLabels": {"name": "bank"}, **NEW}}]}, ".from[0].namespaces"),
]
# What the API server has removed from a stored policy, because the version in which it serves it lacks the field.
PRUNED_RULES = [
    ({"from": OF_BANK, "protocols": [{}]}, ".protocols[0]"),
    ({"from": OF_BANK, "protocols": [{"tcp": {"destinationPort": {"number": 80}}}, {}]}, ".protocols[1]"),
    ({"from": [{}]}, ".from[0]"),
    ({"from": [*OF_BANK, {}]}, ".from[1]"),
]


@pytest.mark.parametrize(("rule", "field"), CLUSTER_RULES)
@pytest.mark.parametrize("action", ["Deny", "Pass"])
def test_a_cluster_rule_that_may_deny_denies_everything_and_is_named(action, rule, field):
    (skipped,), allows = judged(cluster_policy(action, rule))
    name = "ports" if "ports" in rule else "newField"
    assert skipped == f'ClusterNetworkPolicy c: spec.ingress[0]{field}: has the field "{name}", which is not known'
    assert not any(allows(source, WEB, what) for source in (DB, TOOL, CLIENT) for what in (HTTP, DNS, PING))


@pytest.mark.parametrize(("rule", "field"), PRUNED_RULES)
@pytest.mark.parametrize("action", ["Deny", "Pass"])
def test_a_cluster_rule_of_which_the_api_server_removed_a_field_denies_everything(action, rule, field):
    (skipped,), allows = judged(cluster_policy(action, rule))
    assert skipped.startswith(f"ClusterNetworkPolicy c: spec.ingress[0]{field}: must have exactly one of ")
    assert not any(allows(source, WEB, what) for source in (DB, TOOL, CLIENT) for what in (HTTP, DNS, PING))


@pytest.mark.parametrize(("rule", "_field"), CLUSTER_RULES + PRUNED_RULES)
def test_a_cluster_rule_that_accepts_accepts_nothing(rule, _field):
    state = ClusterState.from_objects([*CLUSTER, ISOLATING, cluster_policy("Accept", rule)])
    judge = NodePolicy("node1", state.policy, cluster_policies=True).judge()
    assert len(state.skipped) == 1 and not judge.allows(packed(TOOL), packed(WEB), *HTTP)


@pytest.mark.parametrize("action", ["Accept", "Deny", "Pass"])
def test_a_cluster_spec_with_a_field_that_is_not_known_concerns_all_its_rules(action):
    policy = cluster_policy(action, {"from": ALL}, **NEW)
    (skipped,), _allows = judged(policy)
    assert skipped.startswith('ClusterNetworkPolicy c: spec: has the field "newField"')
    state = ClusterState.from_objects([*CLUSTER, ISOLATING, policy])
    judge = NodePolicy("node1", state.policy, cluster_policies=True).judge()
    assert not judge.allows(packed(TOOL), packed(WEB), *HTTP)
