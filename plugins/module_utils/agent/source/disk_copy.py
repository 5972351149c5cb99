# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Saving the cluster state to disk in the background: written when it has changed, read when it is needed."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from typing import AbstractSet, Iterable, NamedTuple, Optional

from ...base.errors import SnapshotError
from ...cluster.api.resource_types import NODES
from ...cluster.files.after_reboot import texts_without_local_pods
from ...cluster.files.cache import CacheFile, open_cache, write_cache
from ...cluster.model import Node
from ...cluster.parsing.objects import ObjectKey
from ...kernel.facts import boot_identity
from ..telemetry.log import Log
from ..threads.supervision import Task
from .packed import Packed, items_of, parsed_items, text_in
from .room import WHOLE_RESERVE, Room
from .view import ClusterView

#: A disk that takes longer is faulty.
_WRITE_SECONDS = 300.0
#: How many bytes of objects to read between checks for room.
_ROOM_BYTES = 1 << 16


class Copy(NamedTuple):
    """What is to be written: the packed objects, and the kinds that are completely known.

    Objects of the kinds in ``missing`` are carried over from the file as it is.
    """

    objects: list[bytes]
    kinds: frozenset[str]
    missing: frozenset[str]
    node_name: str


#: What a file was written from: the revision of the view, and the kinds that were known of those that it should have,
#: and those that were not.
_State = tuple[int, AbstractSet[str], AbstractSet[str]]


class DiskCopy:
    """The file at ``path``; with an empty path nothing is kept."""

    def __init__(self, path: str, log: Log) -> None:
        self._path = path
        self._log = log
        # By the monotonic clock: the age does not jump with the clock of the node.
        self._written: Optional[float] = None
        self._submitted: Optional[_State] = None
        self._writing = False
        self._problem = ""
        self._waiting: queue.SimpleQueue[Optional[Copy]] = queue.SimpleQueue()

    def age(self) -> float:
        """Return the seconds since the file was written; 0 if there is none."""
        return time.monotonic() - self._written if self._written is not None else 0.0

    def exists(self) -> bool:
        """Return whether there is an intact file."""
        if not self._path:
            return False
        try:
            self._written = time.monotonic() - max(0.0, time.time() - open_cache(self._path).written)
        except SnapshotError as error:
            self._log.info("no cluster state to start from", reason=error)
            return False
        return True

    def read(self, room: Room, kinds: AbstractSet[str], node_name: str) -> dict[str, Packed]:
        """Return the objects of these kinds, parsed, with an entry for each kind that the file knows completely.

        Nothing if the file is absent or damaged, or has no room. If the node ``node_name`` has rebooted since the file
        was written, the pods that ran on it are omitted.
        """
        try:
            file = open_cache(self._path)
            found = {kind: Packed() for kind in kinds & file.kinds}
            size = checked = 0
            for key, item in items_of(self._valid(file, file.texts(), node_name), found.keys()):
                found[key.kind].append(item)
                size += item.size
                if size >= checked + _ROOM_BYTES:
                    checked = size
                    if not room.carries(size, WHOLE_RESERVE):
                        break
        except (SnapshotError, ValueError) as error:
            self._log.info("no cluster state to start from", reason=error)
            return {}
        if not room.carries(size, WHOLE_RESERVE):
            self._log.warning("the cluster state kept on disk is not used: it does not fit into the memory limit")
            return {}
        return found

    def _valid(self, file: CacheFile, texts: Iterable[bytes], node_name: str) -> Iterable[bytes]:
        """Return texts of the file without what a reboot since then has invalidated."""
        if not node_name or file.boot in ("", boot_identity()):
            return texts
        nodes = [parsed.value for parsed, _item in parsed_items(self.earlier({ObjectKey(NODES.kind, "", node_name)}))]
        own = [address for node in nodes if isinstance(node, Node) for address in node.addresses]
        return texts_without_local_pods(texts, node_name, own)

    def earlier(self, keys: AbstractSet[ObjectKey]) -> Packed:
        """Return the objects with these keys as the file has them, parsed; nothing if it is absent or damaged."""
        found = Packed()
        with contextlib.suppress(SnapshotError, ValueError):
            texts = open_cache(self._path).texts_of(keys.__contains__, {key.name for key in keys})
            for _key, item in items_of(texts, {key.kind for key in keys}):
                found.append(item)
        return found

    def is_behind(self, view: ClusterView, followed: AbstractSet[str]) -> bool:
        """Return whether the file should be written. ``followed``: the kinds that it should have."""
        return bool(self._path) and _state(view, followed) != self._submitted

    def write_beside(self, view: ClusterView, followed: AbstractSet[str]) -> bool:
        """Have :meth:`run` write the file, so that syncs need not wait; return False while it still writes."""
        if self._writing:
            return False
        self._writing = True
        self._waiting.put(self._copy(view, followed))
        return True

    def _copy(self, view: ClusterView, followed: AbstractSet[str]) -> Copy:
        self._submitted = _state(view, followed)
        return Copy(view.objects(), frozenset(followed & view.known), frozenset(followed - view.known), view.node_name)

    def run(self, task: Task) -> None:
        """Write what :meth:`write_beside` submits until :meth:`write_now`; the body of a supervised thread."""
        while True:
            task.idle()
            copy = self._waiting.get()
            if copy is None:
                return
            task.busy(_WRITE_SECONDS)
            try:
                self._store(copy)
            finally:
                self._writing = False

    def write_now(self, view: ClusterView, followed: AbstractSet[str], task: Optional[Task]) -> None:
        """End the thread, and write the latest state if necessary. Wait at most ten seconds for the disk."""
        self._waiting.put(None)
        if task is not None:
            task.join(10)
        if self.is_behind(view, followed) and not self._writing:
            self._store(self._copy(view, followed))

    def _store(self, copy: Copy) -> None:
        kinds, texts = self._carried(copy.missing, copy.node_name)
        try:
            # What is carried over comes first: a later object with the same key overrides it.
            objects = itertools.chain(texts, map(text_in, copy.objects))
            write_cache(self._path, objects, copy.kinds | kinds, boot_identity())
            self._written = time.monotonic()
            if self._problem:
                self._log.info("the cluster state is saved again")
            self._problem = ""
        except SnapshotError as error:
            # It is behind again, so that it will be written once the disk works.
            self._submitted = None
            if str(error) != self._problem:
                self._log.warning("the cluster state cannot be saved", error=error)
            self._problem = str(error)

    def _carried(self, missing: frozenset[str], node_name: str) -> tuple[frozenset[str], Iterable[bytes]]:
        """Return what the file has of the kinds that are not known yet, and these: the next boot may need it."""
        if missing:
            with contextlib.suppress(SnapshotError):
                file = open_cache(self._path)
                kinds = missing & file.kinds
                texts = file.texts_of(lambda key: key.kind in kinds, kinds) if kinds else ()
                return kinds, self._valid(file, texts, node_name)
        return frozenset(), ()


def _state(view: ClusterView, followed: AbstractSet[str]) -> _State:
    return view.revision, followed & view.known, followed - view.known
