# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A source of the cluster state without threads, and the copies on disk that it saves."""

from __future__ import annotations

import io
from types import SimpleNamespace

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.cluster_source import ClusterSource
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.disk_copy import DiskCopy
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import (
    CLUSTER_NETWORK_POLICIES,
    NAMESPACES,
    NETWORK_POLICIES,
    PODS,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import read_cache

NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"namespace": "d", "name": "kept"},
    "spec": {"clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"], "ports": [{"port": 80, "protocol": "TCP"}]},
}
KINDS = ("Service", "EndpointSlice", "Node", "ServiceCIDR")
POLICIES = (PODS, NAMESPACES, NETWORK_POLICIES, CLUSTER_NETWORK_POLICIES)
POLICY_KINDS = tuple(resource.kind for resource in POLICIES)
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "d", "name": "web"}}
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "d"}}
POLICY = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"namespace": "d", "name": "kept"},
    "spec": {"podSelector": {}},
}


class Bench:
    """A source whose threads never start, with a manual clock and a server that has one Node."""

    def __init__(self, path="", node_required=False):
        self.now = 1000.0
        self.started = []
        self.delivered = []
        self.text = io.StringIO()
        log = Log(self.text)
        self.source = ClusterSource(
            connect=self.connect,
            deliver=self.delivered.append,
            supervisor=SimpleNamespace(start=lambda name, *_body: self.started.append(name)),
            disk_copy=DiskCopy(str(path), log),
            log=log,
            node_required=lambda: node_required,
            clock=lambda: self.now,
        )

    def connect(self, expect, timeout=30.0):
        def items(_resource, selector, reduce):
            return SimpleNamespace(items=[reduce(NODE)] if selector == "metadata.name=n1" else [])

        return SimpleNamespace(list=items, close=lambda: None, interrupt=lambda: None)

    def reflector(self, kind):
        (found,) = [each for each in self.source.reflectors if each.resource.kind == kind]
        return found

    def list(self, *kinds):
        for kind in kinds:
            self.source.view.apply(Batch(kind, [], [], True))


def names(view, kind):
    return [(key.namespace, key.name) for key in view.keys(kind)]


def saved(path, *objects):
    """Save a cluster in which every kind is known and these are all objects, as an agent that follows policies does."""
    bench = Bench(path)
    bench.source.start("n1", serving=True, others=POLICIES)
    for item in objects:
        bench.source.view.apply(Batch(item["kind"], [item], []))
    bench.list(*KINDS, *POLICY_KINDS)
    bench.source.stop()
    return path


def kept_names(path):
    return {item["kind"]: item["metadata"]["name"] for item in read_cache(str(path))}
