# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Objects as an API server sends them, as input of the parser."""

from __future__ import annotations

from typing import Any


def service(**spec: Any) -> dict[str, Any]:
    values = {
        "type": "LoadBalancer",
        "clusterIP": "10.96.0.10",
        "clusterIPs": ["10.96.0.10", "fd00:96::a"],
        "ipFamilies": ["IPv4", "IPv6"],
        "ports": [
            {"name": "http", "protocol": "TCP", "port": 80, "targetPort": "web", "nodePort": 30080},
            {"name": "dns", "protocol": "UDP", "port": 53},
        ],
        "externalIPs": ["192.0.2.7", "", "not an address", "2001:db8::07", "192.0.2.7"],
        "loadBalancerSourceRanges": [" 203.0.113.000/025 ", "junk", "2001:db8::/32"],
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}},
        "externalTrafficPolicy": "Local",
        "internalTrafficPolicy": "Cluster",
        "healthCheckNodePort": 32000,
        **spec,
    }
    ingress = [{"ip": "198.51.100.4"}, {"hostname": "x"}, {"ip": "198.51.100.5", "ipMode": "Proxy"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "web", "managedFields": [{"manager": "x"}]},
        "spec": {key: value for key, value in values.items() if value is not ...},
        "status": {"loadBalancer": {"ingress": [*ingress, {"ip": "2001:db8::5", "ipMode": "VIP"}]}},
    }


def endpoint_slice(**fields: Any) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"namespace": "shop", "name": "web-abc.de", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [
            {
                "addresses": ["10.244.1.5", "ignored"],
                "conditions": {"ready": True},
                "nodeName": "node-a",
                "hints": {"forZones": [{"name": "a"}, {"name": "b"}], "forNodes": [{"name": "node-a"}]},
            }
        ],
        **fields,
    }


def node(**status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": "node-a",
            "labels": {"topology.kubernetes.io/zone": "a", "kubernetes.io/hostname": "host-a"},
            "deletionTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"podCIDRs": ["10.244.1.7/24"], "taints": [{"key": "ToBeDeletedByClusterAutoscaler"}]},
        "status": {
            "addresses": [
                {"type": "Hostname", "address": "node-a"},
                {"type": "ExternalIP", "address": "192.0.2.1"},
                {"type": "InternalIP", "address": "172.18.0.2"},
            ],
            **status,
        },
    }


SERVICE_CIDR = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "ServiceCIDR",
    "metadata": {"name": "kubernetes"},
    "spec": {"cidrs": ["10.96.0.0/16", "fd00:96::/112"]},
}


def with_ingress(*ingress: Any) -> dict[str, Any]:
    return {**service(), "status": {"loadBalancer": {"ingress": [*ingress, {"ip": "198.51.100.4"}]}}}
