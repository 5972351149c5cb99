# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node command in this process, and a Service for it to explain."""

from __future__ import annotations

import io

from ansible_collections.kubenode.proxy.plugins.module_utils.command import cli

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"namespace": "shop", "name": "web"},
    "spec": {
        "type": "LoadBalancer",
        "clusterIP": "10.96.0.7",
        "clusterIPs": ["10.96.0.7"],
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080}],
        "externalTrafficPolicy": "Local",
    },
    "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.7"}]}},
}
ENDPOINTS = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {"namespace": "shop", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
    "addressType": "IPv4",
    "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
    "endpoints": [
        {"addresses": ["10.244.1.5"], "nodeName": "node1", "conditions": {"ready": True}},
        {"addresses": ["10.244.2.5"], "nodeName": "node2", "conditions": {"ready": True}},
        {"addresses": ["10.244.2.6"], "nodeName": "node2", "conditions": {"ready": False}},
        {
            "addresses": ["10.244.2.7"],
            "nodeName": "node2",
            "conditions": {"ready": False, "serving": True, "terminating": True},
        },
    ],
}
#: What an agent answers to ``status``.
STATUS = {
    "agent": "running",
    "uptimeSeconds": 40.0,
    "healthy": True,
    "node": "node1",
    "mode": "nftables",
    "modeReason": "set in the configuration",
    "behaviour": "kube-proxy",
    "apiServer": {},
    "families": {},
    "syncs": 1,
    "driftRepaired": 0,
    "lastError": "",
    "refused": [],
}


def run(*words):
    output, errors = io.StringIO(), io.StringIO()
    code = cli.main(list(words), cli.Streams(output, errors))
    return code, output.getvalue(), errors.getvalue()
