# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fields of Service (core/v1) and EndpointSlice (discovery.k8s.io/v1), for manifests that no API server validates.

People write static Services by hand. The API server would refuse a misspelt field of such an object, or a value such as
``local`` of externalTrafficPolicy; the parser, made for objects that the API server has accepted, ignores both. The
fields are those of the API reference of Kubernetes 1.36, whether the proxy reads them or not.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Union

from ..fields import Invalid, address, cidr, shown, suggestion, text

Leaf = Callable[[object, str], object]
"""Checks a value; the second argument is the path of its field. Raises Invalid."""
Shape = Union[None, Leaf, Mapping[str, Any]]
"""What a value may be: anything (None), or an object with these fields (a mapping); of a list, each element."""

_NAME_CHARACTERS = 63


def _one_of(*values: str) -> Leaf:
    def check(value: object, field: str) -> None:
        if text(value, field) not in ("", *values):
            raise Invalid(field, f"{shown(value)} is not one of {', '.join(values)}")

    return check


def _fields(*names: str, **shapes: Shape) -> dict[str, Shape]:
    return {**dict.fromkeys(names), **shapes}


_OBJECT = _fields(
    "apiVersion",
    "kind",
    metadata=_fields(
        *("name", "generateName", "namespace", "labels", "annotations", "finalizers", "ownerReferences"),
        # Set by the API server, and therefore in the output of kubectl.
        *("uid", "resourceVersion", "generation", "selfLink", "managedFields"),
        *("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"),
    ),
)
_TRAFFIC_POLICY = _one_of("Cluster", "Local")
_PORT = ("name", "protocol", "port", "appProtocol")
_SERVICE = _fields(
    **_OBJECT,
    spec=_fields(
        *("type", "selector", "clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "externalName"),
        *("loadBalancerIP", "loadBalancerClass", "allocateLoadBalancerNodePorts", "healthCheckNodePort"),
        *("publishNotReadyAddresses", "trafficDistribution"),
        ports=_fields(*_PORT, "targetPort", "nodePort"),
        externalIPs=address,
        loadBalancerSourceRanges=lambda value, field: cidr(text(value, field).strip(), field),
        sessionAffinity=_one_of("None", "ClientIP"),
        sessionAffinityConfig=_fields(clientIP=_fields("timeoutSeconds")),
        externalTrafficPolicy=_TRAFFIC_POLICY,
        internalTrafficPolicy=_TRAFFIC_POLICY,
    ),
    status=_fields(
        "conditions",
        loadBalancer=_fields(ingress=_fields("hostname", "ports", ip=address, ipMode=_one_of("VIP", "Proxy"))),
    ),
)
_ENDPOINT = _fields(
    *("addresses", "hostname", "targetRef", "nodeName", "zone", "deprecatedTopology"),
    conditions=_fields("ready", "serving", "terminating"),
    hints=_fields(forZones=_fields("name"), forNodes=_fields("name")),
)
_KINDS: Mapping[str, Mapping[str, Shape]] = {
    "Service": _SERVICE,
    "EndpointSlice": _fields("addressType", "endpoints", **_OBJECT, ports=_fields(*_PORT)),
}


def check_fields(raw: dict[str, Any]) -> None:
    """Check the fields of a raw Service or EndpointSlice, except those of its endpoints. Raises Invalid for the first.

    Values of a wrong type are left to the parser.
    """
    _check(raw, _KINDS[raw["kind"]], "", f"is not a field of {raw['kind']}")


def check_endpoint_fields(raw: object, index: int) -> None:
    """Check the fields of one endpoint of a raw EndpointSlice. Raises Invalid for the first."""
    _check(raw, _ENDPOINT, f"endpoints[{index}]", "is not a field of EndpointSlice")


def _check(value: object, shape: Shape, field: str, unknown: str) -> None:
    if shape is None or value is None:
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, shape, f"{field}[{index}]", unknown)
    elif callable(shape):
        shape(value, field)
    elif isinstance(value, dict):
        for name, item in value.items():
            written = str(name)[:_NAME_CHARACTERS]
            path = f"{field}.{written}" if field else written
            if name not in shape:
                raise Invalid(path, unknown + suggestion(written, shape))
            _check(item, shape[name], path, unknown)
