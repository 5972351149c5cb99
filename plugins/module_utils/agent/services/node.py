# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node that an agent keeps in sync: its proxiers, when they sync, and what follows a sync."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Collection, Mapping, Optional

from ...base.addresses import FAMILIES
from ...base.errors import KernelError, ProxyError
from ...cluster.state import ClusterState
from ...configuration.model import KubeProxyConfiguration
from ...convergence.handles import KernelHandles
from ...convergence.request import Request
from ...event_reasons import Reason
from ...kernel.parameters.sysctls import SysctlsResource
from ..api.events import WARNING
from ..drift.watch import Watching
from ..other_proxy import OtherProxy
from ..ports.health import ProxyHealth
from ..ports.surface import PortKeeper, Surface
from ..reports import Reports
from ..source.view import ClusterView
from ..sync.schedule import Schedule
from ..telemetry.log import INFO
from ..telemetry.metric_tables import PACKETS
from ..threads.collector import trim_memory
from ..threads.failures import error_text
from ..threads.timers import RETRY_SECONDS, Timers
from .followups import Followups
from .losses import EndpointLossWatch
from .node_follower import NodeFollower
from .notices import AnnotationWarnings, RefusalEvents
from .other_modes import OtherModes
from .portions import WaitingServices
from .setup import Proxiers, set_up, with_current_addresses
from .slow_start import SlowStart
from .syncer import Syncer, SyncOutcome

ADDRESS_PAUSE_SECONDS = 0.5
#: kube-proxy 1.36 syncs at least this often in iptables and nftables mode.
LONGEST_INTERVAL_SECONDS = 3600.0


class NodeSync:
    """Keeps one node in sync with a cluster view.

    ``proxiers`` is None until :meth:`set_up`. ``configuration`` is that of the mode in effect. ``last_sync_end``: when
    the last sync ended, by the monotonic clock; 0 before the first one. ``is_behind`` returns whether changes of
    the cluster have arrived that the view does not have yet.
    """

    def __init__(
        self,
        configuration: KubeProxyConfiguration,
        *,
        view: ClusterView,
        health: ProxyHealth,
        surface: Surface,
        ports: PortKeeper,
        handles: KernelHandles,
        timers: Timers,
        is_behind: Callable[[], bool],
        reports: Reports,
        losses: EndpointLossWatch,
        other_proxy: OtherProxy,
    ) -> None:
        self.configuration = configuration
        self.proxiers: Optional[Proxiers] = None
        self.last_sync_end = 0.0
        self.syncer = Syncer(view, health, surface=surface, reports=reports, losses=losses, other_proxy=other_proxy)
        self.schedule = _schedule(configuration)
        self.follower = NodeFollower(timers, reports, zone_changed=self._zone_changed)
        self._view = view
        self._health = health
        reports.metrics.on_scrape(PACKETS, self._packets)
        self._surface = surface
        self._ports = ports
        self._handles = handles
        self._clock = timers.clock
        self._log, self._limited, self._metrics, self._post = reports
        self._other_proxy = other_proxy
        self._annotation_warnings = AnnotationWarnings(reports)
        self._refusals = RefusalEvents(reports)
        # Whether the node must be set up again, because a sync ended by an unexpected exception or IPVS was unloaded,
        # and what it was set up for.
        self._broken = False
        self._request: Optional[Request] = None
        self._slow_start = SlowStart(timers.clock)
        self.watching = Watching(
            handles,
            timers,
            reports,
            other_proxy,
            suspect=self.syncer.suspect,
            request=self._request_sync,
            addresses_changed=self.refresh_addresses_soon,
            reopen=self._watch_again,
        )
        self._followups = Followups(
            timers,
            reports,
            self.syncer,
            self._slow_start,
            proxiers=lambda: self.proxiers,
            request=self._request_sync,
            check=self._check_everything,
            changed=self._changed,
        )
        self.other_modes = OtherModes(
            handles,
            timers,
            proxiers=lambda: self.proxiers,
            removed=self._changed,
            reports=reports,
            other_proxy=other_proxy,
        )
        self._addresses = timers.add("refresh addresses", self._refresh_addresses)
        self._waiting = WaitingServices(timers, is_behind, self._sync_waiting)

    def set_up(self, request: Request) -> Proxiers:
        """Prepare the kernel, and create and return proxiers without any Service yet.

        Raises PreflightError if the mode cannot work here, before anything is changed; ConfigurationError; KernelError.
        """
        self._note_lost()
        proxiers = set_up(request, self._handles)
        self._broken = False
        self._request = request._replace(cluster=ClusterState())
        known = self.proxiers.warnings if self.proxiers is not None else ()
        for warning in proxiers.warnings:
            if warning not in known:
                self._log.warning(warning)
        node = proxiers.node_view.node
        self.follower.set_up_for(node)
        if node is not None:
            self._health.node_seen(node)
        self._surface.configure(proxiers.configuration)
        served = [proxier.family for proxier in proxiers.families]
        self._surface.keep_families(served)
        for name in FAMILIES:
            if name not in served:
                self._health.forget(name)
        self.configuration = proxiers.configuration
        self.schedule = _schedule(proxiers.configuration)
        for proxier in proxiers.families:
            self._health.updated(proxier.family)
            # The first sync counts as requested, as in kube-proxy, also in a family without any Service.
            self._metrics.last_queued.labels(proxier.family).set_to_current_time()
            self._metrics.expect_repairs(stage.resource for stage in proxier.stages)
        self._metrics.expect_repairs([SysctlsResource(())])
        # The next sync opens a new one, for these proxiers.
        self.watching.close()
        self._view.set_rates(proxiers.rates)
        before, self.proxiers = self.proxiers, proxiers
        self.other_modes.set_up(before, proxiers)
        self._log.info(
            "programming this node",
            node=proxiers.node_view.name,
            mode=proxiers.configuration.mode,
            reason=proxiers.mode_reason,
            families=",".join(served),
        )
        return proxiers

    def _packets(self) -> Mapping[str, Any]:
        """Return the values of the metrics of the table PACKETS that the mode has."""
        proxiers = self.proxiers
        # The kernel cannot be read. The code that writes to it reports that; other metrics are served.
        with contextlib.suppress(KernelError):
            contexts = [proxier.context for proxier in proxiers.families] if proxiers is not None else []
            return proxiers.mode.packets(contexts, self._handles) if proxiers is not None else {}
        return {}

    def follow(self, view: ClusterView) -> None:
        """Sync with another view from now on. The caller sets the node up again and syncs as for the first time."""
        if self.proxiers is not None:
            self.syncer.begun = frozenset(self._view.state.services)
        self._view = self.syncer.view = view

    def rebuild(self, request: Request) -> None:
        """Set up again because the node's identity or the configuration changed; the next sync applies the difference.

        Raises as :meth:`set_up` does; the proxiers do not change in that case.
        """
        self.set_up(request)
        self._view.dirty |= set(self._view.state.services)
        self.schedule.request()

    def end_connections(self) -> None:
        """End the connections that have been recorded for that."""
        self._followups.resets.follow()

    def sync(self, first: bool = False) -> None:
        """Bring the kernel in sync with the view; failures are logged, counted and tried again by the schedule."""
        proxiers = self.proxiers
        if proxiers is None:
            return
        self.schedule.started()
        started = self._clock()

        def work() -> SyncOutcome:
            current = proxiers
            if self._broken and self._request is not None:
                current = self.set_up(self._request._replace(cluster=self._view.state))
            self._slow_start.update(self._view, self.configuration.node_proxy.service_policy)
            begins = first or not self.syncer.started
            return self.syncer.start(current) if begins else self.syncer.sync(current)

        outcome = self._attempt(work)
        if outcome is not None:
            self.schedule.ended(self._clock(), outcome.succeeded)
            self._synced(self.proxiers or proxiers, outcome, started)

    def _sync_waiting(self) -> None:
        """Sync a portion of the Services that wait. It is no run of the schedule, so that others need not wait."""
        proxiers = self.proxiers
        if proxiers is None or self._broken or not self.syncer.is_waiting:
            return
        started = self._clock()
        outcome = self._attempt(lambda: self.syncer.sync_waiting(proxiers))
        if outcome is not None:
            if not outcome.succeeded:
                self.schedule.ended(self._clock(), False)
            self._synced(proxiers, outcome, started)

    def _attempt(self, work: Callable[[], SyncOutcome]) -> Optional[SyncOutcome]:
        """Return the outcome of a sync, None if it ended by an unexpected exception."""
        try:
            return work()
        except MemoryError:
            raise
        except Exception as error:
            self._sync_broken(error)
            return None

    def _synced(self, proxiers: Proxiers, outcome: SyncOutcome, started: float) -> None:
        """Do what follows a sync."""
        self._note_lost()
        self.last_sync_end = time.monotonic()
        if outcome.observed:
            # Before the drift watch, which may read whole tables, needs memory as well.
            trim_memory()
        if self.watching.drift is None:
            # Not before the first sync of a node: it may cause more notifications than any buffer holds.
            self.watching.open(proxiers.mode.subsystems, proxiers.families)
        self.watching.synced(outcome.changes > 0, outcome.observed)
        self._ports.report(outcome.failed_services)
        self._annotation_warnings.update(self._view.state, proxiers.families)
        self.report_refusals()
        if outcome.loss:
            self._post(None, WARNING, Reason.ENDPOINTS_LOST, "Sync", outcome.loss)
        if self.syncer.is_waiting:
            for proxier in proxiers.families:
                self._health.queued(proxier.family)
            self._waiting.follow()
        self._followups.synced(proxiers, outcome, started)
        if self.other_modes.due and outcome.succeeded:
            self.other_modes.clean_up()
        if self._other_proxy.pause:
            # At the end of the pause it turns out whether the other proxy is still there.
            self.watching.suspect({proxier.family: "another service proxy" for proxier in proxiers.families})

    def _sync_broken(self, error: Exception) -> None:
        """Report a sync that ended by an unexpected exception, and set the node up again for the next one.

        The desired tables may be incomplete, so they must not be used any more.
        """
        text = error_text(error)
        self._broken = True
        self.syncer.broken(text)
        for proxier in self.proxiers.families if self.proxiers is not None else ():
            self._health.queued(proxier.family)
        self.schedule.ended(self._clock(), succeeded=False)
        self._limited.error("sync", "a sync has failed; the node is set up again for the next one", error=text)

    def _note_lost(self) -> None:
        """Request a sync that sets the node up again if IPVS was unloaded: proxiers and watch have its old number."""
        if self._handles.forget_lost():
            self._broken = True
            self.syncer.broken("IPVS was unloaded")
            self._limited.warning("lost", "IPVS was unloaded; the node is set up again for the next sync")
            self.schedule.request()

    def _watch_again(self) -> None:
        if self.proxiers is not None and self.watching.drift is None:
            self.watching.open(self.proxiers.mode.subsystems, self.proxiers.families)
            # Nothing has reported the changes since the last sync.
            self._check_everything()

    def clean_up_once_serving(self) -> None:
        """Remove other modes' leftovers, after the next sync if the last one has failed: until then, they serve."""
        self.other_modes.due = True
        if not self.syncer.last_error:
            self.other_modes.clean_up()

    def _changed(self) -> None:
        """Tell the drift watch that the agent may have removed something outside of a sync."""
        self.watching.synced(True, False)

    def report_refusals(self) -> None:
        """Report objects that have become invalid; they cause no sync."""
        if self.proxiers is not None:
            self._refusals.update(self._view.state.refusals, self._view.state.skipped)

    def request_if_needed(self) -> None:
        """Request a sync if the view or the kernel has changed."""
        self._note_lost()
        # While Services wait, the next portion is a sync.
        if self._view.dirty or (self.syncer.suspects and not self.syncer.is_waiting):
            self.schedule.request()

    def delay(self) -> float:
        """Return the seconds until a sync, or the drift watch, is due."""
        return min(self.schedule.delay(self._clock()), self.watching.delay())

    @property
    def is_complete(self) -> bool:
        """Whether the last sync programmed everything that the view had, and no Service waits."""
        syncer = self.syncer
        return self.proxiers is not None and syncer.started and not syncer.is_waiting and not syncer.last_error

    @property
    def is_due(self) -> bool:
        """Whether a sync is due by the schedule."""
        return self.schedule.delay(self._clock()) <= 0

    def refresh_addresses_soon(self) -> None:
        """Refresh the node's addresses and the ServiceCIDRs when the burst of changes is over."""
        self._addresses.start(ADDRESS_PAUSE_SECONDS)

    def note_queued(self, families: Collection[str] = FAMILIES) -> None:
        """Record that the view has changed in these families, for the schedule, the health check and the metrics.

        A family without a change is not queued: if its syncs fail, it does not become unhealthy by changes of others.
        """
        if self.proxiers is None:
            return
        self.schedule.request()
        for proxier in self.proxiers.families:
            if proxier.family in families:
                self._health.queued(proxier.family)
                self._metrics.last_queued.labels(proxier.family).set_to_current_time()

    def node_changed(self, name: str, rebuild: Callable[[], None]) -> None:
        """Follow a change of this node's Node object. ``rebuild`` sets the node up again."""
        node = self._view.state.nodes.get(name)
        if node is None:
            self.follower.deleted(name)
            return
        self._health.node_seen(node)
        if self.proxiers is not None and self.follower.follow(node, self.proxiers, rebuild):
            self._every_service_changed()

    def _zone_changed(self, zone: str) -> None:
        for proxier in self.proxiers.families if self.proxiers is not None else ():
            proxier.set_zone(zone)
            proxier.needs_full = True
        self._every_service_changed()

    def _every_service_changed(self) -> None:
        self._view.dirty |= set(self._view.state.services)
        self.note_queued()

    def _request_sync(self) -> None:
        # The schedule may have been replaced meanwhile, by a new configuration. The sync finds out what is due.
        self.schedule.request()

    def _check_everything(self) -> None:
        """Have the next sync compare every family with the kernel, even if no change was detected."""
        proxiers = self.proxiers.families if self.proxiers is not None else ()
        self.watching.suspect({proxier.family: "regular check" for proxier in proxiers})
        self._view.retry()
        self.schedule.request()

    def _refresh_addresses(self) -> None:
        """Apply changes of the node's addresses and of ServiceCIDRs; program only what depends on them."""
        proxiers = self.proxiers
        if proxiers is None:
            return
        try:
            self.proxiers, settings = with_current_addresses(proxiers, self._view.state)
        except ProxyError as error:
            self._limited.warning("addresses", "the node's addresses cannot be read, retrying", error=error)
            self._addresses.start(RETRY_SECONDS)
            return
        state = self._view.state
        changed = [item.family for item in proxiers.families if item.follow(settings[item.family], state)]
        self._view.set_rates(proxiers.rates)
        if changed:
            self._limited.write("changed", INFO, "addresses or ServiceCIDRs changed", families=",".join(changed))
            self.schedule.request()


def _schedule(configuration: KubeProxyConfiguration) -> Schedule:
    return Schedule(configuration.min_sync_period, configuration.sync_period, LONGEST_INTERVAL_SECONDS)
