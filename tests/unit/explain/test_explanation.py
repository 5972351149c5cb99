# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Explanations name the rule that decides, or the isolating policies; random clusters check that they are right."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import networks_of, packed
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.command.connection_lines import connection_lines
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.policy import annotation_warnings
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.policy import PolicyExplainer, Resolved
from ansible_collections.kubenode.proxy.plugins.module_utils.explain.target import parse_end
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import BRIDGED, HERE, PORT_BOUND
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.sets import Options

NODE_ADDRESS = "172.18.0.2"


def pod(name, *addresses, node="node1", namespace="shop", **more):
    return {
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {"app": name}},
        "spec": {
            "nodeName": node,
            "hostNetwork": more.get("host", False),
            "containers": [{"ports": [{"name": "sql", "containerPort": 5432}]}],
        },
        "status": {"phase": more.get("phase", "Running"), "podIPs": [{"ip": each} for each in addresses]},
    }


def policy(name, **spec):
    return {"kind": "NetworkPolicy", "metadata": {"namespace": "shop", "name": name}, "spec": spec}


OBJECTS = [
    {"kind": "Namespace", "metadata": {"name": "shop", "labels": {"team": "shop"}}},
    {"kind": "Namespace", "metadata": {"name": "bank", "labels": {"team": "bank"}}},
    pod("db", "10.244.1.12", "fd00:10:244:1::12"),
    pod("web", "10.244.2.11", "fd00:10:244:2::11", node="node2"),
    pod("other", "10.244.1.13"),
    pod("web", "10.244.2.21", node="node2", namespace="bank"),
    pod("pending"),
    pod("finished", "10.244.1.99", phase="Succeeded"),
    pod("agent", "172.18.0.3", node="node2", host=True),
    policy("deny-all", podSelector={"matchLabels": {"app": "db"}}, policyTypes=["Ingress", "Egress"]),
    policy(
        "from-web",
        podSelector={"matchLabels": {"app": "db"}},
        ingress=[
            {"from": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]},
            {"from": [{"podSelector": {"matchLabels": {"app": "web"}}}], "ports": [{"port": 80}, {"port": "sql"}]},
        ],
    ),
    policy(
        "web-egress",
        podSelector={"matchLabels": {"app": "web"}},
        policyTypes=["Egress"],
        egress=[{"to": [{"podSelector": {}}]}],
    ),
]


def explained(source, destination, endpoints=(), tiers=False, objects=OBJECTS, own=(NODE_ADDRESS,), egress_exempt=()):
    state = ClusterState.from_objects(objects)
    assert not state.refusals and not state.skipped
    ranges = networks_of(egress_exempt)
    found = NodePolicy("node1", state.policy, [bytes((172, 18, 0, 2))], tiers, egress_exempt=ranges)
    explainer = PolicyExplainer(
        state,
        found,
        node_name="node1",
        node_addresses=own,
        options=Options(tiers=tiers, egress_exempt=bool(egress_exempt)),
        endpoints=endpoints,
    )
    return explainer.document(parse_end(source, destination=False), parse_end(destination, destination=True))


def text(*args, why_not=False, **more):
    return "\n".join(connection_lines(explained(*args, **more), why_not))


def test_an_allowed_connection_names_the_rule_on_both_ends():
    shown = text("shop/web", "shop/db:5432/tcp")
    assert shown.startswith("shop/web -> shop/db:5432/tcp: allowed")
    assert "10.244.2.11 -> 10.244.1.12:5432/tcp: allowed" in shown
    assert "fd00:10:244:2::11 -> [fd00:10:244:1::12]:5432/tcp: allowed" in shown
    assert "egress of shop/web: allowed: isolated, and a rule allows it, judged by node node2" in shown
    assert "allowed by shop/web-egress egress[0]: to[0]" in shown
    assert "isolated by shop/deny-all, shop/from-web" in shown
    assert "allowed by shop/from-web ingress[1]: from[0]" in shown and "ports[1] (sql/TCP)" in shown
    assert "element inet kubenode-network-policy isolated-in4 { 10.244.1.12 }" in shown
    assert "element inet kubenode-network-policy grants-in4" in shown


def test_a_denied_connection_names_the_isolating_policies_and_the_nearest_misses_on_request():
    document = explained("shop/web", "shop/db:8443/tcp")
    assert not document["allowed"]
    shown = "\n".join(connection_lines(document, why_not=False))
    assert "ingress of shop/db: denied: isolated, and no rule allows it" in shown
    assert "isolated by shop/deny-all, shop/from-web" in shown and "but no entry of ports" not in shown
    why = "\n".join(connection_lines(document, why_not=True))
    assert "shop/deny-all: has no ingress rules" in why
    assert "shop/from-web ingress[1]: from[0]" in why and "matches, but no entry of ports has 8443" in why


def test_the_wrong_namespace_is_named_as_the_reason():
    why = text("bank/web", "shop/db:80/tcp", why_not=True)
    assert "ingress[1]: ports[0] (80/TCP) matches, but no entry of from has the other end" in why
    assert "the labels of the pod match pods (" in why and "but its namespace does not" in why


@pytest.mark.parametrize(
    ("source", "destination", "allowed", "said"),
    [
        ("203.0.113.9", "shop/db:1/udp", True, "from[0] (ipBlock 203.0.113.0/24), every port"),
        ("203.0.113.9", "shop/db/icmp", True, "not the address of a pod: only ipBlock can match it"),
        ("192.0.2.1", "shop/db:80", False, "isolated, and no rule allows it"),
        (NODE_ADDRESS, "shop/db:80", True, "always allowed: from the pod's own node"),
        ("shop/agent", "shop/db:80", False, "on the host's network"),
        ("shop/db", "shop/db:80", True, "a pod always reaches itself"),
        ("shop/db", NODE_ADDRESS + ":10250", False, "egress of shop/db: denied"),
        ("shop/web", "shop/other:80/sctp", True, "ingress of shop/other: allowed: not isolated"),
        ("10.244.2.11", "shop/db:80", True, "10.244.2.11 is the address of pod shop/web"),
        ("shop/finished", "shop/db:80", False, "has ended"),
    ],
)
def test_each_kind_of_end_has_its_sentence(source, destination, allowed, said):
    document = explained(source, destination)
    assert document["allowed"] == allowed
    assert said in "\n".join(connection_lines(document, why_not=False))


def test_services_are_resolved_first():
    endpoints = [Resolved("10.244.1.12", 5432, "tcp", "shop/sql"), Resolved("10.244.1.13", 5432, "tcp", "shop/sql")]
    shown = text("shop/web", "10.96.0.9:3306", endpoints=endpoints)
    assert "10.96.0.9:3306/tcp is a Service: policies judge its endpoints" in shown
    assert "-> 10.244.1.13:5432/tcp (Service shop/sql): allowed" in shown


@pytest.mark.parametrize("destination", ["10.96.0.10:53/udp", "shop/dns:53/udp"])
def test_an_address_of_a_service_that_a_program_of_the_node_has_is_judged_as_well(destination):
    ports = [{"port": 53, "protocol": "UDP"}]
    service = {
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "dns"},
        "spec": {"clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10"], "ports": ports},
    }
    more = {"endpoints": [Resolved("10.244.1.13", 53, "udp", "shop/dns")], "objects": [*OBJECTS, service]}
    assert explained("shop/web", destination, **more)["allowed"]
    document = explained("shop/web", destination, own=(NODE_ADDRESS, "10.96.0.10"), **more)
    assert not document["allowed"] and "10.96.0.10 is also an address of this node" in "".join(document["notes"])
    denied = [item for item in document["connections"] if not item["allowed"]]
    assert [(item["destination"], item["port"], item["protocol"]) for item in denied] == [("10.96.0.10", 53, "udp")]


def test_a_destination_that_is_never_judged_is_named():
    destination = f"{NODE_ADDRESS}:53/udp"
    assert "denied" in text("shop/db", destination)
    shown = " ".join(text("shop/db", destination, egress_exempt=["172.18.0.0/24", "fd00::/8"]).split())
    assert "egress of shop/db: allowed: not judged: the destination is in networkPolicy.egressExemptCIDRs" in shown
    assert "element inet kubenode-network-policy egress-exempt4 { 172.18.0.0-172.18.0.255 }" in shown
    # The destination's own ingress policies are applied.
    assert not explained("shop/other", "shop/db:80/tcp", egress_exempt=["10.244.1.0/24"])["allowed"]


def test_cluster_policies_are_named_by_tier_and_rule():
    admin = {
        "kind": "ClusterNetworkPolicy",
        "metadata": {"name": "lockdown"},
        "spec": {
            "tier": "Admin",
            "priority": 1,
            "subject": {"namespaces": {}},
            "ingress": [
                {"name": "no-bank", "action": "Deny", "from": [{"namespaces": {"matchLabels": {"team": "bank"}}}]}
            ],
        },
    }
    shown = text("bank/web", "shop/other:80", tiers=True, objects=[*OBJECTS, admin])
    assert "ingress of shop/other: denied: Deny by the Admin tier" in shown
    assert "denied by ClusterNetworkPolicy lockdown ingress[0] (no-bank): from[0]" in shown
    assert explained("bank/web", "shop/other:80", objects=[*OBJECTS, admin])["allowed"], "not enforced here"


def test_a_pod_reaches_itself_unless_through_a_service():
    deny = [{"action": "Deny", "from": [{"namespaces": {}}]}]
    spec = {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "ingress": deny}
    more = {
        "tiers": True,
        "objects": [*OBJECTS, {"kind": "ClusterNetworkPolicy", "metadata": {"name": "x"}, "spec": spec}],
    }
    shown = text("shop/web", "shop/web:80", **more)
    assert "ingress of shop/web: allowed: a pod always reaches itself" in shown
    endpoint = Resolved("10.244.2.11", 80, "tcp", "shop/front")
    assert not explained("shop/web", "10.96.0.9:80", endpoints=[endpoint], **more)["allowed"]


@pytest.mark.parametrize(
    ("source", "destination", "said"),
    [
        ("shop/nobody", "shop/db:80", "there is no pod shop/nobody"),
        ("shop/pending", "shop/db:80", "has no address yet"),
        ("2001:db8::1", "shop/other:80", "no addresses of the same family"),
    ],
)
def test_ends_that_do_not_exist_are_errors(source, destination, said):
    with pytest.raises(ProxyError, match=said):
        explained(source, destination)


@pytest.mark.parametrize(
    ("given", "destination"),
    [
        ("shop", False),
        ("shop/web:99999", False),
        ("shop/web/tcp", False),
        ("shop/db", True),
        ("shop/db:0", True),
        ("shop/db:99999", True),
        ("shop/db:80/icmp", True),
        ("shop/db:80/gre", True),
        ("10.0.0.1", True),
        ("[fd00::1]:x", True),
        ("a b/c:1", True),
        ("", True),
    ],
)
def test_an_invalid_end_is_refused(given, destination):
    with pytest.raises(ConfigurationError):
        parse_end(given, destination)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("shop/db:5432", "shop/db:5432/tcp"),
        ("shop/db:53/UDP", "shop/db:53/udp"),
        ("[FD00::1]:80", "[fd00::1]:80/tcp"),
        ("10.0.0.1:80/sctp", "10.0.0.1:80/sctp"),
        ("fd00::1/icmp", "fd00::1/icmp"),
        ("shop/db/icmp", "shop/db/icmp"),
    ],
)
def test_the_text_of_an_end_can_be_parsed(given, shown):
    found = parse_end(given, destination=True)
    assert str(found) == shown and parse_end(shown, destination=True) == found


def test_a_source_that_is_not_the_senders_is_forged():
    """Of a pod of another node that claims the address of one here, and of a pod that claims one of the node."""
    claims = [pod("claim", "10.244.1.13", node="node2"), pod("vip", NODE_ADDRESS, "10.244.1.14", namespace="bank")]
    state = ClusterState.from_objects([*OBJECTS, *claims])
    found = NodePolicy("node1", state.policy, [packed(NODE_ADDRESS)])
    explainer = PolicyExplainer(state, found, node_name="node1", node_addresses=[NODE_ADDRESS], options=Options())

    def explained(source):
        document = explainer.document(parse_end(source, False), parse_end("203.0.113.9:80/tcp", True))
        first = document["connections"][0]
        return first["allowed"], first["sides"][0]["reason"]

    # Whether packets are dropped is known only if the interfaces of the pods are.
    assert explained("bank/vip")[0] and explained("shop/claim") == (True, "not isolated")
    found.set_links([(HERE, packed("10.244.1.13")), (HERE, packed("10.244.1.14"))])
    reason = "denied: dropped where it arrives, because its source is an address of this node or of a pod of this node"
    assert explained("bank/vip") == explained("shop/claim") == (False, reason)
    port = (PORT_BOUND, "veth13", packed("10.244.1.13"))
    found.set_links([(HERE, port[2]), (HERE, packed("10.244.1.14")), (BRIDGED,), port])
    document = explainer.document(parse_end("shop/claim", False), parse_end("203.0.113.9:80/tcp", True))
    bound = 'element bridge kubenode-network-policy bound4 { "veth13" . 10.244.1.13 }'
    assert bound in document["connections"][0]["programmed"]
    assert explained("shop/other") == (True, "not isolated")
    assert explained(NODE_ADDRESS)[0] and explained("10.244.1.13")[0]


def test_one_line_names_the_pods_that_claim_an_address():
    claims = [pod(f"claim{number}", "10.244.1.13", node="node2") for number in range(7)]
    far = [pod(name, "10.244.3.1", node="node3") for name in ("a", "b")]
    state = ClusterState.from_objects([*OBJECTS, *claims, *far])
    (line,) = annotation_warnings(NodePolicy("node1", state.policy))
    others = ", ".join(f"shop/claim{number} of node node2" for number in range(4))
    claimed = "10.244.1.13: several Pods claim this address of a pod of this node, whose policies apply"
    assert line == f"{claimed}: shop/other, {others}, 3 more"
