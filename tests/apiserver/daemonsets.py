# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A DaemonSet controller for the test API server's store: it creates and deletes pods by the labels of nodes."""

from __future__ import annotations

from typing import Any

from .store import Store

Object = dict[str, Any]
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def kube_proxy_daemon_set(**pod_spec: Any) -> Object:
    """Return kube-proxy's DaemonSet as kubeadm creates it, with the fields that tests read."""
    labels = {"k8s-app": "kube-proxy"}
    spec = {"nodeSelector": {"kubernetes.io/os": "linux"}, "hostNetwork": True, **pod_spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"namespace": "kube-system", "name": "kube-proxy", "generation": 1},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
            "updateStrategy": {"type": "RollingUpdate"},
        },
        "status": {},
    }


def _expression_fits(expression: Object, labels: dict[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or []
    answers = {
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
    }
    return answers[expression["operator"]]


def fits(pod_spec: Object, node: Object) -> bool:
    """Report whether a pod of this specification belongs on the node, by node selector and required node affinity."""
    labels = {"kubernetes.io/os": "linux", **(node["metadata"].get("labels") or {})}
    if any(labels.get(key) != value for key, value in (pod_spec.get("nodeSelector") or {}).items()):
        return False
    required = ((pod_spec.get("affinity") or {}).get("nodeAffinity") or {}).get(_REQUIRED)
    if required is None:
        return True
    return any(
        term.get("matchExpressions") and all(_expression_fits(item, labels) for item in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
    )


def nodes_with_pods(store: Store) -> list[str]:
    """Return the names of the Nodes with a pod of a DaemonSet, the only pods that there are."""
    return [pod["spec"]["nodeName"] for pod in store.list("/api/v1/pods")[0]]


def nodes_with_label(store: Store, label: str) -> list[str]:
    """Return the names of the Nodes that have a label of this key."""
    nodes = store.list("/api/v1/nodes")[0]
    return [node["metadata"]["name"] for node in nodes if label in (node["metadata"].get("labels") or {})]


class DaemonSetController:
    """Call it with the store after each change. ``ready``: whether new pods become ready.

    ``lingering``: mark a pod as being deleted instead of deleting it, like one whose kubelet is away.
    """

    def __init__(self) -> None:
        self.ready = True
        self.lingering = False

    def __call__(self, store: Store) -> None:
        """Make and delete the pods of every DaemonSet."""
        nodes = store.list("/api/v1/nodes")[0]
        for daemon_set in store.list("/apis/apps/v1/daemonsets")[0]:
            template = daemon_set["spec"]["template"]
            wanted = [node["metadata"]["name"] for node in nodes if fits(template["spec"], node)]
            self._adjust(store, daemon_set, wanted)
            generation = daemon_set["metadata"].get("generation", 1)
            status = {
                "observedGeneration": generation,
                "desiredNumberScheduled": len(wanted),
                "updatedNumberScheduled": len(wanted),
                "numberAvailable": len(wanted) if self.ready else 0,
            }
            if daemon_set.get("status") != status:
                store.put({**daemon_set, "status": status})

    def _adjust(self, store: Store, daemon_set: Object, wanted: list[str]) -> None:
        name, namespace = daemon_set["metadata"]["name"], daemon_set["metadata"]["namespace"]
        labels = daemon_set["spec"]["template"]["metadata"]["labels"]
        pods = {
            pod["spec"]["nodeName"]: pod
            for pod in store.list("/api/v1/pods")[0]
            if pod["metadata"]["namespace"] == namespace and (pod["metadata"].get("labels") or {}) == labels
        }
        for node, pod in pods.items():
            if node in wanted:
                continue
            if self.lingering:
                store.put({**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
            else:
                store.delete("Pod", namespace, pod["metadata"]["name"])
        for node in wanted:
            if node not in pods:
                conditions = [{"type": "Ready", "status": "True" if self.ready else "False"}]
                store.put(
                    {
                        "apiVersion": "v1",
                        "kind": "Pod",
                        "metadata": {"namespace": namespace, "name": f"{name}-{node}", "labels": dict(labels)},
                        "spec": {"nodeName": node},
                        "status": {"phase": "Running", "conditions": conditions},
                    }
                )
