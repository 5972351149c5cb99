# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lists of the test API server: selected objects, pages of them, and continue tokens."""

from __future__ import annotations

import base64
import json
from typing import Collection

from .failures import Failure
from .places import Place
from .selectors import Predicate, field_predicate, label_predicate
from .store import Compacted, Object, Store

_EXPIRED = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)


def predicate(place: Place, query: dict[str, str], unknown_fields: Collection[str] = ()) -> Predicate:
    """Return which objects of a collection a query selects.

    Raises Failure for a field selector that is malformed or begins with a field of ``unknown_fields``.
    """
    by_label = label_predicate(query.get("labelSelector", ""))
    selector = query.get("fieldSelector", "")
    for field in unknown_fields:
        if selector.startswith(field):
            raise Failure(
                400,
                "BadRequest",
                f'Unable to find "/v1, Resource={place.kind.plural}" that match label selector "", field selector '
                f'"{selector}": field label not supported: {field}',
            )
    try:
        by_field = field_predicate(selector)
    except ValueError as error:
        raise Failure(400, "BadRequest", str(error)) from error
    return lambda item: place.holds(item) and by_label(item) and by_field(item)


def page(store: Store, place: Place, query: dict[str, str], matches: Predicate) -> Object:
    """Return the list that answers a query: the first ``limit`` objects from ``continue`` on, in the order of names.

    Raises Failure for a resourceVersion of the future, a malformed continue token, and one of a version that the store
    has forgotten.
    """
    _check_version(store, int(query.get("resourceVersion") or 0))
    start, at = "", None
    if query.get("continue"):
        version, start = decode_token(query["continue"])
        at = None if version < 0 else version
    try:
        items, version = store.list(place.kind.path, at)
    except Compacted as error:
        raise Failure(410, "Expired", _EXPIRED, metadata={"continue": encode_token(-1, start)}) from error
    remaining = [item for item in items if matches(item) and _path_key(item) > start]
    limit = int(query.get("limit") or 0)
    chosen = remaining[:limit] if limit else remaining
    metadata: Object = {"resourceVersion": str(version)}
    if len(chosen) < len(remaining):
        metadata["continue"] = encode_token(version, "/" + _path_key(chosen[-1]))
        if not (query.get("labelSelector") or query.get("fieldSelector")):
            metadata["remainingItemCount"] = len(remaining) - len(chosen)
    bare = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in chosen]
    return {"kind": place.kind.kind + "List", "apiVersion": place.kind.api_version, "metadata": metadata, "items": bare}


def encode_token(version: int, start: str) -> str:
    """Return the continue token of a list at a resourceVersion (-1: the current one), after the object ``start``."""
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start + "\0"}, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_token(token: str) -> tuple[int, str]:
    """Return the resourceVersion of a continue token and the path key of the last object. Raises Failure."""
    try:
        decoded = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(decoded["rv"]), str(decoded["start"]).rstrip("\0").lstrip("/")
    except (ValueError, KeyError, TypeError) as error:
        raise Failure(400, "BadRequest", f"invalid continue token: continue key is not valid: {error}") from error


def _check_version(store: Store, requested: int) -> None:
    if requested <= store.resource_version:
        return
    raise Failure(
        504,
        "Timeout",
        f"Timeout: Too large resource version: {requested}, current: {store.resource_version}",
        details={
            "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
            "retryAfterSeconds": 1,
        },
    )


def _path_key(item: Object) -> str:
    namespace, name = item["metadata"].get("namespace"), item["metadata"]["name"]
    return f"{namespace}/{name}" if namespace else str(name)
