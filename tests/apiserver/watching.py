# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Watches of the test API server: events of selected objects, and bookmarks."""

from __future__ import annotations

import time
from typing import Callable, Iterator

from .failures import Failure
from .selectors import Predicate
from .store import Compacted, Event, Kind, Object, Store

#: The object of a bookmark beside its metadata: the zero value of the kind.
_EMPTY: dict[str, Object] = {
    "Service": {"spec": {}, "status": {"loadBalancer": {}}},
    "EndpointSlice": {"addressType": "", "endpoints": None, "ports": None},
}
# Longest wait of a watch before it checks whether the caller has ended it.
_WAIT_SECONDS = 5.0


def watch_events(
    store: Store,
    kind: Kind,
    query: dict[str, str],
    matches: Predicate,
    *,
    is_ended: Callable[[], bool],
    bookmark_seconds: float,
) -> Iterator[tuple[str, Object]]:
    """Yield the type and object of each event of a watch until its timeout, or until the caller has ended it.

    ``is_ended`` is called whenever the store has changed or notified its waiters; ``bookmark_seconds``: how often an
    idle watch gets a bookmark. A resourceVersion that the store has forgotten ends the watch with an ERROR event.
    """
    bookmarks = query.get("allowWatchBookmarks") == "true"
    end = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
    version = int(query.get("resourceVersion") or 0)
    if query.get("sendInitialEvents") == "true" or version == 0:
        items, version = store.list(kind.path)
        for item in filter(matches, items):
            yield "ADDED", item
        if bookmarks and query.get("sendInitialEvents") == "true":
            yield "BOOKMARK", _bookmark(kind, version, {"k8s.io/initial-events-end": "true"})
    next_bookmark = time.monotonic() + bookmark_seconds
    while True:
        try:
            with store.changed:
                events, current = store.events(kind.path, version), store.resource_version
        except Compacted as error:
            message = f"too old resource version: {version} ({error.oldest})"
            yield "ERROR", Failure(410, "Expired", message).body
            return
        for event in events:
            yield from translate(event, matches)
        version = current
        now = time.monotonic()
        if now >= end or is_ended():
            return
        if bookmarks and now >= next_bookmark:
            next_bookmark = now + bookmark_seconds
            yield "BOOKMARK", _bookmark(kind, version, {})
        with store.changed:
            if store.resource_version == version and not is_ended():
                store.changed.wait(min(end, next_bookmark if bookmarks else end, now + _WAIT_SECONDS) - now)


def translate(event: Event, matches: Predicate) -> Iterator[tuple[str, Object]]:
    """Yield what a watch with a selector sees of a write: leaving the selection is DELETED, entering it is ADDED."""
    was = event.before is not None and matches(event.before)
    now = event.after is not None and matches(event.after)
    if now and event.after is not None:
        yield ("MODIFIED" if was else "ADDED"), event.after
    elif was and event.before is not None:
        metadata = {**event.before["metadata"], "resourceVersion": str(event.resource_version)}
        yield "DELETED", {**event.before, "metadata": metadata}


def _bookmark(kind: Kind, version: int, annotations: dict[str, str]) -> Object:
    metadata: Object = {"resourceVersion": str(version)}
    if annotations:
        metadata["annotations"] = annotations
    return {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata, **_EMPTY.get(kind.kind, {})}
