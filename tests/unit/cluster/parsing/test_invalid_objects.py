# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of invalid objects: what is refused or skipped, with the text of a refusal; no input raises an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import Refusal
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import EndpointSlice, Node, Service
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import parse_object
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from tests.campaigns import examples
from tests.unit.cluster.parsing.raw_objects import SERVICE_CIDR, endpoint_slice, node, service, with_ingress

PORT = {"name": "http", "port": 80}
HOSTILE = 'web"\n-A KUBE-SERVICES -j ACCEPT'


def renamed(raw: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {**raw, "metadata": {**raw["metadata"], **metadata}}


@pytest.mark.parametrize(
    ("raw", "field", "reason"),
    [
        (renamed(service(), name=HOSTILE), "metadata.name", "is not a DNS label"),
        (renamed(service(), name="web\n"), "metadata.name", "is not a DNS label"),
        (renamed(service(), name="a" * 64), "metadata.name", "is not a DNS label"),
        (renamed(service(), name=None), "metadata.name", "is missing"),
        (renamed(service(), namespace="Shop"), "metadata.namespace", "is not a DNS label"),
        (renamed(service(), labels=["x"]), "metadata.labels", "a list is not an object"),
        ({**service(), "metadata": "x"}, "metadata", "is not an object"),
        ({**service(), "spec": []}, "spec", "a list is not an object"),
        ({**service(), "status": {"loadBalancer": {"ingress": {}}}}, "status.loadBalancer.ingress", "is not a list"),
        (service(type="Cluster"), "spec.type", "is not one of"),
        (service(clusterIP="10.96.0.300", clusterIPs=...), "spec.clusterIP", '"10.96.0.300" is not an IP address'),
        (service(clusterIP=7), "spec.clusterIP", "7 is not a string"),
        (service(clusterIPs="10.96.0.10"), "spec.clusterIPs", "is not a list"),
        (service(clusterIPs=["10.96.0.11"]), "spec.clusterIPs[0]", "differs from spec.clusterIP 10.96.0.10"),
        (service(ipFamilies=["IPv6", "IPv4"]), "spec.clusterIPs[0]", "is not of the family IPv6"),
        (service(ipFamilies=["IPv4", "IPv4"]), "spec.ipFamilies", "names one IP family twice"),
        (service(ipFamilies=["IPv5"]), "spec.ipFamilies[0]", "is not IPv4 or IPv6"),
        (service(clusterIP="127.0.0.1", clusterIPs=..., ipFamilies=...), "spec.clusterIPs[0]", "is a loopback address"),
        (service(clusterIPs=["10.96.0.10", "fe80::a"]), "spec.clusterIPs[1]", "is a link-local address"),
        (service(ports="80"), "spec.ports", '"80" is not a list'),
        (service(ports=[80]), "spec.ports[0]", "80 is not an object"),
        (service(ports=[{}]), "spec.ports[0].port", "is missing"),
        (service(ports=[{"port": 0}]), "spec.ports[0].port", "0 is not between 1 and 65535"),
        (service(ports=[{"port": 65536}]), "spec.ports[0].port", "65536 is not between"),
        (service(ports=[{"port": "80"}]), "spec.ports[0].port", "is not an integer"),
        (service(ports=[{"port": True}]), "spec.ports[0].port", "true is not an integer"),
        (service(ports=[{"port": 80.0}]), "spec.ports[0].port", "is not an integer"),
        (service(ports=[{"port": 80, "nodePort": -1}]), "spec.ports[0].nodePort", "-1 is not between"),
        (service(ports=[{"port": 80, "protocol": "tcp"}]), "spec.ports[0].protocol", "is not TCP, UDP or SCTP"),
        (service(ports=[{"port": 80, "name": HOSTILE}]), "spec.ports[0].name", "is not a DNS label"),
        (service(ports=[PORT, {"name": "http", "port": 81}]), "spec.ports[1].name", "is the name of an earlier port"),
        (service(ports=[PORT, {"port": 81}, {"port": 82}]), "spec.ports[2].name", "several ports need names"),
        (
            service(ports=[PORT, {"name": "b", "port": 80}]),
            "spec.ports[1].port",
            "80/TCP is already used by an earlier",
        ),
        (
            service(ports=[{**PORT, "nodePort": 30000}, {"name": "b", "port": 81, "nodePort": 30000}]),
            "spec.ports[1].nodePort",
            "30000/TCP is the node port of an earlier port",
        ),
        (service(externalIPs="192.0.2.1"), "spec.externalIPs", "is not a list"),
        (service(loadBalancerSourceRanges=[None, {}]), "spec.loadBalancerSourceRanges[1]", "is not a string"),
        (
            service(sessionAffinityConfig={"clientIP": {"timeoutSeconds": 0}}),
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
            "0 is not between 1 and 86400",
        ),
        (service(sessionAffinityConfig=[]), "spec.sessionAffinityConfig", "a list is not an object"),
        (service(healthCheckNodePort=70000), "spec.healthCheckNodePort", "is not between"),
        (service(externalTrafficPolicy=3), "spec.externalTrafficPolicy", "is not a string"),
        (
            renamed(endpoint_slice(), labels={"kubernetes.io/service-name": HOSTILE}),
            "metadata.labels[kubernetes.io/service-name]",
            "is not a DNS label",
        ),
        (renamed(endpoint_slice(), annotations="x"), "metadata.annotations", "is not an object"),
        (endpoint_slice(addressType=["IPv4"]), "addressType", "a list is not IPv4, IPv6 or FQDN"),
        (endpoint_slice(ports=[{"name": HOSTILE, "port": 80}]), "ports[0].name", "is not a DNS label"),
        (endpoint_slice(ports=[{"name": "x", "port": 65536}]), "ports[0].port", "is not between 0 and 65535"),
        (endpoint_slice(endpoints="x"), "endpoints", "is not a list"),
        ({**endpoint_slice(), "apiVersion": "discovery.k8s.io/v1beta1"}, "apiVersion", "is not discovery.k8s.io/v1"),
        ({**SERVICE_CIDR, "spec": {"cidrs": [None]}}, "spec.cidrs[0]", "is not a CIDR"),
        ({"metadata": {"name": "x"}}, "kind", "is missing"),
        ({"kind": ["Service"]}, "kind", "a list is not a string"),
        ("Service", "", "is not an object"),
        (None, "", "null is not an object"),
    ],
)
def test_invalid_objects_are_refused_with_field_and_reason(raw, field, reason):
    refusal = parse_object(raw)
    assert isinstance(refusal, Refusal), refusal
    assert refusal.field == field
    assert reason in refusal.reason


GOOD_ENDPOINT = {"addresses": ["10.244.1.6"]}


@pytest.mark.parametrize(
    ("raw", "field", "reason"),
    [
        (with_ingress({"ip": "224.0.0.1"}), "status.loadBalancer.ingress[0].ip", "is a link-local multicast address"),
        (with_ingress({"ip": "ff12::5"}), "status.loadBalancer.ingress[0].ip", "is a link-local multicast address"),
        (with_ingress({"ip": "0.0.0.0"}), "status.loadBalancer.ingress[0].ip", "is the unspecified address"),
        (with_ingress({"ip": "255.255.255.255"}), "status.loadBalancer.ingress[0].ip", "is the broadcast address"),
        (with_ingress("x"), "status.loadBalancer.ingress[0]", "is not an object"),
        (with_ingress({"ip": 4}), "status.loadBalancer.ingress[0].ip", "4 is not a string"),
        (service(externalIPs=[4, "192.0.2.7"]), "spec.externalIPs[0]", "4 is not a string"),
        (service(externalIPs=["fe80::1", "192.0.2.7"]), "spec.externalIPs[0]", "is a link-local address"),
        (service(externalIPs=["127.0.0.1", "192.0.2.7"]), "spec.externalIPs[0]", "is a loopback address"),
        *(
            (endpoint_slice(endpoints=[bad, GOOD_ENDPOINT]), field, reason)
            for bad, field, reason in (
                ("x", "endpoints[0]", "is not an object"),
                ({"addresses": "10.0.0.1"}, "endpoints[0].addresses", "is not a list"),
                ({"addresses": ["fd00::1"]}, "endpoints[0].addresses[0]", "not of the addressType"),
                ({"addresses": ["127.0.0.1"]}, "endpoints[0].addresses[0]", "a loopback address"),
                ({"addresses": ["224.0.0.9"]}, "endpoints[0].addresses[0]", "a link-local multicast address"),
                ({"addresses": ["169.254.169.254"]}, "endpoints[0].addresses[0]", "a link-local address"),
                ({"addresses": ["10.0.0.1; reboot"]}, "endpoints[0].addresses[0]", "is not an IP address"),
                (
                    {"addresses": ["10.0.0.1"], "conditions": {"ready": "true"}},
                    "endpoints[0].conditions.ready",
                    "is not true or false",
                ),
                ({"addresses": ["10.0.0.1"], "nodeName": 1}, "endpoints[0].nodeName", "1 is not a string"),
                ({"addresses": ["10.0.0.1"], "hints": {"forZones": "a"}}, "endpoints[0].hints.forZones", "not a list"),
            )
        ),
        (
            node(addresses=[{"type": "InternalIP", "address": "x"}, {"type": "InternalIP", "address": "172.18.0.2"}]),
            "status.addresses[0].address",
            "not an IP address",
        ),
        ({**node(), "spec": {"podCIDRs": ["10.0.0.0", "10.244.1.0/24"]}}, "spec.podCIDRs[0]", "is not a CIDR"),
    ],
)
def test_an_invalid_part_is_skipped_alone(raw, field, reason):
    skipped: list[Refusal] = []
    parsed = parse_object(raw, skipped)
    assert not isinstance(parsed, Refusal), parsed
    assert [part.field for part in skipped] == [field] and reason in skipped[0].reason
    if isinstance(parsed, Service):
        assert parsed.cluster_ip_v4 == "10.96.0.10" and "198.51.100.4" in parsed.load_balancer_ips
        assert "192.0.2.7" in parsed.external_ips
    elif isinstance(parsed, EndpointSlice):
        assert [endpoint.address for endpoint in parsed.endpoints] == ["10.244.1.6"]
    else:
        assert isinstance(parsed, Node)
        assert parsed.internal_ips == ("172.18.0.2",) and parsed.pod_cidrs == ("10.244.1.0/24",)
    again: list[Refusal] = []
    assert parse_object(prune(raw), again) == parsed and again == skipped


def test_a_refusal_is_one_printable_line():
    refusal = parse_object(renamed(service(), name="a\x1b[31m\n\r" + "b" * 1000))
    text = str(refusal)
    assert text.startswith("Service shop/a?[31m ") and text.isprintable() and len(text) < 600
    assert str(parse_object(3)) == "object (without a name): 3 is not an object"


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**70, 2**90),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["10.0.0.1", "fd00::1", "IPv4", "IPv6", "None", "ClientIP", "10.0.0.0/8", "TCP", "Local"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def positions(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += positions(item, (*path, key))
    return found


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_no_damage_raises_and_pruning_changes_no_outcome(data):
    raw = copy.deepcopy(data.draw(st.sampled_from([service(), endpoint_slice(), node(), SERVICE_CIDR])))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(positions(raw)))
        target = raw
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = data.draw(JSON)
        if not isinstance(raw, dict):
            break
    skipped: list[Refusal] = []
    outcome = parse_object(raw, skipped)
    if isinstance(outcome, Refusal):
        assert str(outcome).isprintable()
    assert all(str(part).isprintable() for part in skipped)
    again: list[Refusal] = []
    # Without ``node_labels``, only the labels of a Node that have a meaning for its own agent are kept.
    assert parse_object(prune(raw, node_labels=True), again) == outcome and again == skipped


@given(JSON)
def test_any_value_gives_a_refusal_or_nothing(raw):
    outcome = parse_object(raw)
    assert outcome is None or isinstance(outcome, Refusal)
