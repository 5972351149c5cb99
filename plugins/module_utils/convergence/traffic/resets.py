# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which counters of the kernel begin at zero again after a change of its tables."""

from __future__ import annotations

from typing import Any, Hashable, Iterable, Iterator

from ...rendering.iptables.tables import NAT, ChainKey
from ...rendering.nftables.objects import ElementKey, ObjectKey, index_bytes, list_items
from ...resources import Change, Kind, PlannedChange
from .account import CountedElement


def counters_reset(planned: Iterable[PlannedChange]) -> set[Hashable]:
    """Return the objects of samples whose counters these changes created or removed.

    Those of real servers may continue nevertheless: see :func:`.samples.revived`.
    """
    return {name for item in planned for name in _objects(item.resource.kind, item.change)}


def _objects(kind: str, change: Change[Any, Any]) -> Iterator[Hashable]:
    # IPVS edits settings in place.
    if kind == Kind.VIRTUAL_SERVERS:
        yield from change.added
        yield from change.removed
    elif kind == Kind.REAL_SERVERS:
        # Until a removed one is added again, nothing is known about its counters.
        yield from change.added
    elif kind == Kind.CHAINS:
        for key in (*change.added, *change.replaced, *change.removed):
            if isinstance(key, ChainKey) and key.table == NAT:
                yield key.chain
    elif kind == Kind.TABLE_OBJECTS:
        for key, value in (*change.added.items(), *change.removed.items()):
            yield from _elements(key, (), value)
        for key, (old, new) in change.replaced.items():
            if isinstance(key, ObjectKey) and key.kind == "set":
                yield CountedElement(key.name)
            yield from _elements(key, old, new)


def _elements(key: Any, old: Any, new: Any) -> Iterator[Hashable]:
    """Yield the map and the key of each element that is written, in the form of samples."""
    if not isinstance(key, ElementKey):
        return
    if key.kind != "list":
        yield CountedElement(key.name, key.key)
        return
    before, after = dict(list_items(old)), dict(list_items(new))
    for index in before.keys() | after.keys():
        if before.get(index) != after.get(index):
            yield CountedElement(key.name, key.key + index_bytes(index))
