# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Saving the cluster state to disk in the background: written when it has changed, read when it is needed."""

from __future__ import annotations

import queue
import time
from typing import Dict, List, Optional

from ...cluster.cache import cache_written, cached_texts, write_cache
from ...errors import SnapshotError
from ..supervision import Task
from ..surface.log import Log
from .packed import Packed, packed_texts, text_in
from .room import Room
from .view import ClusterView

#: A disk that takes longer is faulty.
_WRITE_SECONDS = 300.0


class CacheKeeper:
    """The file at ``path``; with an empty path nothing is kept."""

    def __init__(self, path: str, log: Log) -> None:
        self._path = path
        self._log = log
        self._written = 0.0
        self._revision = -1
        self._writing = False
        self._waiting: queue.SimpleQueue[Optional[List[bytes]]] = queue.SimpleQueue()

    def age(self) -> float:
        """Return the seconds since the file was written; 0 if there is none."""
        return time.time() - self._written if self._written else 0.0

    def exists(self) -> bool:
        """Return whether there is an intact file."""
        if not self._path:
            return False
        try:
            self._written = cache_written(self._path)
        except SnapshotError as error:
            self._log.info("no cluster state to start from", reason=error)
            return False
        return True

    def read(self, room: Room) -> Dict[str, Packed]:
        """Return the objects of the file by kind, parsed; nothing if it is absent or damaged, or has no room."""
        try:
            texts = cached_texts(self._path)
            if room.carries(sum(map(len, texts))):
                return packed_texts(texts)
            self._log.warning("the cluster state kept on disk is not used: it does not fit into the memory limit")
        except (SnapshotError, ValueError) as error:
            self._log.info("no cluster state to start from", reason=error)
        return {}

    def is_behind(self, view: ClusterView) -> bool:
        """Return whether the file should be written."""
        return bool(self._path) and view.revision != self._revision

    def write_beside(self, view: ClusterView) -> bool:
        """Have :meth:`run` write the file, so that syncs need not wait; return False while it still writes."""
        if self._writing:
            return False
        self._revision = view.revision
        self._writing = True
        self._waiting.put(view.objects())
        return True

    def run(self, task: Task) -> None:
        """Write what :meth:`write_beside` submits until :meth:`write_now`; the body of a supervised thread."""
        while True:
            task.idle()
            objects = self._waiting.get()
            if objects is None:
                return
            task.busy(_WRITE_SECONDS)
            try:
                self._store(objects)
            finally:
                self._writing = False

    def write_now(self, view: ClusterView, task: Optional[Task]) -> None:
        """End the thread, and write the latest state if necessary. Wait at most ten seconds for the disk."""
        self._waiting.put(None)
        if task is not None:
            task.join(10)
        if self.is_behind(view) and not self._writing:
            self._revision = view.revision
            self._store(view.objects())

    def _store(self, objects: List[bytes]) -> None:
        try:
            write_cache(self._path, map(text_in, objects))
            self._written = time.time()
        except SnapshotError as error:
            self._log.warning("the cluster state cannot be saved", error=error)
