# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kubernetes objects as the lab needs them: plain JSON, in lists."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import yaml

Object = dict[str, Any]
# libyaml is ten times as fast, if PyYAML was built with it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_PASSING = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")
_SOME_TIME = "2026-01-01T00:00:00Z"


class ResourceType(NamedTuple):
    """Where the API serves a kind."""

    api_version: str
    plural: str
    namespaced: bool

    @property
    def base(self) -> str:
        """The path of its API group and version."""
        return "/api/v1" if self.api_version == "v1" else "/apis/" + self.api_version


RESOURCES = {
    "Namespace": ResourceType("v1", "namespaces", False),
    "Node": ResourceType("v1", "nodes", False),
    "Service": ResourceType("v1", "services", True),
    "EndpointSlice": ResourceType("discovery.k8s.io/v1", "endpointslices", True),
    "ServiceCIDR": ResourceType("networking.k8s.io/v1", "servicecidrs", False),
}
SNAPSHOT_KINDS = ("Node", "ServiceCIDR", "Service", "EndpointSlice")


class ObjectKey(NamedTuple):
    """The identity of an object; *namespace* is empty for objects of the cluster."""

    kind: str
    namespace: str
    name: str


def key_of(item: Mapping[str, Any]) -> ObjectKey:
    """Return the key of an object."""
    return ObjectKey(item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"])


def load_yaml(path: str) -> list[Any]:
    """Return the documents of a YAML file, without empty ones."""
    with open(path, encoding="utf-8") as file:
        return [document for document in yaml.load_all(file, Loader=_Loader) if document]


def flatten(items: Iterable[Object] | None) -> list[Object]:
    """Return the objects, each ``List`` replaced by its items."""
    flat: list[Object] = []
    for item in items or ():
        flat += flatten(item["items"]) if item.get("kind") == "List" else [item]
    return flat


def normalise(item: Object) -> Object:
    """Return a served object without, or with constant, fields that differ from one recording to the next."""
    item = copy.deepcopy(item)
    metadata = item["metadata"]
    for name in _PASSING:
        metadata.pop(name, None)
    digest = hashlib.sha256("/".join(key_of(item)).encode()).hexdigest()
    metadata["uid"] = "-".join((digest[:8], digest[8:12], "4" + digest[13:16], "8" + digest[17:20], digest[20:32]))
    metadata["creationTimestamp"] = _SOME_TIME
    for condition in (item.get("status") or {}).get("conditions") or []:
        if "lastTransitionTime" in condition:
            condition["lastTransitionTime"] = _SOME_TIME
    return item


def merge(base: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return *base* with *changes*: mappings merged at every depth, everything else replaced."""
    merged = copy.deepcopy(dict(base))
    for key, value in (changes or {}).items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def write_json(path: str, content: Any) -> None:
    """Write readable JSON with a newline at the end."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def write_snapshots(path: str, snapshots: Iterable[list[Object]]) -> None:
    """Write snapshots with one object in a line, so that their differences stay readable."""
    blocks = [
        " [\n" + ",\n".join("  " + json.dumps(item, separators=(",", ":")) for item in snapshot) + "\n ]"
        for snapshot in snapshots
    ]
    with open(path, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(blocks) + "\n]\n")
