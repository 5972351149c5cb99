# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""External addresses of Services of the cluster outside of the operator's ranges are refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api_addresses import claims_at
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.lab import manifests

INSIDE, OUTSIDE, SERVER = "198.51.100.7", "192.0.2.7", "192.0.2.11"
RANGES = ("198.51.100.0/24",)
INSIDE6, OUTSIDE6 = "2001:db8:51::7", "2001:db8:2::7"
NAME = NamespacedName("tenant", "web")
LOAD_BALANCER: dict[str, Any] = {"type": "LoadBalancer"}


def service(name: str = "web", number: int = 1, port: int = 80, **fields: Any) -> dict[str, Any]:
    addresses = [f"10.96.0.{number}", f"fd00:10:96::{number}"]
    return manifests.service(name, addresses, [manifests.port(port, name="p")], namespace="tenant", **fields)


def endpoints(*addresses: str, name: str = "web", port: int = 6443) -> dict[str, Any]:
    listed = [manifests.endpoint(address) for address in addresses]
    return manifests.endpoint_slice(name, listed, [manifests.port(port, name="p")], namespace="tenant")


def limited(ranges: tuple[str, ...], *objects: dict[str, Any]) -> ClusterState:
    state = ClusterState.from_objects(objects)
    state.set_external_ranges(ranges)
    return state


def served(state: ClusterState) -> dict[str, list[str]]:
    """Return the external addresses that are served, and the Service of each."""
    return {
        address: [port.key.name for port in ports if address in (*port.external_ips, *port.load_balancer_ips)]
        for family in ("IPv4", "IPv6")
        for ports in [all_service_ports(state, NodeContext(family, "n1")).values()]
        for info in ports
        for address in (*info.external_ips, *info.load_balancer_ips)
    }


def refused(state: ClusterState) -> list[str]:
    return list(map(str, state.skipped))


def test_an_address_outside_is_refused_by_name_and_the_rest_is_served() -> None:
    state = limited(RANGES, service(externalIPs=[OUTSIDE, INSIDE], ingress=["192.0.2.8", "198.51.100.8", "192.0.2.9"]))
    assert set(served(state)) == {INSIDE, "198.51.100.8"}
    outside = "outside of servicePolicy.externalRanges"
    assert refused(state) == [
        f"Service tenant/web: status.loadBalancer.ingress: 192.0.2.8 and 1 more are {outside}",
        f"Service tenant/web: spec.externalIPs: {OUTSIDE} is {outside}",
    ]
    assert len(all_service_ports(state, NodeContext("IPv4", "n1"))) == 1


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ((), [INSIDE, OUTSIDE, INSIDE6, OUTSIDE6]),
        (("0.0.0.0/0",), [INSIDE, OUTSIDE]),
        (("::/0",), [INSIDE6, OUTSIDE6]),
        (("0.0.0.0/0", "::/0"), [INSIDE, OUTSIDE, INSIDE6, OUTSIDE6]),
        (("2001:db8:51::/64", "192.0.2.7/32"), [OUTSIDE, INSIDE6]),
        (("203.0.113.0/24",), []),
    ],
)
def test_families_and_whole_families(ranges: tuple[str, ...], expected: list[str]) -> None:
    addresses = [INSIDE, OUTSIDE, INSIDE6, OUTSIDE6]
    assert sorted(served(limited(ranges, service(externalIPs=addresses)))) == sorted(expected)
    assert sorted(served(limited(ranges, service(ingress=addresses, **LOAD_BALANCER)))) == sorted(expected)


def test_addresses_of_nodes_and_api_servers_are_no_exception() -> None:
    """A range that has them gives them to no Service that would not get them without ranges."""
    node, servers = manifests.node("n1", OUTSIDE, "10.244.1.0/24"), manifests.api_servers([SERVER], 80)
    claiming = service(externalIPs=[OUTSIDE, SERVER])
    assert set(served(limited(RANGES, node, servers, claiming))) == set()
    state = limited(("192.0.2.0/24",), node, servers, claiming)
    assert set(served(state)) == {OUTSIDE} and not refused(state)
    assert "is the address of an API server and remains that" in str(*state.conflicts)


def test_a_load_balancer_of_the_api_servers_keeps_its_address() -> None:
    balancer = service(port=6443, ingress=[SERVER], **LOAD_BALANCER)
    state = limited(RANGES, balancer, endpoints(SERVER))
    assert not served(state)
    affected = state.set_api_servers(claims_at([(SERVER, 6443)]))
    assert NAME in affected and served(state) == {SERVER: ["web"]} and not refused(state)
    # An endpoint that is none, another port, and an external IP, which a tenant can write.
    assert NAME in state.upsert(endpoints(SERVER, "10.244.1.9")) and not served(state)
    state.upsert(endpoints(SERVER))
    two = manifests.port(443, name="other")
    state.upsert({**balancer, "spec": {**balancer["spec"], "ports": [*balancer["spec"]["ports"], two]}})
    assert not served(state)
    state.upsert(service(port=6443, externalIPs=[SERVER]))
    assert not served(state)


def test_a_static_service_is_not_limited() -> None:
    state = limited(RANGES)
    state.set_static(parse_static({"a.yaml": [service(externalIPs=[OUTSIDE])]}))
    assert served(state) == {OUTSIDE: ["web"]} and not refused(state)
    state.upsert(service(externalIPs=["192.0.2.8"]))
    state.set_static(parse_static({}))
    assert not served(state) and len(refused(state)) == 1


def test_what_is_refused_claims_nothing_and_has_no_weight() -> None:
    old = {"creationTimestamp": "2020-01-01T00:00:00Z"}
    many = [f"203.0.{number >> 8}.{number & 255}" for number in range(4000)]
    ports = [manifests.port(number, name=f"p{number}") for number in range(80, 90)]
    first = manifests.service("a", "10.96.0.2", ports, metadata=old, externalIPs=[OUTSIDE, *many])
    state = limited((OUTSIDE + "/32",), first, service(externalIPs=[OUTSIDE]))
    assert served(state)[OUTSIDE] == ["a"] * 10 and len(refused(state)) == 1 and state.excess < 10_000
    assert "and 3999 more are outside" in refused(state)[0]
    state.set_external_ranges(RANGES)
    assert not state.conflicts and not served(state)


def test_a_change_of_the_ranges_affects_those_that_gain_or_lose_addresses() -> None:
    plain, gaining = service("plain", 2), service("gaining", 3, externalIPs=["203.0.113.1"])
    losing = service("losing", 4, externalIPs=[OUTSIDE])
    state = limited(("192.0.2.0/24",), plain, gaining, losing)
    assert set(served(state)) == {OUTSIDE}
    assert state.set_external_ranges(("203.0.113.0/24",)) == {("tenant", "gaining"), ("tenant", "losing")}
    assert set(served(state)) == {"203.0.113.1"}
    assert state.set_external_ranges(("203.0.113.0/24",)) == set()
    following = state.successor()
    following.upsert(losing)
    assert not served(following)
    assert state.set_external_ranges(()) == {("tenant", "losing")} and not refused(state)


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_changes_has_the_result_of_the_last_state(seed: int) -> None:
    chosen = random.Random(seed)
    addresses = [INSIDE, OUTSIDE, SERVER, "203.0.113.9"]
    settings = [(), RANGES, ("192.0.2.0/24",), ("192.0.2.11/32", "203.0.113.0/24")]
    state, kept = ClusterState(), {}
    ranges, servers = settings[0], claims_at([])
    for _step in range(300):
        name, number = chosen.choice([("a", 1), ("b", 2), ("c", 3)])
        action = chosen.randrange(6)
        if action == 0:
            ranges = chosen.choice(settings)
            state.set_external_ranges(ranges)
        elif action == 1:
            servers = claims_at(chosen.sample([(SERVER, 80), (OUTSIDE, 80)], chosen.randrange(3)))
            state.set_api_servers(servers)
        elif action == 2 and ("Service", name) in kept:
            state.delete(kept.pop(("Service", name)))
        elif action == 3:
            kept["EndpointSlice", name] = endpoints(chosen.choice([SERVER, "10.244.1.1"]), name=name, port=80)
            state.upsert(kept["EndpointSlice", name])
        else:
            external, ingress = chosen.sample(addresses, 2), chosen.sample(addresses, 2)
            kept["Service", name] = service(name, number, externalIPs=external, ingress=ingress, **LOAD_BALANCER)
            state.upsert(kept["Service", name])
    fresh = ClusterState()
    fresh.set_external_ranges(ranges)
    fresh.set_api_servers(servers)
    for item in kept.values():
        fresh.upsert(item)
    assert served(state) == served(fresh) and refused(state) == refused(fresh)
    assert list(map(str, state.conflicts)) == list(map(str, fresh.conflicts))
