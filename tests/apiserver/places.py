# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Places of objects in the test API server: the collection or object that a path names."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

from .failures import no_resource, not_found
from .store import SERVED, Kind, Object, Store

_PATH = re.compile(
    r"(?P<top>/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?\Z"
)


class Place(NamedTuple):
    """An object, or with an empty name a collection: of one namespace, or with None of the whole cluster."""

    kind: Kind
    namespace: Optional[str]
    name: str

    @property
    def is_of_all_namespaces(self) -> bool:
        """Whether this is the collection of all namespaces, in which nothing can be written."""
        return self.kind.namespaced and self.namespace is None

    def holds(self, item: Object) -> bool:
        """Report whether an object of the kind is this one or in this collection."""
        metadata = item["metadata"]
        return self.namespace in (None, metadata.get("namespace")) and self.name in ("", metadata["name"])


def place_of(path: str) -> Optional[Place]:
    """Return the place that a path without query names; None if the store has no such kind.

    A path that lacks the namespace of a namespaced object, or gives one to an object that has none, names nothing.
    """
    match = _PATH.match(path)
    kind = SERVED.get(f"{match['top']}/{match['plural']}") if match else None
    if match is None or kind is None:
        return None
    place = Place(kind, match["namespace"], match["name"] or "")
    if (place.namespace is not None and not kind.namespaced) or (place.name and place.is_of_all_namespaces):
        return None
    return place


def find(store: Store, place: Place) -> Optional[Object]:
    """Return the object at a place, None if it does not exist."""
    if not place.name:
        return None
    return next(filter(place.holds, store.list(place.kind.path)[0]), None)


def get(store: Store, place: Optional[Place]) -> Object:
    """Return the object at a place. Raises Failure, also for None, the place of a path that names nothing."""
    if place is None:
        raise no_resource()
    found = find(store, place)
    if found is None:
        raise not_found(place.kind.plural, place.name)
    return found
