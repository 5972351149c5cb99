# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A large cluster, printed as ``kubectl get services,endpointslices,nodes -A -o json`` prints one."""

from __future__ import annotations

import json
from ipaddress import IPv4Address
from typing import Any

NODES = 20
NAMESPACES = 40
_CREATED = "2026-01-07T08:15:30Z"
_PODS = IPv4Address("10.128.0.0")
_CLUSTER_IPS = IPv4Address("10.96.0.10")
_FIRST_NODE_PORT = 30000
_NODE_PORTS = 2768


def node_name(number: int) -> str:
    """Return the name of a node of the cluster, counted from 0."""
    return f"node-{number % NODES:02}"


def _metadata(name: str, namespace: str = "", **more: Any) -> dict[str, Any]:
    metadata = {"creationTimestamp": _CREATED, "name": name, "resourceVersion": "48151623", **more}
    metadata["uid"] = f"6b7c1f0e-0000-4000-8000-{abs(hash((namespace, name))) % 16**12:012x}"
    if namespace:
        metadata["namespace"] = namespace
    return metadata


def _node(number: int) -> dict[str, Any]:
    name = node_name(number)
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "topology.kubernetes.io/zone": "abc"[number % 3],
    }
    addresses = [
        {"address": str(IPv4Address("192.0.2.10") + number), "type": "InternalIP"},
        {"address": name, "type": "Hostname"},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": _metadata(name, labels=labels),
        "spec": {"podCIDR": f"10.{128 + number}.0.0/16", "podCIDRs": [f"10.{128 + number}.0.0/16"]},
        "status": {"addresses": addresses, "capacity": {"cpu": "16", "memory": "65536Mi", "pods": "110"}},
    }


def _ports(number: int, kind: str) -> list[dict[str, Any]]:
    ports: list[dict[str, Any]] = [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080}]
    if number % 10 == 7:
        ports = [
            {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 5353},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP", "targetPort": 5353},
        ]
    if kind != "ClusterIP":
        for offset, port in enumerate(ports):
            port["nodePort"] = _FIRST_NODE_PORT + (number + offset) % _NODE_PORTS
    return ports


def _service(number: int, name: str, namespace: str) -> dict[str, Any]:
    kind = {3: "NodePort", 11: "LoadBalancer"}.get(number % 20, "ClusterIP")
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "Helm"}
    spec: dict[str, Any] = {
        "clusterIP": str(_CLUSTER_IPS + number),
        "clusterIPs": [str(_CLUSTER_IPS + number)],
        "internalTrafficPolicy": "Cluster",
        "ipFamilies": ["IPv4"],
        "ipFamilyPolicy": "SingleStack",
        "ports": _ports(number, kind),
        "selector": {"app.kubernetes.io/name": name},
        "sessionAffinity": "None",
        "type": kind,
    }
    status: dict[str, Any] = {"loadBalancer": {}}
    if kind != "ClusterIP":
        spec["externalTrafficPolicy"] = "Cluster"
    if kind == "LoadBalancer":
        spec["allocateLoadBalancerNodePorts"] = True
        if number % 40 == 11:
            spec["loadBalancerSourceRanges"] = ["198.51.100.0/24", "203.0.113.0/24"]
        status["loadBalancer"] = {"ingress": [{"ip": str(IPv4Address("172.20.0.1") + number), "ipMode": "VIP"}]}
    if number % 25 == 6:
        spec["sessionAffinity"] = "ClientIP"
        spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": 10800}}
    metadata = _metadata(name, namespace, annotations={"meta.helm.sh/release-name": name}, labels=labels)
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec, "status": status}


def _endpoint(number: int, name: str, namespace: str) -> dict[str, Any]:
    node = number % NODES
    pod = f"{name}-{number % 65536:x}"
    return {
        "addresses": [str(_PODS + (node << 16) + 2 + number // NODES)],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "nodeName": node_name(node),
        "targetRef": {"kind": "Pod", "name": pod, "namespace": namespace, "uid": _metadata(pod, namespace)["uid"]},
        "zone": "abc"[node % 3],
    }


def _slice(number: int, name: str, namespace: str, endpoints: int, service: dict[str, Any]) -> dict[str, Any]:
    ports = [
        {"name": port["name"], "port": port["targetPort"], "protocol": port["protocol"]}
        for port in service["spec"]["ports"]
    ]
    labels = {
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
        "kubernetes.io/service-name": name,
    }
    owner = {
        "apiVersion": "v1",
        "blockOwnerDeletion": True,
        "controller": True,
        "kind": "Service",
        "name": name,
        "uid": service["metadata"]["uid"],
    }
    annotations = {"endpoints.kubernetes.io/last-change-trigger-time": _CREATED}
    return {
        "addressType": "IPv4",
        "apiVersion": "discovery.k8s.io/v1",
        "endpoints": [_endpoint(number * endpoints + one, name, namespace) for one in range(endpoints)],
        "kind": "EndpointSlice",
        "metadata": _metadata(
            f"{name}-x7k2p",
            namespace,
            annotations=annotations,
            generateName=f"{name}-",
            generation=3,
            labels=labels,
            ownerReferences=[owner],
        ),
        "ports": ports,
    }


def large_cluster(services: int, endpoints: int) -> list[dict[str, Any]]:
    """Return that many Services with that many endpoints each, and 20 nodes, as raw objects.

    Of 20 Services one is a NodePort, one a LoadBalancer (half of them with source ranges), of 25 one has client
    affinity, of 10 one is UDP and TCP on one port.
    """
    objects = []
    slices = []
    for number in range(services):
        name, namespace = f"service-{number:05}", f"team-{number % NAMESPACES:02}"
        service = _service(number, name, namespace)
        objects.append(service)
        slices.append(_slice(number, name, namespace, endpoints, service))
    return [*objects, *slices, *(_node(number) for number in range(NODES))]


def printed(objects: list[dict[str, Any]]) -> str:
    """Return the text that kubectl prints for these objects."""
    listed = {"apiVersion": "v1", "items": objects, "kind": "List", "metadata": {"resourceVersion": ""}}
    return json.dumps(listed, indent=4) + "\n"
