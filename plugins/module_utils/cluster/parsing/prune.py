# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reduction of raw objects to the fields that the proxy reads, so that snapshots are small and rarely change."""

from __future__ import annotations

from typing import Any, Callable, Mapping

from .health_check import ANNOTATIONS
from .objects import HOSTNAME_LABEL, ZONE_LABEL
from .service import (
    HEADLESS_LABEL,
    NODE_LOCAL_LABEL,
    OUTSIDE_HOSTS_LABEL,
    SERVICE_NAME_LABEL,
    SERVICE_PROXY_NAME_LABEL,
    TRIGGER_TIME_ANNOTATION,
)
from .service_policy import SERVICE_ANNOTATIONS
from .weight import CILIUM_WEIGHT, WEIGHT

_METADATA = {"namespace": True, "name": True}
_CONTAINER_PORTS = {"name": True, "protocol": True, "containerPort": True}

#: The parts of a value to keep: True keeps all of it; a mapping only these fields, in each element of a list.
_SHAPES: dict[str, Mapping[str, Any]] = {
    "Service": {
        "metadata": {
            **_METADATA,
            "labels": dict.fromkeys((SERVICE_PROXY_NAME_LABEL, OUTSIDE_HOSTS_LABEL, NODE_LOCAL_LABEL), True),
            "annotations": dict.fromkeys((*ANNOTATIONS, *SERVICE_ANNOTATIONS), True),
            "creationTimestamp": True,
        },
        "spec": {
            "type": True,
            "clusterIP": True,
            "clusterIPs": True,
            "ipFamilies": True,
            "ports": {"name": True, "protocol": True, "port": True, "nodePort": True},
            "externalIPs": True,
            "loadBalancerSourceRanges": True,
            "sessionAffinity": True,
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": True}},
            "externalTrafficPolicy": True,
            "internalTrafficPolicy": True,
            "healthCheckNodePort": True,
        },
        "status": {"loadBalancer": {"ingress": {"ip": True, "ipMode": True}}},
    },
    "EndpointSlice": {
        "metadata": {
            **_METADATA,
            "labels": {SERVICE_NAME_LABEL: True, HEADLESS_LABEL: True},
            "annotations": {TRIGGER_TIME_ANNOTATION: True, WEIGHT: True, CILIUM_WEIGHT: True},
        },
        "addressType": True,
        "ports": {"name": True, "protocol": True, "port": True},
        "endpoints": {
            "addresses": True,
            "conditions": {"ready": True, "serving": True, "terminating": True},
            "nodeName": True,
            "hints": {"forZones": {"name": True}, "forNodes": {"name": True}},
        },
    },
    "Node": {
        "metadata": {
            **_METADATA,
            "labels": {ZONE_LABEL: True, HOSTNAME_LABEL: True},
            "annotations": {WEIGHT: True},
            "deletionTimestamp": True,
        },
        "spec": {"podCIDR": True, "podCIDRs": True, "taints": {"key": True}},
        "status": {"addresses": {"type": True, "address": True}},
    },
    "ServiceCIDR": {"metadata": _METADATA, "spec": {"cidrs": True}},
    "Pod": {
        "metadata": {**_METADATA, "uid": True, "labels": True, "creationTimestamp": True, "deletionTimestamp": True},
        "spec": {
            "nodeName": True,
            "hostNetwork": True,
            "containers": {"ports": _CONTAINER_PORTS},
            "initContainers": {"restartPolicy": True, "ports": _CONTAINER_PORTS},
        },
        "status": {"phase": True, "podIP": True, "podIPs": {"ip": True}},
    },
    "Namespace": {"metadata": {"name": True, "labels": True, "deletionTimestamp": True}},
    "NetworkPolicy": {"metadata": _METADATA, "spec": True},
    "ClusterNetworkPolicy": {"metadata": {"name": True}, "spec": True},
}


Reduce = Callable[[Any], Any]


def _reducer(shape: Mapping[str, Any]) -> Reduce:
    """Return the function that keeps the fields of a shape; it is built once, since it is called for each endpoint."""
    if all(below is True for below in shape.values()):
        return _flat_reducer(tuple(shape))
    fields = tuple((name, None if below is True else _reducer(below)) for name, below in shape.items())

    # Keep empty objects and null: in place of a list or an annotation, they are errors that the parser must find.
    def reduce(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {}
            for name, below in fields:
                if name in value:
                    kept[name] = value[name] if below is None else below(value[name])
            return kept
        return [reduce(item) for item in value] if isinstance(value, list) else value

    return reduce


def _flat_reducer(names: tuple[str, ...]) -> Reduce:
    """Return the function that keeps these fields; an object without others, like most conditions, is not copied."""
    every = frozenset(names)

    def reduce(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() <= every:
                return value
            kept = {}
            for name in names:
                if name in value:
                    kept[name] = value[name]
            return kept
        return [reduce(item) for item in value] if isinstance(value, list) else value

    return reduce


_NODE = _SHAPES["Node"]
_LABELLED_NODE = _reducer({**_NODE, "metadata": {**_NODE["metadata"], "labels": True}})
_REDUCERS: dict[str, Reduce] = {kind: _reducer(shape) for kind, shape in _SHAPES.items()}


def prune(raw: Any, node_labels: bool = False) -> Any:
    """Return a raw object with only the fields that the proxy reads; it shares parts with the original.

    It parses to the same value as the original, or is refused for the same reason. ``node_labels``: keep all labels of
    Nodes, which policies may select.
    """
    kind = raw.get("kind") if isinstance(raw, dict) else None
    reduce = _REDUCERS.get(kind) if isinstance(kind, str) else None
    if node_labels and kind == "Node":
        reduce = _LABELLED_NODE
    if reduce is None:
        return raw
    return {"apiVersion": raw.get("apiVersion"), "kind": kind, **reduce(raw)}
