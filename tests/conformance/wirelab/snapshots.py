# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects as the API serves them: recorded, or completed here for cases that were never recorded."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import sentinel
from .addressing import SERVICE_CIDR
from .objects import SNAPSHOT_KINDS, Object, ObjectKey, key_of, normalise

if TYPE_CHECKING:
    from .cases import Case


def snapshots_of(case: Case) -> list[list[Object]]:
    """Return one list of objects for each step of the case."""
    path = case.file("snapshots.json")
    if not os.path.exists(path):
        return completed(case)
    with open(path, encoding="utf-8") as file:
        snapshots: list[list[Object]] = json.load(file)
    return snapshots


def completed(case: Case) -> list[list[Object]]:
    """Return the objects that an API server would serve in each step of the case.

    Steps are applied and deleted in order, defaults filled in, the sentinel and the service CIDRs added.
    """
    cidrs: Object = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": [SERVICE_CIDR[family] for family in (4, 6)]},
    }
    current: dict[ObjectKey, Object] = {key_of(cidrs): normalise(cidrs)}
    snapshots = []
    for number, step in enumerate(case.steps):
        for text in step.delete:
            kind, _, rest = text.partition("/")
            namespace, _, name = rest.rpartition("/")
            del current[ObjectKey(kind, namespace, name)]
        added = sentinel.objects(number, case.families, case.zone_hint(number).zone)
        for item in [*step.apply, *added]:
            current[key_of(item)] = with_defaults(normalise(item))
        snapshots.append(
            sorted(copy.deepcopy(list(current.values())), key=lambda item: SNAPSHOT_KINDS.index(item["kind"]))
        )
    return snapshots


def with_defaults(item: Object) -> Object:
    """Return the object with the defaults of the API (k8s.io/api types of 1.36) filled in where it says nothing."""
    fill = _DEFAULTS.get(item["kind"])
    if fill:
        fill(item)
    return item


def _service(item: Object) -> None:
    spec = item["spec"]
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    if spec["sessionAffinity"] == "ClientIP":
        spec.setdefault("sessionAffinityConfig", {"clientIP": {"timeoutSeconds": 10800}})
    item.setdefault("status", {"loadBalancer": {}})
    if spec["type"] == "ExternalName":
        return
    spec.setdefault("internalTrafficPolicy", "Cluster")
    if spec["type"] in ("NodePort", "LoadBalancer") or spec.get("externalIPs"):
        spec.setdefault("externalTrafficPolicy", "Cluster")
    if spec["type"] == "LoadBalancer":
        spec.setdefault("allocateLoadBalancerNodePorts", True)
        for ingress in item["status"].get("loadBalancer", {}).get("ingress", []):
            if "ip" in ingress:
                ingress.setdefault("ipMode", "VIP")
    for port in spec.get("ports", []):
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])


def _endpoint_slice(item: Object) -> None:
    for port in item.get("ports") or []:
        port.setdefault("protocol", "TCP")
        port.setdefault("name", "")


_DEFAULTS: dict[str, Callable[[Object], None]] = {"Service": _service, "EndpointSlice": _endpoint_slice}
