# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The view that the node is kept in sync with: the cluster's, and until that is known, one of essential Services."""

from __future__ import annotations

from typing import Callable, Optional

from ..base.progress import Progress
from ..cluster.api_addresses import NO_CLAIMS
from ..cluster.claims import Claim
from ..cluster.model import NamespacedName
from ..cluster.state import ClusterState
from .services.node import NodeSync
from .source.cluster_source import ClusterSource
from .source.first_services import FirstObjects
from .source.static_source import StaticSource
from .source.view import ClusterView


class Views:
    """The cluster's view with static Services, and on a node that serves nothing, a preliminary view.

    The preliminary view has static Services, which may lead to the API servers, and the essential Services of the
    cluster. It is incomplete, so it is separate: code that needs the whole cluster uses the source's view, which is not
    known yet. ``progress`` is called while it is filled.
    """

    def __init__(self, source: ClusterSource, static: StaticSource, sync: NodeSync, progress: Progress) -> None:
        self._source = source
        self._static = static
        self._sync = sync
        self._progress = progress
        self._preliminary: Optional[ClusterView] = None
        self._servers = NO_CLAIMS
        self._external_ranges: tuple[str, ...] = ()
        self._change(lambda state: state.set_static(static.objects))

    @property
    def current(self) -> ClusterView:
        """The view that the node is kept in sync with."""
        return self._preliminary or self._source.view

    @property
    def preliminary(self) -> bool:
        """Whether the current view is the preliminary one."""
        return self._preliminary is not None

    @property
    def has_static(self) -> bool:
        """Whether there are static Services."""
        return bool(self._static.objects.services)

    def begin_preliminary(self) -> None:
        """Switch to the preliminary view, which has the static Services."""
        self._preliminary = view = ClusterView(progress=self._progress)
        view.state.set_api_servers(self._servers)
        view.state.set_external_ranges(self._external_ranges)
        view.dirty |= view.state.set_static(self._static.objects)
        self._sync.follow(view)

    def add_first(self, found: FirstObjects) -> None:
        """Add the first Services of the cluster to the preliminary view."""
        self._source.keep_first(found)
        if self._preliminary is not None:
            for batch in found.batches:
                self._preliminary.apply(batch)

    def serve_cluster(self) -> None:
        """Switch to the view of the cluster. The caller sets the node up for it."""
        self._preliminary = None
        self._sync.follow(self._source.view)

    def cluster_known(self, now: float) -> bool:
        """Return whether the cluster is known; after the patience, load the copy on disk."""
        if self._source.listed:
            return True
        due = self._source.patience_ends()
        if due is None or now < due:
            return False
        return self._source.use_cache()

    def protect(self, servers: frozenset[Claim]) -> None:
        """Protect the addresses of the API servers that the agent was given, beside those that the cluster names."""
        if servers == self._servers:
            return
        self._servers = servers
        self._change(lambda state: state.set_api_servers(servers))

    def confine(self, external_ranges: tuple[str, ...]) -> None:
        """Limit external addresses of Services of the cluster to these CIDRs, if there are any."""
        self._external_ranges = external_ranges
        self._change(lambda state: state.set_external_ranges(external_ranges))

    def poll_static(self, directory: str = "") -> None:
        """Follow changes of the manifests of static Services; ``directory``: a new place for them."""
        if directory:
            self._static.follow(directory)
        if self._static.poll():
            self._change(lambda state: state.set_static(self._static.objects))

    def _change(self, change: Callable[[ClusterState], frozenset[NamespacedName]]) -> None:
        """Apply a change of the node's settings to each view; it returns the Services that it affects."""
        for view in list(dict.fromkeys((self._source.view, self.current))):
            view.dirty |= change(view.state)
        if self.current.dirty:
            self._sync.note_queued()
