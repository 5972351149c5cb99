# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""If policies need too much, those of the namespace that causes it are refused, whatever kind of rules it uses."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.policies.policy_model import DIRECTIONS
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy import limits
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.budget import Demand
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import _BOUNDED

MOST = 2_000


def pod(namespace, name, address, ports=(), node="node1", **labels):
    return {
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {"app": name, **labels}},
        "spec": {
            "nodeName": node,
            "containers": [{"ports": [{"name": each, "containerPort": number} for each, number in ports]}],
        },
        "status": {"phase": "Running", "podIPs": [{"ip": address}]},
    }


def policy(namespace, name, direction, *rules, selector=None):
    spec = {"podSelector": {"matchLabels": selector or {}}, "policyTypes": [direction], direction.lower(): list(rules)}
    return {"kind": "NetworkPolicy", "metadata": {"namespace": namespace, "name": name}, "spec": spec}


def victims(count=5):
    """Yield small policies with the kinds of peers that ordinary policies have."""
    for number in range(count):
        namespace = f"shop{number}"
        yield {"kind": "Namespace", "metadata": {"name": namespace, "labels": {"team": "shop"}}}
        yield pod(namespace, "web", f"10.1.{number}.1", [("http", 8080)])
        peers = [
            {"podSelector": {"matchLabels": {"app": "web"}}},
            {"namespaceSelector": {"matchLabels": {"team": "shop"}}},
            {"ipBlock": {"cidr": "192.0.2.0/24"}},
        ]
        yield policy(namespace, "in", "Ingress", {"from": peers, "ports": [{"port": "http"}]})
        yield policy(namespace, "out", "Egress", {"ports": [{"port": 53, "protocol": "UDP"}, {"port": "http"}]})


def attackers(count, ports=(), node="node2"):
    """Yield pods with the ports of a function of their number, of which only the first one must be on the node."""
    for number in range(count):
        here = node if number else "node1"
        yield pod("tenant", f"t{number}", f"10.2.0.{number + 1}", ports(number) if ports else (), here, i=str(number))


def odd(first, count):
    return [{"port": first + 2 * number} for number in range(count)]


def ports_for_every_peer():
    """Many ranges for every peer, in as many sets as there are pods, since each has one more range of its own."""
    yield from attackers(5, node="node1")
    for number in range(4):
        yield policy("tenant", f"big{number}", "Ingress", {"ports": odd(1 + 400 * number, 200)})
    for number in range(5):
        yield policy(
            "tenant", f"own{number}", "Ingress", {"ports": odd(2 + 4 * number, 1)}, selector={"i": str(number)}
        )


def names(rule, direction, count=30, node="node2"):
    def made():
        wanted = [f"p{number}" for number in range(100)]
        yield {"kind": "Namespace", "metadata": {"name": "tenant"}}
        yield from attackers(
            count,
            lambda own: [(name, 1 + 4 * at + 2 * (at == own)) for at, name in enumerate(wanted)],
            node,
        )
        yield policy("tenant", "named", direction, {**rule, "ports": [{"port": name} for name in wanted]})

    return made


def selectors_of_one_rule():
    """Each subset of selectors that match a pod makes a class of its own, although there is only one rule."""
    yield {"kind": "Namespace", "metadata": {"name": "tenant"}}
    yield from attackers(100, node="node2")
    for number in range(100, 130):
        yield pod("tenant", f"t{number}", f"10.2.0.{number}")
    peers = [{"podSelector": {"matchLabels": {"i": str(number)}}} for number in range(100)]
    yield policy("tenant", "one", "Ingress", {"from": peers})


def names_beside_numbers():
    """The ports by number are part of as many sets as there are layouts of ports."""
    yield {"kind": "Namespace", "metadata": {"name": "tenant"}}
    yield from attackers(30, lambda own: [("p", 2 + 2 * own)])
    ports = [*odd(10_001, 100), {"port": "p"}]
    yield policy("tenant", "both", "Egress", {"to": [{"podSelector": {}}], "ports": ports})


HOSTILE = [
    names_beside_numbers,
    ports_for_every_peer,
    names({}, "Egress"),
    names({"to": [{"podSelector": {}}]}, "Egress"),
    names({"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}, "Egress"),
    names({}, "Ingress", node="node1"),
    selectors_of_one_rule,
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_policy_of_others_is_refused(hostile):
    state = ClusterState.from_objects([*victims(), *hostile()])
    assert not state.refusals and not state.skipped
    found = NodePolicy("node1", state.policy, most_rows=MOST)
    assert found.too_large and {key.namespace for key, _direction in found.too_large} == {"tenant"}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_the_computed_need_is_not_less_than_what_policies_use(hostile):
    state = ClusterState.from_objects(hostile())
    rows = NodePolicy("node1", state.policy).table.rows
    assert sum(row[0] in _BOUNDED for row in rows) <= sum(Demand(state.policy, "node1").needs().values())


def test_ordinary_policies_need_little():
    state = ClusterState.from_objects([*victims(), *names({}, "Egress")()])
    needs = Demand(state.policy, "node1").needs()
    assert max(need for name, need in needs.items() if name != "tenant") < 100 < MOST < needs["tenant"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_policy_whose_names_are_too_many_ports_is_refused_by_itself(direction, monkeypatch):
    monkeypatch.setattr(limits, "MOST_PORTS", 2_999)
    state = ClusterState.from_objects([*victims(), *names({}, direction)()])
    found = NodePolicy("node1", state.policy)
    ((key, reason),) = found.too_large.items()
    assert (key[0].namespace, key[1]) == ("tenant", direction) and "3000 ports of pods" in reason


def test_pods_with_the_same_ports_count_once(monkeypatch):
    monkeypatch.setattr(limits, "MOST_PORTS", 100)
    wanted = [f"p{number}" for number in range(100)]
    pods = attackers(30, lambda _own: [(name, 1 + at) for at, name in enumerate(wanted)])
    named = policy("tenant", "named", "Egress", {"ports": [{"port": name} for name in wanted]})
    assert not NodePolicy("node1", ClusterState.from_objects([*pods, named]).policy).too_large
