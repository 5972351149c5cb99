# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Saving the cluster state to disk in the background: read once at the start, written when it has changed."""

from __future__ import annotations

import queue
import time
from typing import Dict, List, Optional, Tuple

from ...cluster.cache import read_cache, write_cache
from ...cluster.parsing.objects import object_key
from ...errors import SnapshotError
from ..supervision import Task
from ..surface.log import Log
from .packed import Packed, pack, text_in
from .view import ClusterView

#: A disk that takes longer is faulty.
_WRITE_SECONDS = 300.0

Names = Dict[str, List[Tuple[str, str]]]


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

    def read(self) -> Tuple[Dict[str, Packed], Names]:
        """Return the objects of the file, and their (namespace, name), by kind; empty if it is absent or damaged."""
        objects: Dict[str, Packed] = {}
        names: Names = {}
        if not self._path:
            return objects, names
        try:
            cached = read_cache(self._path)
        except SnapshotError as error:
            self._log.info("no cluster state to start from", reason=error)
            return objects, names
        self._written = cached.written
        for raw in cached.objects:
            key = object_key(raw)
            names.setdefault(key.kind, []).append((key.namespace, key.name))
            objects.setdefault(key.kind, Packed()).append(pack(raw))
        return objects, names

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
