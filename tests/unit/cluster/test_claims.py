# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which Service gets an address or node port that several Services claim, whatever the order of the objects."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import (
    NodeContext,
    all_service_ports,
    service_ports_of,
)

CONTEXT = NodeContext("IPv4", "node-1")
OLD, YOUNG = "2024-01-01T00:00:00Z", "2026-01-01T00:00:00Z"


def service(namespace: str, number: int, created: Optional[str] = None, **fields: Any) -> dict[str, Any]:
    """Return a Service ``web`` with port 53/UDP; ``lb`` and ``external`` are its other addresses."""
    metadata = {"namespace": namespace, "name": "web", **({"creationTimestamp": created} if created else {})}
    port = {"port": 53, "protocol": "UDP", "nodePort": fields.get("node_port", 0)}
    ip = fields.get("ip", f"10.96.0.{number}")
    return {
        "kind": "Service",
        "metadata": metadata,
        "spec": {"type": "LoadBalancer", "clusterIP": ip, "ports": [port], "externalIPs": fields.get("external", [])},
        "status": {"loadBalancer": {"ingress": [{"ip": ip} for ip in fields.get("lb", [])]}},
    }


def owners(state: ClusterState, address: str) -> list[str]:
    """Return the namespaces whose Service is served on the address."""
    return sorted(
        key.namespace
        for key, route in all_service_ports(state, CONTEXT).items()
        if address in (route.cluster_ip, *route.external_ips, *route.load_balancer_ips)
    )


DNS = service("kube-system", 10, YOUNG)


@pytest.mark.parametrize(
    ("one", "other", "address", "winner"),
    [
        (DNS, service("a-tenant", 1, OLD, external=["10.96.0.10"]), "10.96.0.10", "kube-system"),
        (DNS, service("a-tenant", 1, OLD, lb=["10.96.0.10"]), "10.96.0.10", "kube-system"),
        (service("z", 1, YOUNG, lb=["192.0.2.1"]), service("a", 2, OLD, external=["192.0.2.1"]), "192.0.2.1", "z"),
        (service("z", 1, OLD, lb=["192.0.2.1"]), service("a", 2, YOUNG, lb=["192.0.2.1"]), "192.0.2.1", "z"),
        (service("z", 1, YOUNG, lb=["192.0.2.1"]), service("a", 2, lb=["192.0.2.1"]), "192.0.2.1", "z"),
        (service("b", 1, OLD, lb=["192.0.2.1"]), service("a", 2, OLD, lb=["192.0.2.1"]), "192.0.2.1", "a"),
        (service("b", 1, ip="10.96.0.7"), service("a", 2, ip="10.96.0.7"), "10.96.0.7", "a"),
    ],
)
def test_the_stronger_claim_wins_then_the_older_then_the_first_by_name(one, other, address, winner):
    for objects in ([one, other], [other, one]):
        state = ClusterState.from_objects(objects)
        assert owners(state, address) == [winner]
        (conflict,) = state.conflicts
        assert conflict.winner.namespace == winner
        text = str(conflict)
        assert text.startswith(f"{address}:53/UDP is claimed by Service {winner}/web (")
        assert all(f"{item['metadata']['namespace']}/web" in text for item in objects)


def test_node_ports_are_assigned_by_age():
    state = ClusterState.from_objects([service("a", 1, YOUNG, node_port=30053), service("z", 2, OLD, node_port=30053)])
    ports = {key.namespace: route.node_port for key, route in all_service_ports(state, CONTEXT).items()}
    assert ports == {"a": 0, "z": 30053}
    assert str(state.conflicts.first(1)[0]).startswith(
        "node port 30053/UDP (IPv4) is claimed by Service z/web (node port) and"
    )


def test_other_ports_and_protocols_of_an_address_are_no_conflict():
    other = service("a", 1, external=["10.96.0.10"])
    ports = [("t", 53, "TCP"), ("u", 54, "UDP")]
    other["spec"]["ports"] = [{"name": name, "port": port, "protocol": kind} for name, port, kind in ports]
    state = ClusterState.from_objects([DNS, other])
    assert not state.conflicts and owners(state, "10.96.0.10") == ["a", "a", "kube-system"]
    both = service("a", 1, external=["192.0.2.1"], lb=["192.0.2.1"])
    assert not ClusterState.from_objects([both]).conflicts


def test_a_losing_service_keeps_its_own_addresses_and_regains_the_other():
    thief = service("a-tenant", 1, OLD, external=["10.96.0.10", "192.0.2.1"])
    state = ClusterState.from_objects([thief])
    assert owners(state, "10.96.0.10") == ["a-tenant"]
    name, dns = NamespacedName("a-tenant", "web"), NamespacedName("kube-system", "web")
    assert state.upsert(DNS) == {dns, name}, "both must be rendered again"
    assert owners(state, "10.96.0.10") == ["kube-system"] and owners(state, "192.0.2.1") == ["a-tenant"]
    assert state.delete(DNS) == {dns, name}
    assert owners(state, "10.96.0.10") == ["a-tenant"] and not state.conflicts
    assert state.upsert(service("b", 3)) == {NamespacedName("b", "web")}, "who has no part in it is left alone"


def test_a_bad_time_costs_only_the_age():
    state = ClusterState.from_objects([service("a", 1, "yesterday"), service("b", 2, created=OLD)])
    assert len(state.services) == 2 and [part.field for part in state.skipped] == ["metadata.creationTimestamp"]


ADDRESSES = ["192.0.2.1", "192.0.2.2", "10.96.0.1", "10.96.0.2"]
SERVICES = st.builds(
    lambda number, created, lb, external, node_port, ip: service(
        f"n{number}", number, created, lb=lb, external=external, node_port=node_port, ip=ip
    ),
    st.integers(1, 4),
    st.sampled_from([None, OLD, YOUNG]),
    st.lists(st.sampled_from(ADDRESSES), max_size=2),
    st.lists(st.sampled_from(ADDRESSES), max_size=2),
    st.sampled_from([0, 30000, 30001]),
    st.sampled_from(["10.96.0.1", "10.96.0.2", "10.96.0.3"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SERVICES), max_size=12))
def test_incremental_and_full_assignment_agree(steps):
    """The Services reported as affected by each change are sufficient to keep all service ports up to date."""
    state = ClusterState()
    routes: dict[NamespacedName, Any] = {}
    kept: dict[NamespacedName, dict[str, Any]] = {}
    for removed, raw in steps:
        affected = state.delete(raw) if removed else state.upsert(raw)
        key = NamespacedName(raw["metadata"]["namespace"], "web")
        kept.pop(key, None)
        if not removed:
            kept[key] = raw
        for name in affected:
            routes[name] = service_ports_of(state, name, CONTEXT)
        whole = ClusterState.from_objects(kept.values())
        assert list(whole.conflicts) == list(state.conflicts)
        assert {route.key: route for item in routes.values() for route in item} == all_service_ports(whole, CONTEXT)
        seen = [
            (address, route.port, route.protocol)
            for route in all_service_ports(whole, CONTEXT).values()
            for address in {route.cluster_ip, *route.external_ips, *route.load_balancer_ips}
        ]
        assert len(seen) == len(set(seen)), "two Services are served on one address and port"
