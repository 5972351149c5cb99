# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of valid objects: what they become, and which are ignored."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster import fields
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import (
    EndpointSlice,
    Node,
    Service,
    ServiceCIDR,
    ServicePort,
    SliceEndpoint,
    SlicePort,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import parse_object
from tests.unit.cluster.parsing.raw_objects import SERVICE_CIDR, endpoint_slice, node, service, with_ingress


def test_a_whole_service():
    assert parse_object(service()) == Service(
        namespace="shop",
        name="web",
        type="LoadBalancer",
        cluster_ip_v4="10.96.0.10",
        cluster_ip_v6="fd00:96::a",
        ports=(ServicePort("http", "TCP", 80, 30080), ServicePort("dns", "UDP", 53)),
        external_ips=("192.0.2.7", "2001:db8::7"),
        has_external_ips=True,
        load_balancer_ips=("198.51.100.4", "2001:db8::5"),
        source_ranges=("203.0.113.0/25", "2001:db8::/32"),
        affinity_seconds=600,
        external_traffic_policy_local=True,
        internal_traffic_policy_local=False,
        health_check_node_port=32000,
    )


def test_defaults_of_the_api_server_are_filled_in():
    raw = {
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "web"},
        "spec": {"clusterIP": "172.30.0.041", "ports": [{"port": 80}], "sessionAffinity": "ClientIP"},
    }
    parsed = parse_object(raw)
    assert isinstance(parsed, Service)
    assert parsed.type == "ClusterIP" and parsed.cluster_ip_v4 == "172.30.0.41" and parsed.cluster_ip_v6 == ""
    assert parsed.ports == (ServicePort("", "TCP", 80, 0),) and parsed.affinity_seconds == 10800
    assert not parsed.has_external_ips


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"clusterIP": "fd00::1", "clusterIPs": ["fd00::1"], "ipFamilies": ["IPv6"]}, ("", "fd00::1")),
        (
            {"clusterIP": "fd00::1", "clusterIPs": ["fd00::1", "10.0.0.1"], "ipFamilies": ["IPv6", "IPv4"]},
            ("10.0.0.1", "fd00::1"),
        ),
        ({"clusterIP": "10.0.0.1", "clusterIPs": ..., "ipFamilies": ...}, ("10.0.0.1", "")),
        ({"clusterIP": "::ffff:10.0.0.1", "clusterIPs": ..., "ipFamilies": ...}, ("10.0.0.1", "")),
        ({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"], "ipFamilies": ["IPv4", "IPv6"]}, ("10.0.0.1", "")),
    ],
)
def test_cluster_ips_by_family(spec, expected):
    parsed = parse_object(service(**spec))
    assert isinstance(parsed, Service), parsed
    assert (parsed.cluster_ip_v4, parsed.cluster_ip_v6) == expected


@pytest.mark.parametrize(
    "raw",
    [
        service(clusterIP="None", clusterIPs=["None"]),
        service(clusterIP=""),
        service(clusterIP=...),
        service(type="ExternalName"),
        {
            **service(),
            "metadata": {
                "namespace": "shop",
                "name": "web",
                "labels": {"service.kubernetes.io/service-proxy-name": "x"},
            },
        },
        endpoint_slice(addressType="FQDN"),
        {**endpoint_slice(), "metadata": {"namespace": "shop", "name": "x"}},
        {
            **endpoint_slice(),
            "metadata": {
                "namespace": "shop",
                "name": "x",
                "labels": {"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""},
            },
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": 5}},
        {"apiVersion": "serving.knative.dev/v1", "kind": "Service", "metadata": {}},
    ],
)
def test_objects_that_are_not_served_are_ignored_silently(raw):
    assert parse_object(raw) is None


def test_a_whole_slice():
    assert parse_object(endpoint_slice()) == EndpointSlice(
        namespace="shop",
        name="web-abc.de",
        service_name="web",
        family="IPv4",
        ports=(SlicePort("http", "TCP", 8080),),
        endpoints=(SliceEndpoint("10.244.1.5", "node-a", True, True, False, ("a", "b"), ("node-a",)),),
    )


def test_conditions_have_independent_defaults():
    endpoints = [
        {"addresses": ["10.0.0.1"]},
        {"addresses": ["10.0.0.2"], "conditions": {"ready": False}},
        {"addresses": ["10.0.0.3"], "conditions": {"ready": False, "serving": False, "terminating": True}},
        {"addresses": ["10.0.0.4"], "conditions": {"ready": None, "serving": None, "terminating": None}},
        {"addresses": []},
        {"addresses": None},
    ]
    parsed = parse_object(endpoint_slice(endpoints=endpoints))
    assert isinstance(parsed, EndpointSlice)
    assert [(item.ready, item.serving, item.terminating) for item in parsed.endpoints] == [
        (True, True, False),
        (False, True, False),
        (False, False, True),
        (True, True, False),
    ]


@pytest.mark.parametrize("empty", [None, []])
def test_null_lists_of_a_slice(empty):
    parsed = parse_object(endpoint_slice(ports=empty, endpoints=empty))
    assert isinstance(parsed, EndpointSlice) and parsed.ports == () and parsed.endpoints == ()


def test_ports_without_a_number_are_dropped():
    ports = [{"name": "a"}, {"name": "b", "port": 0}, {"port": 80}]
    parsed = parse_object(endpoint_slice(ports=ports))
    assert isinstance(parsed, EndpointSlice) and parsed.ports == (SlicePort("", "TCP", 80),)


def test_node_and_service_cidr():
    assert parse_object(node()) == Node(
        "node-a",
        ("172.18.0.2",),
        ("192.0.2.1",),
        ("10.244.1.0/24",),
        "a",
        ("ToBeDeletedByClusterAutoscaler",),
        True,
        "host-a",
        labels={"topology.kubernetes.io/zone": "a", "kubernetes.io/hostname": "host-a"},
    )
    assert parse_object(SERVICE_CIDR) == ServiceCIDR("kubernetes", ("10.96.0.0/16", "fd00:96::/112"))


def test_objects_that_the_api_server_accepts_are_served():
    """Only multicast addresses of link-local scope are forbidden."""
    parsed = parse_object(service(externalIPs=["239.1.1.1", "ff0e::1", "240.0.0.1"]))
    assert isinstance(parsed, Service) and parsed.external_ips == ("239.1.1.1", "ff0e::1", "240.0.0.1")
    parsed = parse_object(service(clusterIP="169.254.9.10", clusterIPs=["169.254.9.10", "fd00:96::a"]))
    assert isinstance(parsed, Service) and (parsed.cluster_ip_v4, parsed.cluster_ip_v6) == (
        "169.254.9.10",
        "fd00:96::a",
    )
    parsed = parse_object(endpoint_slice(endpoints=[{"addresses": ["239.1.1.1"]}]))
    assert isinstance(parsed, EndpointSlice) and len(parsed.endpoints) == 1
    # Names may begin with a digit (KEP-5311).
    parsed = parse_object({**service(), "metadata": {"namespace": "shop", "name": "1st"}})
    assert isinstance(parsed, Service) and parsed.name == "1st"
    parsed = parse_object(with_ingress({"ip": "127.0.0.1"}, {"ip": "169.254.0.9"}))
    assert isinstance(parsed, Service) and parsed.load_balancer_ips == ("127.0.0.1", "169.254.0.9", "198.51.100.4")


def test_huge_values_are_read_without_an_error():
    endpoints = [{"addresses": [f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}"]} for i in range(1, 20001)]
    ports = [{"name": f"p{i}", "port": i} for i in range(1, 3001)]
    parsed = parse_object(endpoint_slice(endpoints=endpoints, ports=ports))
    assert isinstance(parsed, EndpointSlice) and len(parsed.endpoints) == 20000 and len(parsed.ports) == 3000


def test_texts_of_pods_are_not_kept_for_ever(monkeypatch):
    """Python 3.12 does not free interned strings, and each Job has pods with labels of its own."""
    port = {"name": "http", "containerPort": 80}
    pod = {
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": "job", "labels": {"controller-uid": "1"}},
        "spec": {"nodeName": "n1", "containers": [{"ports": [port]}]},
    }
    namespace = {"kind": "Namespace", "metadata": {"name": "shop", "labels": {"a": "b"}}}
    interned = []
    with monkeypatch.context() as patched:
        patched.setattr(fields, "_INTERNED_ARE_FREED", False)
        patched.setattr("sys.intern", lambda text: interned.append(text) or text)
        found = [parse_object(pod), parse_object(namespace)]
    assert [item.labels for item in found] == [{"controller-uid": "1"}, {"a": "b"}] and not interned
