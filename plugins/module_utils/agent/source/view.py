# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's view of the cluster: the state, and each object in small form for the copy on disk."""

from __future__ import annotations

import datetime
import time
from typing import Any, Dict, FrozenSet, Iterable, List, Set, Tuple

from ...cluster.answers import version_of
from ...cluster.model import Failing, NamespacedName
from ...cluster.parsing.endpoint_slice import SERVICE_NAME_LABEL, TRIGGER_TIME_ANNOTATION
from ...cluster.parsing.objects import KINDS, ObjectKey, object_key
from ...cluster.parsing.prune import prune
from ...cluster.state import ClusterState, Rising
from ...cluster.static import StaticObjects
from ...errors import Refusal
from .packed import Item, text_in, with_items
from .reflector import Batch
from .room import UNLIMITED, Room

_MOST_TRIGGER_TIMES = 100
_MOST_FRACTION_DIGITS = 9


def small(raw: Dict[str, Any]) -> Dict[str, Any]:
    """Return an object with only the fields that the engine reads, and its resourceVersion."""
    kept = prune(raw)
    version = version_of(raw)
    if kept is not raw and version:
        kept["metadata"]["resourceVersion"] = version
    return dict(kept)


def _trigger_text(raw: Dict[str, Any]) -> str:
    annotations = raw["metadata"].get("annotations")
    text = annotations.get(TRIGGER_TIME_ANNOTATION) if isinstance(annotations, dict) else None
    return text if isinstance(text, str) else ""


def _trigger_time(raw: Dict[str, Any]) -> float:
    """Return when the change that led to an EndpointSlice happened, in seconds since the epoch; 0 if unknown."""
    text = _trigger_text(raw)
    if not text.endswith("Z"):
        return 0.0
    whole, _point, fraction = text[:-1].partition(".")
    if not (fraction or "0").isdecimal() or len(fraction) > _MOST_FRACTION_DIGITS:
        return 0.0
    try:
        moment = datetime.datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=datetime.timezone.utc)
        return moment.timestamp() + float(f"0.{fraction or '0'}")
    except ValueError:
        return 0.0


def owner(raw: Dict[str, Any]) -> NamespacedName:
    """Return the Service that an EndpointSlice belongs to; without a name if it belongs to none."""
    labels = raw["metadata"].get("labels")
    name = labels.get(SERVICE_NAME_LABEL, "") if isinstance(labels, dict) else ""
    return NamespacedName(str(raw["metadata"].get("namespace") or ""), str(name))


class ClusterView:
    """The cluster as the API server has reported it so far.

    ``dirty``: Services whose ServicePorts may have changed since :meth:`pop_dirty`. ``listed``: kinds that are
    completely known. ``from_disk``: kinds that the copy on disk had. ``revision`` counts changes of any kind.
    ``pending_services`` and ``pending_slices``: accepted changes since the last sync. ``trigger_times``: by Service,
    the trigger times of endpoint changes that are not programmed yet. ``size``: bytes of all objects as JSON, reduced.
    ``held_back``: objects whose latest version ``room`` does not carry; the version before it remains in effect.
    """

    def __init__(self, room: Room = UNLIMITED) -> None:
        self.state = ClusterState()
        self.listed: Set[str] = set()
        self.from_disk: Set[str] = set()
        self.dirty: Set[NamespacedName] = set()
        self.revision = 0
        self.pending_services = 0
        self.pending_slices = 0
        self.trigger_times: Dict[NamespacedName, List[float]] = {}
        self.size = 0
        self.held_back: Set[ObjectKey] = set()
        self._room = room
        self._objects: Dict[ObjectKey, bytes] = {}
        self._started = time.time()
        self._started_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._started))

    def apply(self, batch: Batch, whole: bool = False) -> Tuple[int, int]:
        """Apply a reflector's changes; return how many Services and EndpointSlices really changed.

        ``whole``: there is room for all of them, as for every complete list; otherwise an object may be held back.
        """
        before = self.pending_services, self.pending_slices
        for raw, item in with_items(batch.changed):
            if batch.listed or whole or self._has_room(raw, item.size):
                self._count(batch.kind, raw, self._put(raw, item), gone=False)
        for raw in batch.gone:
            self._count(batch.kind, raw, self._remove(raw), gone=True)
        if batch.listed:
            self.listed.add(batch.kind)
        return self.pending_services - before[0], self.pending_slices - before[1]

    def _count(self, kind: str, raw: Dict[str, Any], affected: FrozenSet[NamespacedName], gone: bool) -> None:
        self.dirty |= affected
        if affected and kind == "Service":
            self.pending_services += 1
        elif affected and kind == "EndpointSlice":
            self.pending_slices += 1
            self._note_trigger(raw, gone, affected)

    def _has_room(self, raw: Dict[str, Any], size: int) -> bool:
        """Return whether an object may grow to this size; otherwise it is held back."""
        key = object_key(raw)
        growth = size - len(text_in(self._objects.get(key, b"")))
        if growth <= 0 or self._room.carries(growth):
            return True
        self.held_back.add(key)
        return False

    def _put(self, raw: Dict[str, Any], item: Item) -> FrozenSet[NamespacedName]:
        affected = self.state.upsert(raw)
        self._store(object_key(raw), item.packed, item.size)
        return affected

    def _remove(self, raw: Dict[str, Any]) -> FrozenSet[NamespacedName]:
        self._store(object_key(raw), b"", 0)
        return self.state.delete(raw)

    def _store(self, key: ObjectKey, packed: bytes, size: int) -> None:
        before = self._objects.get(key, b"")
        self.held_back.discard(key)
        self.size += size - len(text_in(before))
        self.revision += before != packed
        if packed:
            self._objects[key] = packed
        else:
            self._objects.pop(key, None)

    def set_static(self, static: StaticObjects) -> None:
        """Replace the static Services, which are not part of the copy on disk."""
        self.dirty |= self.state.set_static(static)

    def set_failing(self, service: NamespacedName, failing: Failing) -> None:
        """Record which endpoints of a Service fail their health checks."""
        self.dirty |= self.state.set_failing(service, failing)

    def set_rising(self, service: NamespacedName, rising: Rising) -> None:
        """Record the endpoints of a Service whose share still rises."""
        self.dirty |= self.state.set_rising(service, rising)

    def _note_trigger(self, raw: Dict[str, Any], gone: bool, affected: Iterable[NamespacedName]) -> None:
        if gone:
            for service in affected:
                self.trigger_times.pop(service, None)
            return
        # A list at the start has tens of thousands of times before it, which sort before it as text, too.
        if _trigger_text(raw) < self._started_text:
            return
        moment = _trigger_time(raw)
        if moment > self._started:
            times = self.trigger_times.setdefault(owner(raw), [])
            if len(times) < _MOST_TRIGGER_TIMES:
                times.append(moment)

    def pop_dirty(self) -> Set[NamespacedName]:
        """Return the Services to be rendered again, and forget them."""
        dirty, self.dirty = self.dirty, set()
        return dirty

    def synced(self, now: float) -> List[float]:
        """Mark all changes as programmed; return the seconds since each known trigger time.

        A time in the future counts as now: anyone who may write an EndpointSlice can set it.
        """
        latencies = [max(0.0, now - moment) for times in self.trigger_times.values() for moment in times]
        self.trigger_times.clear()
        self.pending_services = self.pending_slices = 0
        return latencies

    def names(self, kind: str) -> List[Tuple[str, str]]:
        """Return namespace and name of every object of a kind."""
        return [(key.namespace, key.name) for key in self._objects if key.kind == kind]

    def objects(self) -> List[bytes]:
        """Return every object, packed."""
        return list(self._objects.values())

    def refused_by_kind(self) -> Dict[str, int]:
        """Return how many objects of each kind are skipped because they are invalid."""
        return _by_kind(self.state.refusals)

    def skipped_by_kind(self) -> Dict[str, int]:
        """Return how many parts of objects of each kind are skipped because they are invalid."""
        return _by_kind(self.state.skipped)


def _by_kind(refusals: Iterable[Refusal]) -> Dict[str, int]:
    counts = dict.fromkeys(KINDS, 0)
    for refusal in refusals:
        counts[refusal.kind] = counts.get(refusal.kind, 0) + 1
    return counts
