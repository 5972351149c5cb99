# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writing single objects through the test API server: create, replace, delete, and what a real server refuses."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

from .store import KINDS, Kind, Object, Store

NAMESPACED = ("Service", "EndpointSlice", "Pod", "DaemonSet")

# An HTTP status and the body that goes with it.
Answer = Tuple[int, Object]


class Place(NamedTuple):
    """Where an object is, or with an empty name the collection of a namespace."""

    kind: Kind
    namespace: str
    name: str

    @property
    def plural(self) -> str:
        """What the kind is called in paths."""
        return self.kind.path.rsplit("/", 1)[-1]


def place_of(path: str) -> Optional[Place]:
    """What a path without query stands for; None if it is no place of a single object or of a namespace's objects."""
    for kind in KINDS.values():
        top, plural = kind.path.rsplit("/", 1)
        namespaced = kind.kind in NAMESPACED
        prefix = f"{top}/namespaces/" if namespaced else f"{top}/"
        if not path.startswith(prefix):
            continue
        words = path[len(prefix) :].split("/")
        namespace = words.pop(0) if namespaced else ""
        if words and words[0] == plural and len(words) <= 2:
            return Place(kind, namespace, words[1] if len(words) == 2 else "")
    return None


def failure(code: int, reason: str, message: str) -> Answer:
    """An answer of kind Status."""
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return code, {**status, "message": message, "reason": reason, "code": code}


def find(store: Store, place: Place) -> Optional[Object]:
    """The object, if it is there."""
    for item in store.list(place.kind.path)[0]:
        metadata = item["metadata"]
        if metadata["name"] == place.name and (metadata.get("namespace") or "") == place.namespace:
            return item
    return None


def write(store: Store, method: str, place: Place, body: Object) -> Answer:
    """Carry out POST, PUT or DELETE."""
    if method == "POST":
        place = place._replace(name=body["metadata"]["name"])
    with store.changed:
        known = find(store, place)
        subject = f'{place.plural} "{place.name}"'
        if method == "POST" and known is not None:
            return failure(409, "AlreadyExists", f"{subject} already exists")
        if method != "POST" and known is None:
            return failure(404, "NotFound", f"{subject} not found")
        if method == "DELETE":
            store.delete(place.kind.kind, place.namespace, place.name)
            return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        given = body["metadata"].get("resourceVersion")
        if known is not None and given not in (None, "", known["metadata"]["resourceVersion"]):
            message = "the object has been modified; please apply your changes to the latest version and try again"
            return failure(409, "Conflict", f"Operation cannot be fulfilled on {subject}: {message}")
        head = {"kind": place.kind.kind, "apiVersion": place.kind.api_version}
        metadata = {**body["metadata"], **({"namespace": place.namespace} if place.namespace else {})}
        return (200 if known else 201), store.put({**body, **head, "metadata": metadata})
