# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster of a scenario: two pods on every node, and Services of every kind that nodes serve.

| Service | addresses | endpoints |
|---|---|---|
| web | ClusterIP 10.96.0.10, TCP 80, UDP and TCP 53 | the first pod of every node |
| front | ClusterIP 10.96.0.20, NodePort 30080 | all pods |
| edge | ClusterIP 10.96.0.30, LoadBalancer 198.51.100.20, NodePort 30090 | the first pod of every node |
| edge-local | the same with externalTrafficPolicy Local, 198.51.100.21, 30091, health check 32000 | pod-1-2 |
| sticky | ClusterIP 10.96.0.40, session affinity | all pods |
| empty | ClusterIP 10.96.0.50 | none |
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Sequence

from tests.lab import manifests
from tests.lab.manifests import Object
from tests.lab.topology import FABRIC, LabNode

NAMESPACE = "shop"
PORTS = (("http", "TCP", 80, 8080),)
DNS = ("dns", "UDP", 53, 5300)
#: The pods wait for a query on this port, so that a connection can be kept open.
DNS_TCP = ("dns-tcp", "TCP", 53, 53)


def pods(node: LabNode) -> list[str]:
    """Return the addresses of a node's pods."""
    return [f"10.244.{node.number}.{last}" for last in (2, 3)]


def service(name: str, address: str, kind: str = "ClusterIP", ports: Sequence[Any] = PORTS, **more: Any) -> Object:
    """Return a Service. ``node_port`` is that of its first port, ``ingress`` its load balancer's address."""
    node_port, ingress = more.pop("node_port", 0), more.pop("ingress", None)
    listed = [
        manifests.port(number, name=port, protocol=protocol, targetPort=target)
        for port, protocol, number, target in ports
    ]
    if node_port:
        listed[0]["nodePort"] = node_port
    own: Object = {"namespace": NAMESPACE, "metadata": {"uid": f"uid-{name}"}}
    return manifests.service(name, address, listed, ingress=[ingress] if ingress else [], type=kind, **own, **more)


def endpoint_slice(name: str, places: dict[str, str], ports: Sequence[Any] = PORTS) -> Object:
    """Return the ready endpoints of a Service: node names by pod address."""
    endpoints = [
        manifests.endpoint(
            address,
            node,
            conditions={"ready": True, "serving": True, "terminating": False},
            targetRef={"kind": "Pod", "namespace": NAMESPACE, "name": pod_name(address)},
        )
        for address, node in places.items()
    ]
    listed = [manifests.port(target, name=port, protocol=protocol) for port, protocol, _number, target in ports]
    return manifests.endpoint_slice(name, endpoints, listed, namespace=NAMESPACE, metadata={"uid": f"uid-{name}-1"})


def pod_name(address: str) -> str:
    """Return the name with which a pod answers: its node's number and its own, as in pod-1-2."""
    return "pod-" + "-".join(address.split(".")[2:])


def _node(node: LabNode) -> Object:
    return manifests.node(node.name, node.address, node.pods, metadata={"uid": f"uid-{node.name}"})


def cluster(nodes: Sequence[LabNode]) -> Object:
    """Return a List like the output of ``kubectl get services,endpointslices,nodes -A -o json``."""
    every = {address: node.name for node in nodes for address in pods(node)}
    first = {pods(node)[0]: node.name for node in nodes}
    local = {pods(nodes[0])[0]: nodes[0].name}
    both = (*PORTS, DNS, DNS_TCP)
    local_policy: Object = {"externalTrafficPolicy": "Local", "healthCheckNodePort": 32000}
    sticky: Object = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
    balanced: Object = {"kind": "LoadBalancer"}
    items = [
        *(_node(node) for node in nodes),
        service("web", "10.96.0.10", ports=both),
        endpoint_slice("web", first, both),
        service("front", "10.96.0.20", "NodePort", node_port=30080),
        endpoint_slice("front", every),
        service("edge", "10.96.0.30", node_port=30090, ingress="198.51.100.20", **balanced),
        endpoint_slice("edge", first),
        service("edge-local", "10.96.0.31", node_port=30091, ingress="198.51.100.21", **balanced, **local_policy),
        endpoint_slice("edge-local", local),
        service("sticky", "10.96.0.40", **sticky),
        endpoint_slice("sticky", every),
        service("empty", "10.96.0.50"),
    ]
    return {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1000"}, "items": items}


def save(path: Path, document: Object) -> None:
    """Write the document atomically: a reader sees the old or the new one, never a part."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    partial.rename(path)


#: The address at which nodes reach the API server.
API_SERVER = (FABRIC, 6443)
