# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fields and values of manifests that an API server would refuse, by object and field."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.manifest_fields import (
    check_endpoint_fields,
    check_fields,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing import prune
from tests.unit.cluster.static_objects import NAME, altered, endpoint_slice, refused, service


@pytest.mark.parametrize(
    ("path", "value", "field", "reason"),
    [
        ("sepc", {}, "sepc", "is not a field of Service; did you mean spec?"),
        ("metadata.lables", {}, "metadata.lables", "is not a field of Service; did you mean labels?"),
        ("metadata.annotation", {}, "metadata.annotation", "is not a field of Service; did you mean annotations?"),
        ("metadata.nmae", "a", "metadata.nmae", "is not a field of Service; did you mean name?"),
        ("spec.CLUSTERIP", "10.0.0.1", "spec.CLUSTERIP", "is not a field of Service; did you mean clusterIP?"),
        (
            "spec.sessionAfinity",
            "None",
            "spec.sessionAfinity",
            "is not a field of Service; did you mean sessionAffinity?",
        ),
        ("spec.xyz", 1, "spec.xyz", "is not a field of Service"),
        ("spec.ports.0.prot", "UDP", "spec.ports[0].prot", "is not a field of Service; did you mean port?"),
        (
            "spec.sessionAffinityConfig.clientIP.timeout",
            10,
            "spec.sessionAffinityConfig.clientIP.timeout",
            "is not a field of Service; did you mean timeoutSeconds?",
        ),
        ("spec.sessionAffinity", "clientIP", "spec.sessionAffinity", '"clientIP" is not one of None, ClientIP'),
        ("spec.externalTrafficPolicy", "local", "spec.externalTrafficPolicy", '"local" is not one of Cluster, Local'),
        ("spec.internalTrafficPolicy", True, "spec.internalTrafficPolicy", "true is not a string"),
        ("spec.externalIPs", ["10.0.0.1", "x"], "spec.externalIPs[1]", '"x" is not an IP address'),
        ("spec.loadBalancerSourceRanges", ["10.0.0"], "spec.loadBalancerSourceRanges[0]", '"10.0.0" is not a CIDR'),
        (
            "status.loadBalancer",
            {"ingress": [{"ip": "10.0.0.300"}]},
            "status.loadBalancer.ingress[0].ip",
            '"10.0.0.300" is not an IP address',
        ),
    ],
)
def test_fields_that_the_api_server_would_refuse_are_refused(path, value, field, reason):
    wrong = altered(service(), path, value)
    wrong["metadata"].setdefault("namespace", "static")
    assert refused(wrong) == [f"f.yaml: Service static/apiserver: {field}: {reason}"]
    assert parse_static({"f.yaml": [wrong]}).services == {}


@pytest.mark.parametrize(
    ("path", "value", "field", "reason"),
    [
        ("adressType", "IPv4", "adressType", "; did you mean addressType?"),
        ("ports.0.protocoll", "TCP", "ports[0].protocoll", "; did you mean protocol?"),
        ("metadata.lable", {}, "metadata.lable", "; did you mean labels?"),
        ("metadata." + "x" * 1000, {}, "metadata." + "x" * 63, ""),
    ],
)
def test_an_endpoint_slice_with_unknown_fields_is_refused(path, value, field, reason):
    wrong = altered(endpoint_slice(), path, value)
    assert refused(service(), wrong) == [
        f"f.yaml: EndpointSlice static/apiserver-1: {field}: is not a field of EndpointSlice{reason}"
    ]
    assert parse_static({"f.yaml": [service(), wrong]}).slices == {}


@pytest.mark.parametrize(
    ("path", "value", "field", "reason"),
    [
        ("condition", {"ready": False}, "condition", "; did you mean conditions?"),
        ("conditions", {"raedy": False}, "conditions.raedy", "; did you mean ready?"),
        ("hints", {"forZones": [{"zone": "a"}]}, "hints.forZones[0].zone", ""),
    ],
)
def test_only_the_endpoint_with_an_unknown_field_is_not_served(path, value, field, reason):
    slices = endpoint_slice()
    slices["endpoints"] = [{"addresses": ["192.0.2.11"], path: value}, {"addresses": ["192.0.2.12"]}, {}]
    found = parse_static({"f.yaml": [service(), slices]})
    assert list(map(str, found.refusals)) == [
        f"f.yaml: EndpointSlice static/apiserver-1: endpoints[0].{field}: is not a field of EndpointSlice{reason}",
        "f.yaml: EndpointSlice static/apiserver-1: endpoints[2].addresses: is missing",
    ]
    assert [endpoint.address for endpoint in found.slices[NAME]["apiserver-1"].endpoints] == ["192.0.2.12"]


def test_objects_as_kubectl_prints_them_are_accepted():
    """All fields that the API server sets or people write, with values of their types."""
    printed = service(labels={"app": "x"}, annotations={"a": "b"}, uid="1", resourceVersion="2", generation=1)
    printed["metadata"].update(creationTimestamp="2026-01-01T00:00:00Z", managedFields=[{"fieldsV1": {"f:spec": {}}}])
    printed["spec"].update(
        clusterIPs=["10.103.97.2"],
        ipFamilies=["IPv4"],
        ipFamilyPolicy="SingleStack",
        type="LoadBalancer",
        selector={"app": "x"},
        sessionAffinity="None",
        internalTrafficPolicy="Cluster",
        externalTrafficPolicy="Local",
        allocateLoadBalancerNodePorts=True,
        trafficDistribution="PreferSameZone",
        ports=[{"port": 6443, "targetPort": "https", "protocol": "TCP", "nodePort": 30001, "appProtocol": "https"}],
    )
    printed["status"] = {"loadBalancer": {"ingress": [{"ip": "198.51.100.1", "ipMode": "VIP"}]}, "conditions": []}
    slices = endpoint_slice()
    slices["metadata"].update(generateName="apiserver-", ownerReferences=[{"kind": "Service", "name": "apiserver"}])
    slices["endpoints"][0].update(
        conditions={"ready": True, "serving": True, "terminating": False},
        hints={"forZones": [{"name": "a"}], "forNodes": [{"name": "n"}]},
        nodeName="n",
        zone="a",
        hostname="h",
        targetRef={"kind": "Pod"},
    )
    found = parse_static({"f.yaml": [printed, slices]})
    assert found.refusals == () and list(found.services) == [NAME] and list(found.slices) == [NAME]


def test_every_field_that_the_proxy_reads_is_known():
    """A field that the parser learns to read must be added to the known ones."""
    for kind, shape in prune._SHAPES.items():
        if kind in ("Service", "EndpointSlice"):
            raw = {"kind": kind, **example(shape)}
            endpoints = raw.pop("endpoints", {})
            check_fields(raw)
            check_endpoint_fields(endpoints, 0)


def example(shape):
    """Return an object with all fields of a shape, without values."""
    return {name: None if below is True else example(below) for name, below in shape.items()}
