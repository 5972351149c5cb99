# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects of the test API server with their history: lists are consistent and watches can start anywhere."""

from __future__ import annotations

import builtins
import copy
import threading
from typing import Any, NamedTuple, Optional

Object = dict[str, Any]
ObjectKey = tuple[str, str]


class Kind(NamedTuple):
    """A kind of object: the path of its collection (all namespaces), its group version and kind name."""

    path: str
    api_version: str
    kind: str
    namespaced: bool = True
    #: Other group versions in which the server has the collection, too.
    others: tuple[str, ...] = ()

    @property
    def plural(self) -> str:
        """The kind's name in paths."""
        return self.path.rsplit("/", 1)[-1]


KINDS = {
    kind.path: kind
    for kind in (
        Kind("/api/v1/services", "v1", "Service"),
        Kind("/api/v1/nodes", "v1", "Node", namespaced=False),
        Kind("/api/v1/namespaces", "v1", "Namespace", namespaced=False),
        Kind("/api/v1/pods", "v1", "Pod"),
        Kind("/api/v1/configmaps", "v1", "ConfigMap"),
        Kind("/apis/apps/v1/daemonsets", "apps/v1", "DaemonSet"),
        Kind("/apis/discovery.k8s.io/v1/endpointslices", "discovery.k8s.io/v1", "EndpointSlice"),
        Kind("/apis/networking.k8s.io/v1/servicecidrs", "networking.k8s.io/v1", "ServiceCIDR", namespaced=False),
        Kind("/apis/networking.k8s.io/v1/networkpolicies", "networking.k8s.io/v1", "NetworkPolicy"),
        Kind("/apis/events.k8s.io/v1/events", "events.k8s.io/v1", "Event"),
        Kind(
            "/apis/policy.networking.k8s.io/v1alpha2/clusternetworkpolicies",
            "policy.networking.k8s.io/v1alpha2",
            "ClusterNetworkPolicy",
            namespaced=False,
            others=("policy.networking.k8s.io/v1beta1",),
        ),
    )
}
#: Every collection by the path at which it is served: some at several, in each version as objects of that version.
SERVED = {
    kind.path.replace(kind.api_version, version): kind._replace(api_version=version)
    for kind in KINDS.values()
    for version in (kind.api_version, *kind.others)
}
PATH_OF_KIND = {kind.kind: kind.path for kind in KINDS.values()}


class Event(NamedTuple):
    """One write: the object before (None if new) and after it (None if deleted, then with its last version)."""

    resource_version: int
    before: Optional[Object]
    after: Optional[Object]


class Compacted(Exception):
    """The requested resourceVersion is older than the kept history; ``oldest`` is the first that can be served."""

    def __init__(self, oldest: int) -> None:
        super().__init__(oldest)
        self.oldest = oldest


class Store:
    """Objects by collection; every write gets the next resourceVersion. Safe to use from several threads."""

    def __init__(self, first_resource_version: int = 1) -> None:
        self.changed = threading.Condition()
        self.resource_version = first_resource_version
        self._compacted = 0
        self._current: dict[str, dict[ObjectKey, Object]] = {path: {} for path in KINDS}
        self._events: dict[str, list[Event]] = {path: [] for path in KINDS}

    @staticmethod
    def _key(item: Object) -> ObjectKey:
        metadata = item["metadata"]
        return metadata.get("namespace") or "", metadata["name"]

    def put(self, item: Object) -> Object:
        """Create or replace an object; returns it as stored, with its new resourceVersion."""
        path = PATH_OF_KIND[item["kind"]]
        with self.changed:
            self.resource_version += 1
            stored = copy.deepcopy(item)
            stored["metadata"]["resourceVersion"] = str(self.resource_version)
            key = self._key(stored)
            self._events[path].append(Event(self.resource_version, self._current[path].get(key), stored))
            self._current[path][key] = stored
            self.changed.notify_all()
            return stored

    def restore(self, items: builtins.list[Object], resource_version: int) -> None:
        """Store objects with their own resourceVersions, like a server that starts from its database."""
        with self.changed:
            for item in items:
                self._current[PATH_OF_KIND[item["kind"]]][self._key(item)] = copy.deepcopy(item)
            self.resource_version = self._compacted = resource_version
            self.changed.notify_all()

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object. Raises KeyError if it does not exist."""
        path = PATH_OF_KIND[kind]
        with self.changed:
            before = self._current[path].pop((namespace, name))
            self.resource_version += 1
            self._events[path].append(Event(self.resource_version, before, None))
            self.changed.notify_all()

    def replace_all(self, items: builtins.list[Object]) -> None:
        """Make the store hold exactly these objects; only real differences become events.

        Deletions come first, then the other changes in the order of ``items``.
        """
        wanted = {(PATH_OF_KIND[item["kind"]], self._key(item)): item for item in items}
        with self.changed:
            for path, kind in KINDS.items():
                for namespace, name in list(self._current[path]):
                    if (path, (namespace, name)) not in wanted:
                        self.delete(kind.kind, namespace, name)
            for (path, key), item in wanted.items():
                if _content(self._current[path].get(key)) != _content(item):
                    self.put(item)

    def compact(self, resource_version: Optional[int] = None) -> None:
        """Forget history up to a resourceVersion (default: all); older watches and continue tokens get 410."""
        with self.changed:
            self._compacted = self.resource_version if resource_version is None else resource_version
            for path in KINDS:
                self._events[path] = [event for event in self._events[path] if event.resource_version > self._compacted]
            self.changed.notify_all()

    def list(self, path: str, at: Optional[int] = None) -> tuple[builtins.list[Object], int]:
        """Return the objects of a collection in key order, now or as of a resourceVersion. Raises Compacted."""
        with self.changed:
            objects = dict(self._current[path])
            version = self.resource_version if at is None else at
            if version < self._compacted:
                raise Compacted(self._compacted)
            for event in reversed(self._events[path]):
                if event.resource_version <= version:
                    break
                key = self._key(event.after or event.before or {})
                if event.before is None:
                    objects.pop(key, None)
                else:
                    objects[key] = event.before
            return [objects[key] for key in sorted(objects)], version

    def events(self, path: str, after: int) -> builtins.list[Event]:
        """Return the writes to a collection after a resourceVersion. Raises Compacted."""
        with self.changed:
            if after < self._compacted:
                raise Compacted(self._compacted)
            log = self._events[path]
            first = len(log)
            while first and log[first - 1].resource_version > after:
                first -= 1
            return log[first:]


def _content(item: Optional[Object]) -> Optional[Object]:
    if item is None:
        return None
    metadata = {key: value for key, value in item["metadata"].items() if key != "resourceVersion"}
    return {**item, "metadata": metadata}
