# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The view that the node is kept in sync with: the cluster's, or until that is known, static Services only."""

from __future__ import annotations

from typing import Optional

from .source.cluster_source import ClusterSource
from .source.static_source import StaticSource
from .source.view import ClusterView
from .sync.node import NodeSync


class Views:
    """The cluster's view with static Services, and until the cluster is known, a view with static Services only."""

    def __init__(self, source: ClusterSource, static: StaticSource, sync: NodeSync) -> None:
        self._source = source
        self._static = static
        self._sync = sync
        self._first: Optional[ClusterView] = None
        static.apply(source.view)

    @property
    def current(self) -> ClusterView:
        """The view that the node is kept in sync with."""
        return self._first or self._source.view

    @property
    def static_only(self) -> bool:
        """Whether the current view is the one with static Services only."""
        return self._first is not None

    def serve_static(self) -> bool:
        """Switch to the view with static Services only; return False, without doing so, if there are none."""
        if not self._static.objects.services:
            return False
        self._first = ClusterView()
        self._static.apply(self._first)
        self._sync.follow(self._first)
        return True

    def serve_cluster(self) -> None:
        """Switch to the view of the cluster. The caller sets the node up again for it."""
        self._first = None
        self._sync.follow(self._source.view)

    def cluster_known(self, now: float) -> bool:
        """Return whether the cluster is known, by ``now`` from the copy on disk if the API server does not answer."""
        if self._source.listed:
            return True
        due = self._source.patience_ends()
        if due is None or now < due:
            return False
        self._source.use_cache()
        return True

    def look_for_static(self, directory: str = "") -> None:
        """Follow changes of the manifests of static Services, or another directory of them."""
        if directory:
            self._static.follow(directory)
        if not self._static.look():
            return
        self._static.apply(self._source.view)
        if self._first is not None:
            self._static.apply(self._first)
        if self.current.dirty:
            self._sync.note_queued()
