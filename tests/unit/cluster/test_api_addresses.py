# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""External addresses of Services of the cluster do not replace those of the API servers."""

from __future__ import annotations

from typing import Any, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api_addresses import claims_at
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import (
    NodeContext,
    all_service_ports,
    service_ports_of,
)
from tests.lab import manifests

CONTEXT = NodeContext("IPv4", "node-1")
SERVER, OTHER, VIP = "192.0.2.11", "192.0.2.12", "192.0.2.100"
#: Of a family in which no Service here has a cluster IP.
SERVER6 = "2001:db8::11"
NAME = NamespacedName("tenant", "web")
SERVERS = manifests.api_servers([SERVER, OTHER], 6443)


def service(name: str = "web", number: int = 1, ports: Sequence[int] = (6443,), **fields: Any) -> dict[str, Any]:
    listed = [manifests.port(port, name=f"p{port}") for port in ports]
    return manifests.service(name, f"10.96.0.{number}", listed, namespace="tenant", **fields)


def endpoints(addresses: Sequence[str], name: str = "web", port: int = 6443) -> dict[str, Any]:
    listed = [manifests.endpoint(address) for address in addresses]
    return manifests.endpoint_slice(name, listed, [manifests.port(port, name="p6443")], namespace="tenant")


def served(state: ClusterState, address: str) -> list[str]:
    """Return the Services and ports that are served on an address."""
    return [
        f"{key.name}:{port.port}"
        for key, port in all_service_ports(state, CONTEXT).items()
        if address in (port.cluster_ip, *port.external_ips, *port.load_balancer_ips)
    ]


@pytest.mark.parametrize("kind", [{"externalIPs": [SERVER]}, {"type": "LoadBalancer", "ingress": [SERVER]}])
def test_the_address_of_an_api_server_is_refused_and_the_rest_is_served(kind: dict[str, Any]) -> None:
    objects = [service(ports=(6443, 80), **kind), endpoints(["10.244.1.1"]), SERVERS]
    for given_objects in (objects, objects[::-1]):
        state = ClusterState.from_objects(given_objects)
        assert served(state, SERVER) == ["web:80"] and served(state, "10.96.0.1") == ["web:6443", "web:80"]
        (conflict,) = state.conflicts
        kind_name = "external IP" if "externalIPs" in kind else "load balancer address"
        assert str(conflict) == (
            f"{SERVER}:6443/TCP is claimed by Service tenant/web ({kind_name}), but is the address of an API server "
            "and remains that"
        )


def test_servers_become_known_and_unknown() -> None:
    state = ClusterState.from_objects([service(externalIPs=[SERVER, VIP])])
    assert served(state, SERVER) == served(state, VIP) == ["web:6443"]
    assert state.upsert(SERVERS) == {NamespacedName("default", "kubernetes"), NAME}
    assert served(state, SERVER) == [] and served(state, VIP) == ["web:6443"]
    assert state.set_api_servers(claims_at([(VIP, 6443), ("api.example.com", 6443)])) == {NAME}
    assert served(state, SERVER) == served(state, VIP) == []
    assert state.set_api_servers(claims_at([(VIP, 6443)])) == set()
    assert state.set_api_servers(frozenset()) == {NAME}
    assert NAME in state.delete(SERVERS)
    assert served(state, SERVER) == served(state, VIP) == ["web:6443"] and not state.conflicts
    assert state.upsert(SERVERS) and not state.upsert(service("other", 2)) - {NamespacedName("tenant", "other")}


def test_a_load_balancer_of_the_api_servers_keeps_their_address() -> None:
    balancer = service(type="LoadBalancer", ingress=[VIP])
    state = ClusterState.from_objects([balancer, SERVERS])
    state.set_api_servers(claims_at([(VIP, 6443)]))
    assert served(state, VIP) == [], "without endpoints it would refuse connections"
    assert state.upsert(endpoints([SERVER, OTHER])) == {NAME}
    assert served(state, VIP) == ["web:6443"] and not state.conflicts
    older = service(
        "older", 2, type="LoadBalancer", ingress=[VIP], metadata={"creationTimestamp": "2020-01-01T00:00:00Z"}
    )
    state.upsert(older)
    assert served(state, VIP) == ["web:6443"]
    assert state.upsert(endpoints([SERVER, "10.244.1.1"])) == {NAME}
    assert served(state, VIP) == []
    state.upsert(endpoints([SERVER]))
    state.upsert(service(externalIPs=[VIP]))
    assert served(state, VIP) == [], "tenants write external IPs"


def test_a_load_balancer_may_have_addresses_of_a_family_that_its_service_does_not_have() -> None:
    state = ClusterState()
    state.set_api_servers(claims_at([(SERVER6, 6443), (SERVER, 6443)]))
    for raw in (service(type="LoadBalancer", ingress=[SERVER6, VIP]), endpoints([SERVER])):
        state.upsert(raw)
    assert served(state, VIP) == ["web:6443"] and served(state, SERVER6) == [] and not state.conflicts


def test_cluster_ips_and_static_services_keep_the_address() -> None:
    state = ClusterState.from_objects([service(), endpoints(["10.244.1.1"]), SERVERS])
    state.set_api_servers(claims_at([("10.96.0.1", 6443), (VIP, 6443)]))
    assert served(state, "10.96.0.1") == ["web:6443"] and not state.conflicts
    port = [{"name": "https", "port": 6443}]
    static = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "apiserver"},
        "spec": {"clusterIP": VIP, "ports": port, "externalIPs": [SERVER]},
    }
    state.set_static(parse_static({"a.yaml": [static]}))
    assert served(state, VIP) == served(state, SERVER) == ["apiserver:6443"] and not state.conflicts
    state.upsert(service("thief", 3, externalIPs=[VIP]))
    (conflict,) = state.conflicts
    assert conflict.winner == NamespacedName("static", "apiserver")


def test_no_interface_gets_the_address_for_another_port() -> None:
    state = ClusterState.from_objects([service(ports=(80,), externalIPs=[SERVER, VIP])])

    def unbound(name: NamespacedName = NAME) -> Sequence[str]:
        (port,) = service_ports_of(state, name, CONTEXT)
        return port.unbound

    assert unbound() == ()
    assert state.upsert(SERVERS) == {NAME, NamespacedName("default", "kubernetes")} and unbound() == (SERVER,)
    # A load balancer of the API servers has its address on the node.
    state.set_api_servers(claims_at([(VIP, 6443)]))
    state.upsert(service("lb", 2, type="LoadBalancer", ingress=[VIP]))
    assert unbound() == (SERVER, VIP)
    state.upsert(endpoints([SERVER, OTHER], "lb"))
    assert unbound(NamespacedName("tenant", "lb")) == () and unbound() == (SERVER, VIP)


ADDRESSES = st.lists(st.sampled_from([SERVER, OTHER, VIP, SERVER6]), max_size=2)
OBJECTS = st.one_of(
    st.builds(
        lambda number, port, external, ingress: service(
            f"s{number}", number, (port,), type="LoadBalancer", externalIPs=external, ingress=ingress
        ),
        st.integers(1, 3),
        st.sampled_from([6443, 80]),
        ADDRESSES,
        ADDRESSES,
    ),
    st.builds(
        lambda number, addresses: endpoints(addresses, f"s{number}"),
        st.integers(1, 3),
        st.lists(st.sampled_from([SERVER, OTHER, "10.244.1.1"]), max_size=2),
    ),
    ADDRESSES.map(lambda addresses: manifests.api_servers([item for item in addresses if item != SERVER6], 6443)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), OBJECTS, ADDRESSES), max_size=14))
def test_changes_equal_a_state_made_at_once(steps: Any) -> None:
    """The Services reported as affected by each change are sufficient to keep all service ports up to date."""
    state = ClusterState()
    routes: dict[NamespacedName, Any] = {}
    kept: dict[Any, dict[str, Any]] = {}
    servers = claims_at([])
    for action, raw, given_servers in steps:
        key = raw["kind"], raw["metadata"]["namespace"], raw["metadata"]["name"]
        if action == 0:
            servers = claims_at([(address, 6443) for address in given_servers])
            affected = state.set_api_servers(servers)
        elif action == 1:
            affected = state.delete(raw)
            kept.pop(key, None)
        else:
            affected = state.upsert(raw)
            kept[key] = raw
        for name in affected:
            routes[name] = service_ports_of(state, name, CONTEXT)
        whole = ClusterState.from_objects(kept.values())
        whole.set_api_servers(servers)
        assert list(whole.conflicts) == list(state.conflicts)
        assert {route.key: route for item in routes.values() for route in item} == all_service_ports(whole, CONTEXT)
