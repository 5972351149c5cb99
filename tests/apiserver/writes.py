# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes through the test API server: create, replace, patch and delete objects, with the failures of a real one."""

from __future__ import annotations

import re
from typing import Optional

from .failures import Failure, not_found
from .places import Place, find, get
from .store import Object, Store

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*\Z")

#: An HTTP status and the body that goes with it.
Answer = tuple[int, Object]


def write(store: Store, method: str, place: Place, body: Object) -> Answer:
    """Carry out POST, PUT or DELETE. Raises Failure."""
    if place.is_of_all_namespaces:
        raise Failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
    plural = place.kind.plural
    if method == "POST":
        place = place._replace(name=body["metadata"]["name"])
        if place.kind.kind == "Event":
            _validate_event(body)
    with store.changed:
        known = find(store, place)
        if method == "POST" and known is not None:
            raise Failure(409, "AlreadyExists", f'{plural} "{place.name}" already exists')
        if method != "POST" and known is None:
            raise not_found(plural, place.name)
        if method == "DELETE":
            store.delete(place.kind.kind, place.namespace or "", place.name)
            return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        given = body["metadata"].get("resourceVersion")
        if known is not None and given not in (None, "", known["metadata"]["resourceVersion"]):
            message = "the object has been modified; please apply your changes to the latest version and try again"
            raise Failure(409, "Conflict", f'Operation cannot be fulfilled on {plural} "{place.name}": {message}')
        head = {"kind": place.kind.kind, "apiVersion": place.kind.api_version}
        metadata = {**body["metadata"], **({"namespace": place.namespace} if place.namespace else {})}
        return (200 if known else 201), store.put({**body, **head, "metadata": metadata})


def _validate_event(body: Object) -> None:
    """Check the length of the note, which counts bytes, and the name (pkg/apis/core/validation/events.go)."""
    name = body["metadata"]["name"]
    if len(body.get("note", "").encode()) > 1024:
        raise Failure(
            422, "Invalid", f'Event "{name}" is invalid: note: Invalid value: "": can have at most 1024 bytes'
        )
    if len(name) > 253 or not _SUBDOMAIN.match(name):
        raise Failure(422, "Invalid", f'Event "{name}" is invalid: metadata.name: Invalid value: must be a subdomain')


def patch(store: Store, place: Optional[Place], body: Object) -> Object:
    """Apply a merge patch to the object at a place and return the result.

    A resourceVersion in the patch is a precondition. Raises Failure.
    """
    with store.changed:
        found = get(store, place)
        version = (body.get("metadata") or {}).get("resourceVersion")
        if version is not None and version != found["metadata"]["resourceVersion"]:
            raise Failure(409, "Conflict", "the object has been modified; please apply your changes to it")
        changed = merged(found, body)
        if changed.get("spec") != found.get("spec"):
            changed["metadata"]["generation"] = changed["metadata"].get("generation", 1) + 1
        return store.put(changed)


def merged(item: Object, body: Object) -> Object:
    """Return the object with a merge patch applied (RFC 7386)."""
    result = dict(item)
    for key, value in body.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merged(result[key] if isinstance(result.get(key), dict) else {}, value)
        else:
            result[key] = value
    return result
