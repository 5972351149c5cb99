# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kubernetes objects of small clusters, as an API server shows them: Services, EndpointSlices and Nodes."""

from __future__ import annotations

from typing import Any, Iterable, Optional, Sequence, Union

Object = dict[str, Any]


def port(number: int, *, name: str = "", protocol: str = "TCP", **more: Any) -> Object:
    """Return a port of a Service or an EndpointSlice. ``more``: further fields, such as ``nodePort``."""
    return {"name": name, "protocol": protocol, "port": number, **more}


def service(
    name: str,
    addresses: Union[str, Sequence[str]],
    ports: Iterable[Object],
    *,
    namespace: str = "default",
    ingress: Sequence[str] = (),
    metadata: Optional[Object] = None,
    **spec: Any,
) -> Object:
    """Return a Service of type ClusterIP unless ``spec`` says otherwise.

    ``addresses``: its cluster IP, or one of each family. ``ingress``: the addresses of its load balancer.
    ``metadata`` and ``spec``: further fields of these.
    """
    cluster_ips = [addresses] if isinstance(addresses, str) else list(addresses)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, **(metadata or {})},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": cluster_ips[0],
            "clusterIPs": cluster_ips,
            "ipFamilies": [_family(address) for address in cluster_ips],
            "ports": list(ports),
            **spec,
        },
        "status": {"loadBalancer": {"ingress": [{"ip": address} for address in ingress]} if ingress else {}},
    }


def endpoint(address: str, node: str = "", *, ready: bool = True, **more: Any) -> Object:
    """Return an endpoint of an EndpointSlice, on a node if one is named. ``more``: further fields."""
    place = {"nodeName": node} if node else {}
    return {"addresses": [address], "conditions": {"ready": ready}, **place, **more}


def endpoint_slice(
    owner: str,
    endpoints: Iterable[Object],
    ports: Iterable[Object],
    *,
    name: str = "",
    namespace: str = "default",
    metadata: Optional[Object] = None,
) -> Object:
    """Return an EndpointSlice of the Service ``owner``, in the family of its first endpoint; IPv4 if it has none.

    ``name``: its name, by default that of the Service with ``-1``. ``metadata``: further fields of the metadata.
    """
    listed: list[Object] = list(endpoints)
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name or f"{owner}-1",
            "namespace": namespace,
            "labels": {"kubernetes.io/service-name": owner},
            **(metadata or {}),
        },
        "addressType": _family(listed[0]["addresses"][0]) if listed else "IPv4",
        "ports": list(ports),
        "endpoints": listed,
    }


def api_servers(addresses: Iterable[str], number: int) -> Object:
    """Return the EndpointSlice by which a cluster names its API servers, at this port."""
    return endpoint_slice(
        "kubernetes",
        [endpoint(address) for address in addresses],
        [{"name": "https", "protocol": "TCP", "port": number}],
        name="kubernetes",
    )


def node(name: str, address: str, pods: str, *, metadata: Optional[Object] = None, **more: Any) -> Object:
    """Return a Node with one internal address and one range of pod addresses. ``more``: further fields."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}, **(metadata or {})},
        "spec": {"podCIDR": pods, "podCIDRs": [pods]},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
        **more,
    }


def _family(address: str) -> str:
    return "IPv6" if ":" in address else "IPv4"
