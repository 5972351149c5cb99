# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's view of the cluster: the state, and each object in small form for the copy on disk."""

from __future__ import annotations

import json
from collections import Counter
from typing import Container, Iterable, NamedTuple, Optional

from ...base.errors import Refusal
from ...base.progress import Progress, unheeded
from ...cluster.account import Rates
from ...cluster.model import YOUNGEST, EndpointSlice, NamespacedName, Service
from ...cluster.parsing.objects import KINDS, ObjectKey, ParsedObject, object_key, parsed_object
from ...cluster.policies.policy_model import Pod
from ...cluster.state import ClusterState
from ..threads.failures import MOST_FAILURES, NOT_OF_ONE_OBJECT, Failures
from .known import Batch
from .packed import Item, parsed_items, text_in
from .room import RESERVED_FOR, UNLIMITED, WHOLE_RESERVE, Room
from .trigger_times import TriggerTimes

_WITHHELD = (
    "what its Service makes of ports, addresses and endpoints has no room in the agent's memory limit beside what the "
    "namespace has already, which is at most as much as is left: raise agent_memory_max"
)
#: A namespace has room again for an object that was withheld if it would take less than this share of what is left.
_READMITTED_BELOW = 0.9


class Applied(NamedTuple):
    """The effect of a batch: how many Services and EndpointSlices really changed, and which families that concerns."""

    services: int
    slices: int
    families: frozenset[str]


class ClusterView:
    """The cluster as the API server has reported it so far.

    ``dirty``: Services whose ServicePorts may have changed since :meth:`pop_dirty`. ``listed``: kinds that are
    completely known. ``from_disk``: kinds that the copy on disk knew; the first complete list of such a kind replaces
    what the view has of it, and not only what it differs in. ``revision`` counts changes of any kind.
    ``triggers``: when the changes of endpoints that are not programmed yet were triggered. ``held_back``: objects whose
    latest version has no room; their previous version remains in effect; among them are those that were withheld from
    their namespace (see :meth:`_withhold`). ``failures``: objects whose latest version a defect of the agent keeps out
    of the state; their previous version remains in effect, too. ``node_name``: the node whose pods are held back last.
    ``progress`` is called for each object.
    """

    def __init__(self, room: Room = UNLIMITED, progress: Progress = unheeded) -> None:
        self.state = ClusterState()
        self.state.policy.set_nodes_known(False)
        self.listed: set[str] = set()
        self.from_disk: set[str] = set()
        self.dirty: set[NamespacedName] = set()
        self.revision = 0
        # The changes that are not programmed yet, by kind and Service.
        self._pending: dict[str, Counter[NamespacedName]] = {"Service": Counter(), "EndpointSlice": Counter()}
        self.triggers = TriggerTimes()
        self.held_back: set[ObjectKey] = set()
        self.failures = Failures()
        self.node_name = ""
        #: By how many bytes of memory these would increase the excess of their namespace.
        self._withheld: dict[ObjectKey, int] = {}
        self._set_aside: dict[ObjectKey, tuple[ParsedObject, Item]] = {}
        self._room = room
        self._progress = progress
        self._objects: dict[ObjectKey, bytes] = {}
        self._bytes = 0

    @property
    def pending_services(self) -> int:
        """Accepted changes of Services since the last sync."""
        return sum(self._pending["Service"].values())

    @property
    def pending_slices(self) -> int:
        """Accepted changes of EndpointSlices since the last sync."""
        return sum(self._pending["EndpointSlice"].values())

    @property
    def known(self) -> set[str]:
        """The kinds that are completely known, as listed now or as the copy on disk had them."""
        return self.listed | self.from_disk

    @property
    def size(self) -> int:
        """Bytes of all objects as JSON, reduced; Services count for as many as take the same memory.

        Any thread may read it.
        """
        return self._bytes + self._as_json(self.state.excess)

    def _as_json(self, memory: int) -> int:
        """Return how many bytes of JSON take as much memory as this, in bytes."""
        return int(memory / self.state.rates.bytes_of_object)

    @property
    def withheld(self) -> int:
        """How many of the objects that are held back were withheld from their namespace."""
        return len(self._withheld)

    def set_rates(self, rates: Rates) -> None:
        """Account Services as those of this mode from now on."""
        self.state.set_rates(rates)

    def with_room(self, has_room: bool) -> set[ObjectKey]:
        """Return the objects that were held back and have room now. ``has_room``: objects may grow again."""
        return {key for key in self.held_back if (self._returns(key) if key in self._withheld else has_room)}

    def _returns(self, key: ObjectKey) -> bool:
        growth = self._withheld[key]
        taken = self._as_json(self.state.excess_of(key.namespace) + growth)
        return self._room.shares(int(taken / _READMITTED_BELOW), self._as_json(growth))

    def apply(self, batch: Batch, whole: bool = False) -> Applied:
        """Apply a reflector's changes and return their effect.

        ``whole``: there is room for all of them, as for every complete list; otherwise an object may be held back.
        """
        changes = 0
        families: set[str] = set()
        replaced = self._replaced_by(batch)
        for parsed, item in self._oldest_first(batch):
            self._progress()
            if batch.listed or whole or self._has_room(parsed, item.size):
                replaced.discard(parsed.key)
                before = self.state.families_of(parsed.key)
                affected = self._put(parsed, item, batch.listed)
                if affected:
                    families.update(before, *self._families_now(parsed.key, affected))
                    changes += 1
                    self._count(parsed.key, affected)
                    if isinstance(parsed.value, EndpointSlice):
                        self.triggers.note(parsed.value)
        for key in (*map(object_key, batch.gone), *replaced):
            self._progress()
            before = self.state.families_of(key)
            affected = self._remove(key)
            if affected:
                families.update(before, *self._families_now(key, affected))
                changes += 1
                self._count(key, affected)
                if batch.kind == "EndpointSlice":
                    self.triggers.forget(before, affected)
        if batch.listed:
            self.listed.add(batch.kind)
            if batch.kind == "Node":
                self.state.policy.set_nodes_known(not batch.of_part)
            self._room.release(batch.kind)
        services, slices = (changes if batch.kind == kind else 0 for kind in ("Service", "EndpointSlice"))
        return Applied(services, slices, frozenset(families))

    def _oldest_first(self, batch: Batch) -> Iterable[tuple[ParsedObject, Item]]:
        """Return the objects of a batch; those of a complete list by the age of their Service, the oldest first.

        So younger ones are withheld where the namespaces do not have room for all, as when they were created.
        """
        items = parsed_items(batch.changed)
        if not batch.listed or batch.kind not in ("Service", "EndpointSlice"):
            return items
        return sorted(items, key=lambda each: self._age(each[0]))

    def _age(self, parsed: ParsedObject) -> str:
        value = parsed.value
        service = self.state.services.get(value.service_key) if isinstance(value, EndpointSlice) else value
        return service.created or YOUNGEST if isinstance(service, Service) else YOUNGEST

    def size_of(self, key: ObjectKey) -> int:
        """Return the bytes of an object as JSON, reduced; 0 if there is none. Any thread may call it."""
        return len(text_in(self._objects.get(key, b"")))

    def _count(self, key: ObjectKey, affected: frozenset[NamespacedName]) -> None:
        self.dirty |= affected
        pending = self._pending.get(key.kind)
        if pending is not None:
            service = NamespacedName(key.namespace, key.name)
            pending[service if service in affected else min(affected)] += 1

    def _families_now(self, key: ObjectKey, affected: Iterable[NamespacedName]) -> list[frozenset[str]]:
        """Return the families that a changed object concerns: for a Service, also those of others that it affects."""
        if key.kind == "Service":
            return [self.state.families_of_service(service) for service in affected]
        return [self.state.families_of(key)]

    def _has_room(self, parsed: ParsedObject, size: int) -> bool:
        """Return whether an object may grow to this size; otherwise it is held back."""
        growth = size - self.size_of(parsed.key)
        if growth <= 0 or self._room.carries(growth, self._reserve(parsed)):
            return True
        self.held_back.add(parsed.key)
        return False

    def _reserve(self, parsed: ParsedObject) -> float:
        """Return the share of the reserve that an object may use: all of it for a pod that policies may isolate."""
        if isinstance(parsed.value, Pod):
            return WHOLE_RESERVE if parsed.value.node_name == self.node_name != "" else 0.0
        return RESERVED_FOR.get(parsed.key.kind, 0.0)

    def _put(self, parsed: ParsedObject, item: Item, listed: bool) -> frozenset[NamespacedName]:
        before = self.state.excess_of(parsed.key.namespace)
        try:
            affected = self.state.put(parsed)
        except Exception as error:
            self._set_aside[parsed.key] = parsed, item
            return self._recover(parsed.key, error)
        self._processed(parsed.key)
        excess = self.state.excess_of(parsed.key.namespace)
        # What Service and endpoints make together is known only after the update.
        if excess > before and not self._room.shares(self._as_json(excess)):
            return affected | self._withhold(parsed.key, excess - before)
        if self.state.keeps_earlier(parsed.key):
            # The copy on disk must have it as well: a restart knows no other version that is in force.
            self._admit(parsed.key)
            return affected
        growth = self._store(parsed.key, item.packed, item.size)
        if listed:
            self._room.applied(parsed.key.kind, growth)
        return affected

    def _withhold(self, key: ObjectKey, growth: int) -> frozenset[NamespacedName]:
        """Return to the kept version of an object whose namespace has no room for what it makes."""
        affected = self._put_back(key)
        self.held_back.add(key)
        self._withheld[key] = growth
        self.state.withhold(key, _WITHHELD)
        return affected

    def _put_back(self, key: ObjectKey) -> frozenset[NamespacedName]:
        """Return to the version of an object that is kept, or to none."""
        kept = self._objects.get(key)
        if kept is None:
            return self.state.remove(key)
        return self.state.put(_parsed(key, kept))

    def _recover(self, key: ObjectKey, error: Exception) -> frozenset[NamespacedName]:
        """Build the state again without the version of an object that raised an exception; return every Service.

        The exception may have left the state half changed. Raises it if it is not about this object.
        """
        services = frozenset(self.state.services)
        omitted: set[ObjectKey] = set()
        while True:
            self.failures.add(key, error)
            if isinstance(error, NOT_OF_ONE_OBJECT) or len(self.failures) > MOST_FAILURES:
                raise error
            failure = self._rebuild(omitted)
            if failure is None:
                return services.union(self.state.services)
            key, error = failure
            omitted.add(key)

    def _rebuild(self, omitted: Container[ObjectKey]) -> Optional[tuple[ObjectKey, Exception]]:
        """Build the state again without these objects; return the first one that raised an exception, and this."""
        self.state = self.state.successor()
        for key, packed in self._objects.items():
            self._progress()
            try:
                if key not in omitted:
                    self.state.put(_parsed(key, packed))
            except Exception as error:
                return key, error
        return None

    def retry(self) -> None:
        """Retry objects that failed: the cause may have been another object, or may have disappeared."""
        for key in tuple(self.failures):
            version = self._set_aside.get(key)
            if version is None:
                # It was deleted, or its kept version was omitted.
                self.failures.discard(key)
                kept = self._objects.get(key)
                if kept is None:
                    continue
                version = _parsed(key, kept), Item(kept, len(text_in(kept)))
            self.dirty |= self._put(*version, listed=False)

    def _replaced_by(self, batch: Batch) -> set[ObjectKey]:
        """Return the keys of the objects that a batch replaces as a whole; none unless they are from the disk."""
        if batch.listed and batch.kind in self.from_disk and batch.kind not in self.listed:
            return set(self.keys(batch.kind))
        return set()

    def _remove(self, key: ObjectKey) -> frozenset[NamespacedName]:
        self._store(key, b"", 0)
        self._processed(key)
        try:
            return self.state.remove(key)
        except Exception as error:
            return self._recover(key, error)

    def _processed(self, key: ObjectKey) -> None:
        self.failures.discard(key)
        if self._set_aside:
            self._set_aside.pop(key, None)

    def forget(self, kind: str) -> None:
        """Remove every object of a kind that is no longer followed: if it is followed again, none of them counts."""
        for key in self.keys(kind):
            self.dirty |= self._remove(key)
        self.listed.discard(kind)
        self.from_disk.discard(kind)

    def _store(self, key: ObjectKey, packed: bytes, size: int) -> int:
        """Keep an object, or remove it if nothing is given; return by how many bytes ``size`` has grown."""
        before = self._objects.get(key, b"")
        self._admit(key)
        growth = size - len(text_in(before))
        self._bytes += growth
        self.revision += before != packed
        if packed:
            self._objects[key] = packed
        else:
            self._objects.pop(key, None)
        return growth

    def _admit(self, key: ObjectKey) -> None:
        self.held_back.discard(key)
        if self._withheld.pop(key, 0):
            self.state.admit(key)

    def pop_dirty(self) -> set[NamespacedName]:
        """Return the Services to be rendered again, and forget them."""
        dirty, self.dirty = self.dirty, set()
        return dirty

    def synced(self, waiting: Container[NamespacedName] = ()) -> None:
        """Mark all changes as programmed, except those of some Services.

        Those of families that the node does not serve need not be programmed.
        """
        self.triggers.clear()
        for kind, pending in self._pending.items():
            self._pending[kind] = Counter({service: pending[service] for service in pending if service in waiting})

    def keys(self, kind: str) -> list[ObjectKey]:
        """Return the key of every object of a kind."""
        return [key for key in self._objects if key.kind == kind]

    def objects(self) -> list[bytes]:
        """Return every object, packed."""
        return list(self._objects.values())


def _parsed(key: ObjectKey, packed: bytes) -> ParsedObject:
    return parsed_object(json.loads(text_in(packed)), key)


def by_kind(refusals: Iterable[Refusal]) -> dict[str, int]:
    """Return how many objects, or parts of objects, of each kind are skipped because they are invalid."""
    counts = dict.fromkeys(KINDS, 0)
    for refusal in refusals:
        counts[refusal.kind] = counts.get(refusal.kind, 0) + 1
    return counts
