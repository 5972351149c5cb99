# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Service ports of whole Services: attributes, policies, families, expansion of slices, order."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo, ServicePortName
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import (
    NodeContext,
    all_service_ports,
    service_ports_of,
)

V4 = NodeContext(IPV4, "node-a")
V6 = NodeContext(IPV6, "node-a")


def service(name: str = "web", ingress: Any = (), **spec: Any) -> dict[str, Any]:
    values = {"clusterIP": "10.96.0.10", "ports": [{"name": "http", "port": 80}], **spec}
    return {
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": name},
        "spec": values,
        "status": {"loadBalancer": {"ingress": list(ingress)}},
    }


def endpoint_slice(
    *endpoints: Any, name: str = "web-1", owner: str = "web", family: str = IPV4, ports: Any = None
) -> dict[str, Any]:
    items = [item if isinstance(item, dict) else {"addresses": [item], "nodeName": "node-b"} for item in endpoints]
    return {
        "kind": "EndpointSlice",
        "metadata": {"namespace": "shop", "name": name, "labels": {"kubernetes.io/service-name": owner}},
        "addressType": family,
        "ports": ports or [{"name": "http", "port": 8080}],
        "endpoints": items,
    }


def local(address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "nodeName": "node-a", "conditions": conditions}


def routes(*objects: Any, context: NodeContext = V4) -> list[ServicePortInfo]:
    state = ClusterState.from_objects(objects)
    assert not state.refusals
    return list(all_service_ports(state, context).values())


def only(*objects: Any, context: NodeContext = V4) -> ServicePortInfo:
    (route,) = routes(*objects, context=context)
    return route


def texts(endpoints: Any) -> list[str]:
    return [item.text for item in endpoints]


def test_a_plain_service():
    route = only(service(), endpoint_slice("10.0.1.1", local("10.0.1.10"), "10.0.1.2"))
    assert route.key == ServicePortName("shop", "web", "http", "TCP")
    assert (str(route.key), route.protocol) == ("shop/web:http", "tcp")
    assert (route.cluster_ip, route.port, route.node_port) == ("10.96.0.10", 80, 0)
    assert texts(route.endpoints) == ["10.0.1.10:8080", "10.0.1.1:8080", "10.0.1.2:8080"], "in the order of the text"
    assert route.cluster is route.endpoints and route.reachable == route.cluster and route.local == ()
    assert [item.is_local for item in route.endpoints] == [True, False, False]
    assert route.has_any and route.uses_cluster_endpoints and not route.uses_local_endpoints
    assert not route.externally_accessible


@pytest.mark.parametrize(
    "spec",
    [
        {"clusterIP": "None"},
        {"clusterIP": ""},
        {"type": "ExternalName"},
        {"ports": []},
        {"clusterIP": "fd00::1"},
        {"clusterIP": "fd00::1", "clusterIPs": ["fd00::1"], "ipFamilies": ["IPv6"]},
    ],
)
def test_services_without_anything_for_the_family(spec):
    assert routes(service(**spec)) == []


def test_a_dual_stack_service_has_only_addresses_of_the_family():
    raw = service(
        "web",
        [{"ip": "198.51.100.4"}, {"ip": "2001:db8::4"}],
        clusterIP="10.96.0.10",
        clusterIPs=["10.96.0.10", "fd00:96::a"],
        ipFamilies=["IPv4", "IPv6"],
        type="LoadBalancer",
        externalIPs=["192.0.2.1", "2001:db8::1"],
        loadBalancerSourceRanges=["203.0.113.0/24", "2001:db8:1::/48"],
    )
    slices = [endpoint_slice("10.0.0.1"), endpoint_slice("fd00::1", name="web-2", family=IPV6)]
    v4, v6 = only(raw, *slices), only(raw, *slices, context=V6)
    assert (v4.cluster_ip, v4.external_ips, v4.load_balancer_ips, v4.source_ranges, texts(v4.cluster)) == (
        "10.96.0.10",
        ("192.0.2.1",),
        ("198.51.100.4",),
        ("203.0.113.0/24",),
        ["10.0.0.1:8080"],
    )
    assert (v6.cluster_ip, v6.external_ips, v6.load_balancer_ips, v6.source_ranges, texts(v6.cluster)) == (
        "fd00:96::a",
        ("2001:db8::1",),
        ("2001:db8::4",),
        ("2001:db8:1::/48",),
        ["[fd00::1]:8080"],
    )


@pytest.mark.parametrize(
    ("ranges", "v4", "v6"),
    [
        ([], None, None),
        (["192.168.0.0/24", " 203.0.113.0/25"], ("192.168.0.0/24", "203.0.113.0/25"), None),
        (["192.168.0.0/24", "0.0.0.0/0"], None, None),
        (["192.168.0.0/24", "::/0"], ("192.168.0.0/24",), None),
        (["junk"], None, None),
        (["0.0.0.0/0", "fd00::/8"], None, ("fd00::/8",)),
    ],
)
def test_source_ranges(ranges, v4, v6):
    raw = service(clusterIPs=["10.96.0.10", "fd00::a"], ipFamilies=["IPv4", "IPv6"], loadBalancerSourceRanges=ranges)
    assert only(raw).source_ranges == v4
    assert only(raw, context=V6).source_ranges == v6


@pytest.mark.parametrize(
    ("spec", "external_local", "uses_cluster", "uses_local", "accessible", "health"),
    [
        ({"type": "LoadBalancer", "nodePort": 30001}, True, True, True, True, 32000),
        ({"type": "LoadBalancer"}, True, True, False, False, 32000),
        ({"type": "NodePort", "nodePort": 30001}, True, True, True, True, 0),
        ({"type": "ClusterIP", "externalIPs": ["192.0.2.1"]}, True, True, True, True, 0),
        ({"type": "ClusterIP", "externalIPs": ["2001:db8::1"]}, True, True, False, False, 0),
        ({"type": "ClusterIP"}, False, True, False, False, 0),
        ({"type": "ClusterIP", "nodePort": 30001}, False, True, False, True, 0),
        ({"internalTrafficPolicy": "Local"}, False, False, True, False, 0),
        ({"internalTrafficPolicy": "Local", "type": "NodePort", "nodePort": 30001}, True, True, True, True, 0),
        ({"type": "LoadBalancer", "nodePort": 30001, "externalTrafficPolicy": "Cluster"}, False, True, False, True, 0),
    ],
)
def test_policies(spec, external_local, uses_cluster, uses_local, accessible, health):
    values = {"externalTrafficPolicy": "Local", "healthCheckNodePort": 32000, **spec}
    node_port = values.pop("nodePort", 0)
    route = only(service(ports=[{"name": "http", "port": 80, "nodePort": node_port}], **values))
    assert route.external_local is external_local
    assert route.uses_cluster_endpoints is uses_cluster
    assert route.uses_local_endpoints is uses_local
    assert route.externally_accessible is accessible
    assert route.health_check_node_port == health


def test_disallowed_external_ips_still_make_the_service_accessible():
    raw = service(externalIPs=["192.0.2.1"], externalTrafficPolicy="Local")
    route = only(raw, endpoint_slice(local("10.0.0.1"), "10.0.0.2"), context=V4._replace(allow_external_ips=False))
    assert route.external_ips == ()
    assert route.externally_accessible and route.external_local and texts(route.local) == ["10.0.0.1:8080"]


@pytest.mark.parametrize("kind", ["ClusterIP", "LoadBalancer"])
def test_load_balancer_addresses_do_not_depend_on_the_type(kind):
    raw = service("web", [{"ip": "198.51.100.4"}, {"ip": "198.51.100.5", "ipMode": "Proxy"}], type=kind)
    route = only(raw)
    assert route.load_balancer_ips == ("198.51.100.4",) and route.externally_accessible


def test_endpoints_belong_to_ports_by_name_and_protocol():
    ports = [
        {"name": "http", "port": 80},
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53},
        {"name": "none", "port": 99},
    ]
    slices = [
        endpoint_slice(
            "10.0.0.1", ports=[{"name": "http", "port": 8080}, {"name": "dns", "port": 5353, "protocol": "UDP"}]
        ),
        endpoint_slice("10.0.0.2", name="web-2", ports=[{"name": "http", "port": 9090}, {"name": "dns", "port": 1}]),
        endpoint_slice("10.0.0.3", name="web-3", ports=[{"name": "other", "port": 80}, {"name": "none"}]),
    ]
    table = routes(service(ports=ports), *slices)
    found = {(item.key.port_name, item.key.protocol): texts(item.endpoints) for item in table}
    assert found == {
        ("http", "TCP"): ["10.0.0.1:8080", "10.0.0.2:9090"],
        ("dns", "UDP"): ["10.0.0.1:5353"],
        ("dns-tcp", "TCP"): [],
        ("none", "TCP"): [],
    }


@pytest.mark.parametrize(
    ("sequence", "ready"),
    [
        ((False, True, False), True),
        ((True, False), True),
        ((False, True), True),
        ((False, False), False),
    ],
)
@pytest.mark.parametrize("spread", [False, True])
def test_a_running_pod_beats_a_terminating_one_of_the_same_address(sequence, ready, spread):
    items = [local("10.0.0.1", ready=is_ready, terminating=not is_ready) for is_ready in sequence]
    slices = (
        [endpoint_slice(item, name=f"web-{number}") for number, item in enumerate(items)]
        if spread
        else [endpoint_slice(*items)]
    )
    route = only(service(), *slices)
    assert [(item.text, item.ready) for item in route.endpoints] == [("10.0.0.1:8080", ready)]


def test_an_unnamed_node_has_no_local_endpoints():
    endpoint = {"addresses": ["10.0.0.1"], "nodeName": ""}
    route = only(service(), endpoint_slice(endpoint), context=V4._replace(node_name=""))
    assert not route.endpoints[0].is_local


def test_zone_and_hints_reach_the_selection():
    hinted = [
        {"addresses": [f"10.0.0.{number}"], "hints": {"forZones": [{"name": zone}]}}
        for number, zone in enumerate("aab", 1)
    ]
    route = only(service(), endpoint_slice(*hinted), context=V4._replace(zone="b"))
    assert texts(route.cluster) == ["10.0.0.3:8080"] and len(route.endpoints) == 3


def test_no_slices_and_slices_without_service():
    assert only(service()).has_any is False
    assert routes(endpoint_slice("10.0.0.1")) == []


def test_terminating_endpoints_of_local_traffic():
    raw = service("web", [{"ip": "1.2.3.4"}], type="LoadBalancer", externalTrafficPolicy="Local")
    stopping = {"ready": False, "serving": True, "terminating": True}
    gone = {"ready": False, "serving": False, "terminating": True}
    items = [local("10.0.0.2", **stopping), local("10.0.0.3", **stopping), local("10.0.0.4", **gone), "10.0.0.5"]
    route = only(raw, endpoint_slice(*items))
    assert texts(route.cluster) == ["10.0.0.5:8080"]
    assert texts(route.local) == ["10.0.0.2:8080", "10.0.0.3:8080"]
    assert texts(route.reachable) == ["10.0.0.2:8080", "10.0.0.3:8080", "10.0.0.5:8080"]


@settings(deadline=None)
@given(st.permutations(["b", "a", "c-d", "c"]), st.permutations(["z", "y", "x"]))
def test_order_of_input_does_not_matter(names, ports):
    objects = [service(name, ports=[{"name": port, "port": 80 + ord(port)} for port in ports]) for name in names]
    objects += [endpoint_slice("10.0.0.2", local("10.0.0.1"), name=f"{name}-s", owner=name) for name in names]
    state = ClusterState.from_objects(objects)
    table = all_service_ports(state, V4)
    assert list(table) == sorted(table)
    assert [key.port_name for key in table][:3] == ["x", "y", "z"]
    assert list(table.items()) == list(all_service_ports(ClusterState.from_objects(reversed(objects)), V4).items())
    key = NamespacedName("shop", "c")
    assert service_ports_of(state, key, V4) == tuple(route for name, route in table.items() if name.service == key)
    assert service_ports_of(state, NamespacedName("shop", "unknown"), V4) == ()


def seconds_of(count):
    """Return the processor time for parsing Services with five endpoints each, and for their ServicePorts."""
    objects = []
    for number in range(count):
        name, tail = f"web-{number}", f"{number >> 8}.{number & 255}"
        objects.append(service(name, clusterIP=f"10.96.{tail}"))
        objects.append(endpoint_slice(*[f"10.{pod}.{tail}" for pod in range(1, 6)], name=f"{name}-1", owner=name))
    started = time.process_time()
    state = ClusterState.from_objects(objects)
    parsed = time.process_time()
    table = all_service_ports(state, V4)
    assert len(table) == count and sum(len(port.endpoints) for port in table.values()) == 5 * count
    return parsed - started, time.process_time() - parsed


@pytest.fixture
def own_garbage_only():
    """Keep garbage collections from visiting what earlier tests of the same process have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_the_cost_of_many_services_is_linear(own_garbage_only):
    few = list(zip(*(seconds_of(500) for _attempt in range(3))))
    # Ten times the Services take about ten times as long; with quadratic cost it would be a hundred times in each
    # attempt. On a busy machine one says little, since other processes empty the processor's caches.
    tries = []
    for _attempt in range(3):
        tries.append([large / min(small) for large, small in zip(seconds_of(5000), few)])
        if max(tries[-1]) < 40:
            return
    raise AssertionError(f"5000 Services take these multiples of the time for 500: {tries}")


@pytest.mark.parametrize(
    ("ranges", "v4", "v6"),
    [
        ([], None, None),
        (["192.168.0.0/24"], ("192.168.0.0/24",), ()),
        (["0.0.0.0/0"], None, ()),
        (["0.0.0.0/0", "fd00::/8"], None, ("fd00::/8",)),
    ],
)
def test_corrected_source_ranges_hold_for_node_ports_and_for_both_families(ranges, v4, v6):
    raw = service(clusterIPs=["10.96.0.10", "fd00::a"], ipFamilies=["IPv4", "IPv6"], loadBalancerSourceRanges=ranges)
    found = [only(raw, context=context._replace(behaviour=CORRECTED)) for context in (V4, V6)]
    assert [info.source_ranges for info in found] == [v4, v6] == [info.node_port_sources for info in found]
    assert only(raw).node_port_sources is None
