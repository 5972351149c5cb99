# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The objects that the API serves, with their history for watches."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .objects import Object, ObjectKey, key_of

FIRST_RESOURCE_VERSION = 1000


class Event(NamedTuple):
    """A change: ADDED, MODIFIED or DELETED; *before* is the object that was there, None for ADDED."""

    resource_version: int
    what: str
    item: Object
    before: Object | None


class Store:
    """Objects by key. A new snapshot becomes the events that lead to it from the one before."""

    def __init__(self) -> None:
        self._objects: dict[ObjectKey, Object] = {}
        self._history: list[Event] = []
        self._changed = asyncio.Event()
        self.resource_version = FIRST_RESOURCE_VERSION

    def load(self, snapshot: Iterable[Object]) -> None:
        """Deletions first, then the rest in the order of the snapshot (the sentinel last), the unchanged left out."""
        new = {key_of(item): item for item in copy.deepcopy(list(snapshot))}
        for key in [key for key in self._objects if key not in new]:
            self._emit("DELETED", self._objects[key])
            del self._objects[key]
        for key, item in new.items():
            old = self._objects.get(key)
            if old is None or _comparable(old) != _comparable(item):
                self._emit("MODIFIED" if old else "ADDED", item)
                self._objects[key] = item
        self._changed.set()
        self._changed = asyncio.Event()

    def _emit(self, what: str, item: Object) -> None:
        before = copy.deepcopy(self._objects.get(key_of(item)))
        self.resource_version += 1
        item["metadata"]["resourceVersion"] = str(self.resource_version)
        self._history.append(Event(self.resource_version, what, copy.deepcopy(item), before))

    def get(self, key: ObjectKey) -> Object | None:
        """The object of that key."""
        return self._objects.get(key)

    def items(self) -> list[Object]:
        """All objects."""
        return list(self._objects.values())

    def events_since(self, resource_version: int) -> Iterator[Event]:
        """What happened after *resource_version*."""
        return (event for event in self._history if event.resource_version > resource_version)

    def next_change(self) -> asyncio.Event:
        """Set by the next load. To be fetched before the events are read, so that none is missed between."""
        return self._changed


def _comparable(item: Object) -> Object:
    metadata = {name: value for name, value in item["metadata"].items() if name != "resourceVersion"}
    return {**item, "metadata": metadata}
