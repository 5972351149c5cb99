# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The limit of one Service: what it serves of products of ports, addresses, sources and endpoints, in every mode."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.room import Room
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster import service_limit
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.account import (
    RATES,
    Parts,
    Products,
    most_entries,
    within_share,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.owned_slices import EndpointCounts
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING as NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, service_ports_of

WEB = NamespacedName("shop", "web")
NODE = DataplaneSettings(
    "IPv4", "n1", "192.0.2.9", node_port_addresses=("192.0.2.9",), node_addresses=(("eth0", "192.0.2.9"),)
)


def addresses(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{number >> 8}.{number & 255}" for number in range(1, count + 1)]


def service(ports: int, external: int = 0, balancers: int = 0, ranges: int = 0, **more: Any) -> dict[str, Any]:
    """Return a Service with these numbers of each; ``node_ports``: each port has one."""
    first = 30000 if more.get("node_ports") else 0
    return {
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": more.get("name", "web")},
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": more.get("ip", "10.96.0.1"),
            "ports": [
                {"name": f"p{number}", "port": 1 + number, "nodePort": first and first + number}
                for number in range(ports)
            ],
            "externalIPs": addresses("198.18", external),
            "loadBalancerSourceRanges": addresses("192.0", ranges)
            and [f"{ip}/32" for ip in addresses("192.0", ranges)],
        },
        "status": {"loadBalancer": {"ingress": [{"ip": ip} for ip in addresses("203.0", balancers)]}},
    }


def endpoint_slices(ports: int, endpoints: int, weight: int | None = None) -> list[dict[str, Any]]:
    """Return slices of up to 100 endpoints of the node. ``weight``: of a slice with another name."""
    given = [{"addresses": [ip], "nodeName": "n1"} for ip in addresses("10.244", endpoints)]
    return [
        {
            "kind": "EndpointSlice",
            "metadata": {
                "namespace": "shop",
                "name": f"web-{first}" if weight is None else "weighted",
                "annotations": {} if weight is None else {"kubenode.proxy/weight": str(weight)},
                "labels": {"kubernetes.io/service-name": "web"},
            },
            "addressType": "IPv4",
            "ports": [{"name": f"p{number}", "port": 8080} for number in range(ports)],
            "endpoints": given[first : first + 100],
        }
        for first in range(0, endpoints, 100)
    ]


def served(*objects: Any) -> tuple[int, int, int, int]:
    """Return how many ports, node ports, load balancer addresses and external IPs of the Service are served."""
    found = ClusterState.from_objects(objects).services[WEB]
    node_ports = sum(port.node_port > 0 for port in found.ports)
    return len(found.ports), node_ports, len(found.load_balancer_ips), len(found.external_ips)


# ---- what is served


@pytest.mark.parametrize(
    "objects",
    [
        [service(100, 5, 5, node_ports=True), *endpoint_slices(100, 45)],
        [service(100, 10), *endpoint_slices(100, 50)],
        [service(100, 0, 1, 100), *endpoint_slices(100, 20)],
        [service(1, 2, 2, 1000, node_ports=True), *endpoint_slices(1, 20_000)],
        [service(4, 0, 1, node_ports=True), *endpoint_slices(4, 5_000)],
        [service(1000), *endpoint_slices(1000, 10)],
        [service(2, 1000)],
    ],
)
def test_a_service_of_an_ordinary_cluster_is_served_completely(objects):
    state = ClusterState.from_objects(objects)
    assert not state.skipped and state.services == ClusterState.from_objects(objects[:1]).services
    spec = objects[0]["spec"]
    assert len(state.services[WEB].ports) == len(spec["ports"])
    assert len(state.services[WEB].external_ips) == len(spec["externalIPs"])


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        # Ports x external IPs: 1,000 at the cluster IP, 48 external ones.
        ([service(1000, 1000)], (1000, 0, 0, 48)),
        ([service(1000, 1000, 10, node_ports=True)], (1000, 1000, 10, 37)),
        ([service(1000, 1000, 1000)], (1000, 0, 48, 0)),
        # Ports x load balancer addresses x source ranges.
        ([service(100, 10, 10, 1000)], (100, 0, 0, 0)),
        ([service(10, 10, 300, 10)], (10, 0, 94, 0)),
        ([service(100, 10, 1, 1000, node_ports=True)], (100, 98, 0, 0)),
        # Ports x endpoints, and these x addresses.
        ([service(1000, 10), *endpoint_slices(1000, 1000)], (24, 0, 0, 0)),
        ([service(100, 100, node_ports=True), *endpoint_slices(100, 100)], (100, 100, 0, 6)),
        ([service(60_000, 1)], (33_332, 0, 0, 0)),
    ],
)
def test_of_a_large_service_what_fits_is_served_in_a_fixed_order(objects, expected):
    assert served(*objects) == served(*reversed(objects)) == expected


def test_each_kind_of_parts_that_do_not_fit_is_refused_once_by_name_field_and_reason():
    state = ClusterState.from_objects([service(1000, 1000, 1000, node_ports=True)])
    assert not state.refusals
    lines = [str(part) for part in state.skipped]
    reason = "the ports of the Service, times addresses, endpoints and sources, make 4009002 entries, more than 100000"
    assert lines == [
        f"Service shop/web: status.loadBalancer.ingress: 203.0.0.48 and 952 more are not served: {reason}",
        f"Service shop/web: spec.externalIPs: 198.18.0.1 and 999 more are not served: {reason}",
    ]
    state.upsert(service(1))
    assert not state.skipped and not state.excess


def test_a_large_service_claims_only_what_is_served_and_the_next_one_gets_the_rest():
    other = service(1, name="other", ip="10.96.0.2")
    other["spec"]["externalIPs"] = addresses("198.18", 1000)[-1:]
    state = ClusterState.from_objects([service(1000, 1000), other])
    assert not state.conflicts and sum(1 for _ in state._claims._claimants) == 49_002


def test_what_is_served_follows_endpoints_that_come_and_disappear():
    objects = [service(100, 100), *endpoint_slices(100, 100)]
    state = ClusterState.from_objects(objects[:1])
    assert len(state.services[WEB].external_ips) == 100
    for item in objects[1:]:
        assert WEB in state.upsert(item)
    assert len(state.services[WEB].external_ips) == 7 and state.skipped
    assert state.upsert(objects[0]) == frozenset()
    for item in objects[1:]:
        state.delete(item)
    assert len(state.services[WEB].external_ips) == 100 and not state.skipped
    state.delete(objects[0])
    assert not state.services and not state.excess and not state._claims._claimants


def test_ports_of_endpoint_slices_that_the_service_does_not_have_are_not_expanded():
    state = ClusterState.from_objects([service(1), *endpoint_slices(20_000, 100)])
    (info,) = service_ports_of(state, WEB, NodeContext("IPv4", "n1"))
    assert len(info.endpoints) == 100 and not state.skipped


# ---- what it costs


@settings(max_examples=60)
@given(
    numbers=st.tuples(*[st.integers(0, most) for most in (40, 40, 40, 30, 40)]),
    node_ports=st.booleans(),
    local=st.booleans(),
    affinity=st.booleans(),
    allowed=st.integers(0, 20),
    weight=st.sampled_from([None, 1, 100, 255]),
    seed=st.integers(0, 1000),
)
def test_what_is_served_is_within_the_limit_in_every_mode(numbers, node_ports, local, affinity, allowed, weight, seed):
    """With a smaller limit, which most of these Services exceed. See test_cost_account for the account itself."""
    ports, external, balancers, ranges, endpoints = numbers
    raw = service(1 + ports, external, balancers, ranges, node_ports=node_ports)
    raw["spec"]["externalTrafficPolicy"] = "Local" if local else "Cluster"
    raw["spec"]["sessionAffinity"] = "ClientIP" if affinity else "None"
    if allowed:
        sources = [f"{ip}/32" for ip in addresses("172.16", allowed)] + ["192.0.2.0/24"]
        raw["metadata"]["annotations"] = {"kubenode.proxy/allowed-sources": ",".join(sources)}
    objects = [raw, *endpoint_slices(1 + ports, endpoints), *endpoint_slices(1 + ports, 1, weight)]
    random.Random(seed).shuffle(objects)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_limit, "MOST_ENTRIES", 2_000)
        state = ClusterState.from_objects(objects)
    found = state.services[WEB]
    counts = EndpointCounts(state.slices_of(WEB).values())
    served = most_entries(Products(found, counts).shapes(Parts.of(found)))
    assert served <= max(2_000, service_limit.ENTRIES_OF_ENDPOINT * counts.endpoints) or len(found.ports) == 1
    assert (found == state._given(WEB)) == (not state.skipped)


# ---- the agent's memory


class Bytes(Room):
    """Room for ``most`` bytes in all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.view = ClusterView(self)

    def carries(self, more: int, reserve: float = 0.0) -> bool:
        return self.view.size + more <= self.most

    def shares(self, excess: int, more: int = 0) -> bool:
        return within_share(excess, self.most - self.view.size - more)


def of_namespace(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "metadata": {**raw["metadata"], "namespace": name}}


def test_what_services_make_beyond_their_size_counts_as_bytes_and_what_others_make_does_not():
    view = ClusterView()
    view.apply(Batch("Service", [service(2, 0, 1, node_ports=True)], [], True))
    small = view.size
    view.apply(Batch("EndpointSlice", endpoint_slices(2, 30), [], True))
    assert view.size < 20_000 and small < view.size
    view.apply(Batch("Service", [service(500, 100)], []))
    assert view.state.excess > 40_000 * RATES["nftables"].bytes_of_entry.others
    assert view.size > view.state.excess / RATES["nftables"].bytes_of_object
    view.apply(Batch("Service", [], [service(1)]))
    assert not view.state.excess and not view.state.excess_of("shop") and view.size < 20_000


def test_the_mode_in_effect_decides_how_many_bytes_there_are():
    """Nftables mode repeats endpoints by their weights, iptables mode has rules of addresses in a chain of all."""
    sizes = {}
    for mode in ("nftables", "iptables", "ipvs"):
        view = ClusterView()
        objects = [service(20, 10), *endpoint_slices(20, 1, 1), *endpoint_slices(20, 1)]
        objects[-1]["metadata"]["annotations"] = {"kubenode.proxy/weight": "255"}
        for raw in objects:
            view.apply(Batch(raw["kind"], [raw], []))
        before = view.state.services
        view.set_rates(RATES[mode])
        assert view.state.services == before
        sizes[mode] = view.state.excess
    assert sizes["nftables"] > 5 * sizes["ipvs"] and sizes["iptables"] > 5 * sizes["ipvs"]


@pytest.mark.parametrize("listed", [True, False])
def test_a_large_service_for_which_its_namespace_has_no_room_is_withheld_by_name(listed):
    view = Bytes(1_000_000).view
    view.apply(Batch("Service", [service(1), service(2, name="other", ip="10.96.0.2")], [], True))
    view.apply(Batch("Service", [service(1000, 1000), service(3, name="other", ip="10.96.0.2")], [], listed))
    assert [key.name for key in view.held_back] == ["web"] and view.withheld == 1
    assert not view.state.excess and not view.state.skipped
    assert [len(item.ports) for item in view.state.services.values()] == [1, 3]
    (refusal,) = view.state.refusals
    assert str(refusal).startswith("Service shop/web: ") and "raise agent_memory_max" in str(refusal)
    # A version that fits is in force, and nothing is reported any more.
    view.apply(Batch("Service", [service(2)], []))
    assert not view.state.refusals and not view.held_back and not view.withheld


def test_endpoints_that_make_a_service_too_large_are_withheld():
    view = Bytes(400_000).view
    view.apply(Batch("Service", [service(100, 10)], [], True))
    view.apply(Batch("EndpointSlice", endpoint_slices(100, 100), [], True))
    assert [key.kind for key in view.held_back] == ["EndpointSlice"] and not view.state.slices


def test_a_namespace_leaves_as_much_room_as_it_takes_and_is_listed_again_when_there_is_more():
    room = Bytes(20_000_000)
    view = room.view

    def create(namespace: str, number: int) -> None:
        raw = service(200, 100, name=f"s{number}", ip=f"10.96.1.{number}")
        view.apply(Batch("Service", [of_namespace(namespace, raw)], []))

    for number in range(12):
        create("greedy", number)
    admitted = set(view.state.services)
    assert 3 < len(admitted) < 12 and view.size < 0.6 * room.most
    create("modest", 20)
    assert NamespacedName("modest", "s20") in view.state.services and admitted < set(view.state.services)
    assert not view.with_room(True)
    room.most *= 3
    assert view.with_room(False) == {key for key in view.held_back if key.namespace == "greedy"}


def test_a_list_admits_the_oldest_services_first():
    view = Bytes(6_000_000).view
    raws = []
    for number in range(6):
        raw = service(200, 100, name=f"s{number}", ip=f"10.96.1.{number}")
        raw["metadata"]["creationTimestamp"] = f"2026-01-0{9 - number}T00:00:00Z"
        raws.append(raw)
    view.apply(Batch("Service", raws, [], True))
    names = sorted(key.name for key in view.state.services)
    assert 0 < len(names) < 6 and names == [f"s{number}" for number in range(6 - len(names), 6)]


def test_rendering_large_services_reports_progress_by_entries():
    calls: list[int] = []
    tables = DesiredTables(NFTABLES, NODE, lambda: calls.append(1))
    large = {}
    for number in range(4):
        name = NamespacedName("shop", f"web-{number}")
        state = ClusterState.from_objects([service(100, 150, name=name.name, ip=f"10.96.0.{number + 1}")])
        large[name] = service_ports_of(state, name, NodeContext("IPv4", "n1"))
    tables.apply(large, lambda key: ())
    # Each has 15,000 entries: at the first one and the third one.
    assert len(calls) == 2
