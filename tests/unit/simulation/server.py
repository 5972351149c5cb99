# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An API server in memory: objects with their history, lists and watches, and the faults of both."""

from __future__ import annotations

import copy
import random
from typing import Any, Callable, Iterator, NamedTuple, Optional

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.answers import WatchEvent
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ListResult
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.errors import (
    ApiStatusError,
    Expired,
    WatchFailed,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import ResourceType

Object = dict[str, Any]
#: Kind, namespace and name.
Key = tuple[str, str, str]


def key_of(item: Object) -> Key:
    metadata = item["metadata"]
    return item["kind"], metadata.get("namespace", ""), metadata["name"]


class Entry(NamedTuple):
    """A change in the history. ``type``: that of the event; ``state``: all objects after it."""

    version: int
    type: str
    item: Object
    state: dict[Key, Object]


class ApiServer:
    """Objects with their history, of which ``compacted`` versions are forgotten.

    ``chosen``: decides about faults. ``is_down``: no request is answered. ``trouble``: the share of requests that fail.
    ``changed``: called with the kind of each change.
    """

    def __init__(self, chosen: random.Random, changed: Callable[[str], None]) -> None:
        self.chosen = chosen
        self.is_down = False
        self.trouble = 0.0
        self.compacted = 0
        self._changed = changed
        self._history = [Entry(1, "", {}, {})]

    @property
    def version(self) -> int:
        return self._history[-1].version

    @property
    def objects(self) -> dict[Key, Object]:
        return self._history[-1].state

    def put(self, item: Object) -> None:
        """Create or replace an object; nothing happens if it is the same."""
        key, before = key_of(item), self.objects.get(key_of(item))
        version = self.version + 1
        made = copy.deepcopy(item)
        made["metadata"] = {"creationTimestamp": "2026-01-01T00:00:00Z", **made["metadata"]}
        if before is not None and {**before, "metadata": {**before["metadata"], "resourceVersion": ""}} == {
            **made, "metadata": {**made["metadata"], "resourceVersion": ""}
        }:  # fmt: skip
            return
        made["metadata"]["resourceVersion"] = str(version)
        self._add(Entry(version, "MODIFIED" if before else "ADDED", made, {**self.objects, key: made}))

    def delete(self, key: Key) -> None:
        """Delete an object, if there is one."""
        if key in self.objects:
            rest = {other: item for other, item in self.objects.items() if other != key}
            version = self.version + 1
            metadata = {**self.objects[key]["metadata"], "resourceVersion": str(version)}
            self._add(Entry(version, "DELETED", {**self.objects[key], "metadata": metadata}, rest))

    def _add(self, entry: Entry) -> None:
        self._history.append(entry)
        self._changed(entry.item["kind"])

    def compact(self) -> None:
        """Forget the history up to now, as etcd does."""
        self.compacted = self.version

    def at(self, version: int) -> dict[Key, Object]:
        """Return the objects at a version."""
        return next(entry.state for entry in reversed(self._history) if entry.version <= version)

    def since(self, version: int) -> list[Entry]:
        return [entry for entry in self._history if entry.version > version]

    def fails(self, share: float = 1.0) -> bool:
        """Return whether a request fails now."""
        return self.is_down or self.chosen.random() < self.trouble * share


class Client:
    """What a reflector uses of :class:`.ApiClient`."""

    host = "https://api.example"

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def close(self) -> None:
        pass

    interrupt = close

    def report(self, _error: Exception) -> bool:
        return False

    def list(
        self,
        resource: ResourceType,
        field_selector: str = "",
        resource_version: str = "",
        reduce: Callable[[Any], Any] = lambda item: item,
    ) -> ListResult:
        """List a collection, with a resourceVersion perhaps in an older state."""
        server = self._server
        if server.fails():
            raise server.chosen.choice([ApiError("list: no route to host"), ApiStatusError("list: failed", 503)])
        version = server.version
        if resource_version:
            version = server.chosen.choice([version, max(int(resource_version), server.compacted, version - 3, 1)])
        found = [item for item in server.at(version).values() if _selected(item, resource, field_selector)]
        reduced = (reduce(copy.deepcopy(item)) for item in found)
        return ListResult([item for item in reduced if item is not None], str(version))

    def watch(
        self, resource: ResourceType, resource_version: str, field_selector: str = "", timeout_seconds: int = 300
    ) -> Iterator[WatchEvent]:
        server, version = self._server, int(resource_version)
        if server.fails(0.5):
            raise ApiStatusError("watch: failed", server.chosen.choice([429, 503]))
        if version < server.compacted:
            raise Expired("watch: too old", 410)
        return self._events(resource, version, field_selector)

    def _events(self, resource: ResourceType, version: int, field_selector: str) -> Iterator[WatchEvent]:
        server = self._server
        for entry in server.since(version):
            if server.fails(0.2):
                raise server.chosen.choice([ApiError("watch: reset"), WatchFailed("watch: ERROR", 500)])
            version = entry.version
            if _selected(entry.item, resource, field_selector):
                yield WatchEvent(entry.type, copy.deepcopy(entry.item))
        yield WatchEvent("BOOKMARK", {"kind": resource.kind, "metadata": {"resourceVersion": str(version)}})


def _selected(item: Object, resource: ResourceType, field_selector: str) -> bool:
    metadata = item["metadata"]
    _base, inside, rest = resource.path.partition("/namespaces/")
    namespace: Optional[str] = rest.split("/")[0] if inside and resource.kind != "Namespace" else None
    wanted = dict(part.split("=", 1) for part in resource.label_selector.split(",") if "=" in part)
    labels = metadata.get("labels", {})
    return (
        item["kind"] == resource.kind
        and namespace in (None, metadata.get("namespace"))
        and all(labels.get(label) == value for label, value in wanted.items())
        and field_selector in ("", f"metadata.name={metadata['name']}")
    )
