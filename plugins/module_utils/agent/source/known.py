# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Track delivered objects of a collection, and turn lists and events into changes.

Objects are compared by content, not by resourceVersion. Versions belong to the history of one etcd: after a restore
from a backup, or in a cluster that was created again, another object may have the name and the version of a known one.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple, Optional, Sequence

from ...cluster.fields import Invalid, mapping, shown, text
from ...cluster.parsing.objects import ObjectKey, object_key, parsed_object
from .packed import Item, Packed, pack, text_of

_MOST_NAME_CHARACTERS = 253


class Batch(NamedTuple):
    """The changes of a collection: raw objects that are new or different, and deleted ones.

    ``listed``: with this batch the collection is completely known, or if ``of_part``, the part that a field selector
    selects. Only kind and metadata of a deleted object matter.
    """

    kind: str
    changed: Sequence[dict[str, Any]]
    gone: list[dict[str, Any]]
    listed: bool = False
    of_part: bool = False


def check_identity(raw: object, kind: str) -> dict[str, Any]:
    """Return the raw object if it is of the kind and has a name. Raises Invalid."""
    item = mapping(raw, "")
    if item.get("kind") != kind:
        raise Invalid("kind", f"{shown(item.get('kind'))} is not {kind}")
    metadata = mapping(item.get("metadata"), "metadata")
    text(metadata.get("namespace"), "metadata.namespace")
    name = text(metadata.get("name"), "metadata.name")
    if not name:
        raise Invalid("metadata.name", "is missing")
    if len(name) > _MOST_NAME_CHARACTERS:
        raise Invalid("metadata.name", f"is longer than {_MOST_NAME_CHARACTERS} characters")
    return item


class Listed(NamedTuple):
    """An object of a list.

    ``digest``: of its content, None if that cannot be written. ``item`` is None if the same content has been delivered
    already. ``growth``: see :meth:`Known.listed`.
    """

    key: ObjectKey
    digest: Optional[int]
    item: Optional[Item]
    growth: int = 0


class Known:
    """The objects of a collection that have been delivered, by key with the digest of their content if it is known.

    ``of_part``: only a part of the collection is followed.
    """

    def __init__(self, kind: str, of_part: bool = False) -> None:
        self._kind = kind
        self._of_part = of_part
        self._digests: dict[ObjectKey, Optional[int]] = {}

    @property
    def has_objects(self) -> bool:
        """Whether any object is known."""
        return bool(self._digests)

    def shares_none(self, items: Sequence[Listed]) -> bool:
        """Return whether objects are known, and a list has none of them."""
        return self.has_objects and not any(item.key in self._digests for item in items)

    def assume(self, keys: Iterable[ObjectKey]) -> None:
        """Record objects that are known from the state kept on disk."""
        for key in keys:
            self._digests.setdefault(key, None)

    def listed(self, raw: dict[str, Any], held: Callable[[ObjectKey], int] = lambda key: 1) -> Listed:
        """Return the part of a listed object to keep until the list is complete.

        ``held``: how many bytes of JSON the object with this key has that is held already, 0 if there is none. The
        result's ``growth`` is how many more the new version has. A new object is parsed at once, because its parsed
        form will be kept; of another version both would be held until the list is complete.
        """
        key = object_key(raw)
        content = text_of(raw)
        digest = hash(content) if content else None
        if content and self._digests.get(key) == digest:
            return Listed(key, digest, None)
        size = held(key)
        item = pack(raw, content, None if size else parsed_object(raw, key))
        return Listed(key, digest, item, item.size - size)

    def replace(self, items: Iterable[Listed]) -> Batch:
        """Record a complete list, and return the differences."""
        before, self._digests = self._digests, {}
        changed = Packed()
        for listed in items:
            self._digests[listed.key] = listed.digest
            if listed.item is not None:
                changed.append(listed.item)
        gone = [_tombstone(key) for key in before if key not in self._digests]
        return Batch(self._kind, changed, gone, True, self._of_part)

    def forget(self, keys: Iterable[ObjectKey]) -> None:
        """Mark objects for delivery by the next list, whatever their content; may be called from any thread."""
        for key in keys:
            if key in self._digests:
                self._digests[key] = None

    def put(self, item: dict[str, Any]) -> Batch:
        """Record an object that was added or modified.

        The next list delivers it once more, which has no effect if it is equal.
        """
        self._digests[object_key(item)] = None
        return Batch(self._kind, [item], [])

    def delete(self, item: dict[str, Any]) -> Batch:
        """Record an object's deletion."""
        self._digests.pop(object_key(item), None)
        return Batch(self._kind, [], [item])


def _tombstone(key: ObjectKey) -> dict[str, Any]:
    metadata = {"namespace": key.namespace, "name": key.name} if key.namespace else {"name": key.name}
    return {"kind": key.kind, "metadata": metadata}
