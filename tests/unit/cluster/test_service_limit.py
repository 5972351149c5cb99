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
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import BYTES_OF_WEIGHT, ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster import service_limit
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.service_limit import MOST_WEIGHT
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING as IPTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import OVER_NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import RENDERING as IPVS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING as NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.mode import RENDERING as USERSPACE
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, service_ports_of

WEB = NamespacedName("shop", "web")
MODES = {
    "nftables": NFTABLES,
    "iptables": IPTABLES,
    "ipvs": IPVS,
    "ipvs over nftables": OVER_NFTABLES,
    "userspace": USERSPACE,
}
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


def endpoint_slices(ports: int, endpoints: int) -> list[dict[str, Any]]:
    """Return slices of up to 100 endpoints of the node."""
    given = [{"addresses": [ip], "nodeName": "n1"} for ip in addresses("10.244", endpoints)]
    return [
        {
            "kind": "EndpointSlice",
            "metadata": {
                "namespace": "shop",
                "name": f"web-{first}",
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


def pieces(state: ClusterState, mode: str) -> int:
    """Return the size of a mode's tables: entries, and the parts of their values (rules, endpoints, sources)."""
    tables = DesiredTables(MODES[mode], NODE)
    before = sum(map(_pieces, tables.desired.values()))
    tables.apply({WEB: service_ports_of(state, WEB, NodeContext("IPv4", "n1"))}, lambda key: ())
    tables.pop_changes()
    return sum(map(_pieces, tables.desired.values())) - before


def _pieces(rows: Any) -> int:
    values = [getattr(value, "rules", getattr(value, "endpoints", value)) for value in rows.values()]
    return len(rows) + sum(len(value) for value in values if value.__class__ is tuple)


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
        # Ports x external IPs: 1,000 at the cluster IP, 19 external ones.
        ([service(1000, 1000)], (1000, 0, 0, 19)),
        ([service(1000, 1000, 10, node_ports=True)], (1000, 1000, 10, 8)),
        ([service(1000, 1000, 1000)], (1000, 0, 19, 0)),
        # Ports x load balancer addresses x source ranges.
        ([service(100, 10, 10, 1000)], (100, 0, 0, 0)),
        ([service(10, 10, 300, 10)], (10, 0, 12, 0)),
        ([service(100, 10, 1, 1000, node_ports=True)], (100, 39, 0, 0)),
        # Ports x endpoints, and these x addresses.
        ([service(1000, 10), *endpoint_slices(1000, 1000)], (28, 0, 0, 0)),
        ([service(100, 100, node_ports=True), *endpoint_slices(100, 100)], (100, 100, 0, 3)),
        ([service(30_000)], (20_000, 0, 0, 0)),
    ],
)
def test_of_a_large_service_what_fits_is_served_in_a_fixed_order(objects, expected):
    assert served(*objects) == served(*reversed(objects)) == expected


def test_each_kind_of_parts_that_do_not_fit_is_refused_once_by_name_field_and_reason():
    state = ClusterState.from_objects([service(1000, 1000, 1000, node_ports=True)])
    assert not state.refusals
    lines = [str(part) for part in state.skipped]
    reason = (
        "the ports of the Service, times addresses, endpoints and sources, have a weight of 20020000, more than 200000"
    )
    assert lines == [
        f"Service shop/web: status.loadBalancer.ingress: 203.0.0.19 and 981 more are not served: {reason}",
        f"Service shop/web: spec.externalIPs: 198.18.0.1 and 999 more are not served: {reason}",
    ]
    state.upsert(service(1))
    assert not state.skipped and not state.excess


def test_a_large_service_claims_only_what_is_served_and_the_next_one_gets_the_rest():
    other = service(1, name="other", ip="10.96.0.2")
    other["spec"]["externalIPs"] = addresses("198.18", 1000)[-1:]
    state = ClusterState.from_objects([service(1000, 1000), other])
    assert not state.conflicts and sum(1 for _ in state._claims._claimants) == 20_002


def test_what_is_served_follows_endpoints_that_come_and_disappear():
    objects = [service(100, 100), *endpoint_slices(100, 100)]
    state = ClusterState.from_objects(objects[:1])
    assert len(state.services[WEB].external_ips) == 100
    for item in objects[1:]:
        assert WEB in state.upsert(item)
    assert len(state.services[WEB].external_ips) == 4 and state.skipped
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
    seed=st.integers(0, 1000),
)
def test_the_tables_of_each_mode_are_within_the_limit(numbers, node_ports, local, affinity, allowed, seed):
    """With a smaller limit, which most of these Services exceed."""
    ports, external, balancers, ranges, endpoints = numbers
    raw = service(1 + ports, external, balancers, ranges, node_ports=node_ports)
    raw["spec"]["externalTrafficPolicy"] = "Local" if local else "Cluster"
    raw["spec"]["sessionAffinity"] = "ClientIP" if affinity else "None"
    if allowed:
        sources = [f"{ip}/32" for ip in addresses("172.16", allowed)] + ["192.0.2.0/24"]
        raw["metadata"]["annotations"] = {"kubenode.proxy/allowed-sources": ",".join(sources)}
    objects = [raw, *endpoint_slices(1 + ports, endpoints)]
    random.Random(seed).shuffle(objects)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_limit, "MOST_WEIGHT", 2_000)
        patch.setattr(service_limit, "LIGHT", 100)
        state = ClusterState.from_objects(objects)
    most = max(2_000, service_limit.WEIGHT_OF_ENDPOINT * endpoints)
    for mode in MODES:
        assert pieces(state, mode) <= 3 * most + 500, mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "objects",
    [
        [service(500, 500), *endpoint_slices(500, 1)],
        [service(500, 0, 500), *endpoint_slices(500, 1)],
        [service(300, 0, 1, 500), *endpoint_slices(300, 1)],
        [service(500), *endpoint_slices(500, 500)],
        [service(60, 60, node_ports=True), *endpoint_slices(60, 60)],
    ],
)
def test_the_product_of_any_numbers_is_within_the_limit(objects, mode):
    assert pieces(ClusterState.from_objects(objects), mode) <= MOST_WEIGHT


# ---- the agent's memory


class Bytes(Room):
    """Room for ``most`` bytes in all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.view = ClusterView(self)

    def carries(self, more: int, reserve: float = 0.0) -> bool:
        return self.view.size + more <= self.most


def test_the_weight_of_large_services_counts_as_bytes_and_that_of_others_does_not():
    view = ClusterView()
    view.apply(Batch("Service", [service(2, 0, 1, node_ports=True)], [], True))
    small = view.size
    view.apply(Batch("EndpointSlice", endpoint_slices(2, 30), [], True))
    assert not view.state.excess and small < view.size < 20_000
    view.apply(Batch("Service", [service(1000, 1000)], []))
    assert view.size > BYTES_OF_WEIGHT * view.state.excess > BYTES_OF_WEIGHT * 150_000
    view.apply(Batch("Service", [], [service(1)]))
    assert not view.state.excess and view.size < 20_000


@pytest.mark.parametrize("listed", [True, False])
def test_a_large_service_for_which_there_is_no_room_is_held_back(listed):
    view = Bytes(1_000_000).view
    view.apply(Batch("Service", [service(1), service(2, name="other", ip="10.96.0.2")], [], True))
    view.apply(Batch("Service", [service(1000, 1000), service(3, name="other", ip="10.96.0.2")], [], listed))
    assert [key.name for key in view.held_back] == ["web"] and not view.state.excess and not view.state.skipped
    assert [len(item.ports) for item in view.state.services.values()] == [1, 3]


def test_endpoints_that_make_a_service_too_large_are_held_back():
    view = Bytes(200_000).view
    view.apply(Batch("Service", [service(100, 10)], [], True))
    view.apply(Batch("EndpointSlice", endpoint_slices(100, 100), [], True))
    assert [key.kind for key in view.held_back] == ["EndpointSlice"] and not view.state.slices


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
