# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""States of a few Services, and the packets that tell them apart."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import BEHAVIOURS
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo, ServicePortName
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports

NODE = "172.18.0.2"
#: The addresses of endpoints with the names of their nodes; ours is ``node1``.
PODS = (("10.244.1.1", "node1"), ("10.244.2.1", "node2"), ("10.244.1.2", "node1"))


class Feature(NamedTuple):
    """What distinguishes a Service, as parts of its specification. ``ip``: it has the address of a load balancer."""

    spec: Dict[str, Any]
    node_port: bool = False
    ip: bool = False
    external: bool = False
    port: int = 80
    protocol: str = "TCP"


_LOCAL = {"externalTrafficPolicy": "Local"}
_AFFINITY = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}}
FEATURES: Dict[str, Feature] = {
    "cluster": Feature({}),
    "node port": Feature({}, node_port=True),
    "external IP": Feature({}, external=True),
    "open": Feature({}, ip=True),
    "narrow": Feature({"loadBalancerSourceRanges": ["198.51.100.0/24"]}, ip=True),
    "wide": Feature({"loadBalancerSourceRanges": ["198.51.0.0/16"]}, ip=True),
    "internal local": Feature({"internalTrafficPolicy": "Local"}),
    "external local": Feature(_LOCAL, ip=True),
    "both local": Feature({**_LOCAL, "internalTrafficPolicy": "Local"}, ip=True),
    "narrow local": Feature({**_LOCAL, "loadBalancerSourceRanges": ["198.51.100.0/24"]}, ip=True),
    "affinity": Feature(_AFFINITY, node_port=True),
    "affinity local": Feature({**_AFFINITY, **_LOCAL}, ip=True),
    "other port": Feature({}, port=81),
    "UDP": Feature({}, protocol="UDP"),
}

#: A feature and the endpoints as a bit mask of :data:`PODS`; None without the Service.
One = Optional[Tuple[str, int]]
State = Tuple[One, ...]


def ones(masks: Tuple[int, ...] = tuple(range(8))) -> List[One]:
    """Return the states of one Service with these endpoints."""
    return [None, *itertools.product(FEATURES, masks)]


def _service(number: int, feature: Feature) -> Dict[str, Any]:
    port: Dict[str, Any] = {"name": "p", "port": feature.port, "targetPort": 8080, "protocol": feature.protocol}
    kind = "LoadBalancer" if feature.ip else "NodePort" if feature.node_port else "ClusterIP"
    if kind != "ClusterIP":
        port["nodePort"] = 30000 + number
    address = f"10.96.0.{number}"
    spec = {"type": kind, "clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv4"], "ports": [port]}
    if feature.external:
        spec["externalIPs"] = [f"203.0.113.{number}"]
    status = {"loadBalancer": {"ingress": [{"ip": f"198.18.0.{number}"}]}} if feature.ip else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "ns", "name": f"s{number}"},
        "spec": {**spec, **feature.spec},
        "status": status,
    }


def _slice(number: int, feature: Feature, mask: int) -> Dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {
            "namespace": "ns",
            "name": f"s{number}-a",
            "labels": {"kubernetes.io/service-name": f"s{number}"},
        },
        "ports": [{"name": "p", "port": 8080, "protocol": feature.protocol}],
        "endpoints": [
            {"addresses": [ip], "nodeName": node, "conditions": {"ready": True}}
            for bit, (ip, node) in enumerate(PODS)
            if mask >> bit & 1
        ],
    }


@cache
def service_ports(state: State, behaviour: str) -> Dict[ServicePortName, ServicePortInfo]:
    """Return the ServicePorts of a state on our node."""
    addresses = [{"type": "InternalIP", "address": NODE}]
    objects: List[Dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"}, "status": {"addresses": addresses}}
    ]
    for number, one in enumerate(state, 1):
        if one is not None:
            feature = FEATURES[one[0]]
            objects += [_service(number, feature), _slice(number, feature, one[1])]
    context = NodeContext("IPv4", "node1", behaviour=BEHAVIOURS[behaviour])
    return all_service_ports(ClusterState.from_objects(objects), context)


class Packet(NamedTuple):
    """The first packet of a connection."""

    source: str
    destination: str
    port: int
    protocol: str = "tcp"


def packets(services: int) -> List[Packet]:
    """Return packets of endpoints, other pods, the node, and clients inside and outside the source ranges."""
    sources = ("10.244.1.1", "10.244.1.9", "198.51.100.7", "198.51.7.7", "192.0.2.9", NODE)
    goals: List[Tuple[Any, ...]] = [("10.96.0.99", 80)]
    for number in range(1, services + 1):
        address = f"10.96.0.{number}"
        goals += [(address, 80), (address, 81), (address, 80, "udp"), (f"203.0.113.{number}", 80)]
        goals += [(f"198.18.0.{number}", 80), (NODE, 30000 + number)]
    return [Packet(source, *goal) for goal in goals for source in sources]
