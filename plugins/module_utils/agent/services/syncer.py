# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Syncs of all families, with metrics, health and one log line each."""

from __future__ import annotations

import time
from functools import partial
from typing import AbstractSet, Iterable, NamedTuple, Sequence

from ...base.errors import KernelError, ProxyError
from ...cluster.model import NamespacedName
from ...preflight.cluster_state import FIRST_SERVICES, loss_findings
from ..drift.repairs import ServiceRepairs
from ..other_proxy import OtherProxy
from ..ports.health import FailedPort, ProxyHealth
from ..ports.surface import Surface
from ..reports import Reports
from ..source.first_services import cold_batches
from ..source.view import ClusterView, by_kind
from ..sync.table_sync import TableSync
from ..sync.tables import FULL, PARTIAL
from ..threads.failures import MOST_FAILURES
from ..threads.timers import monotonic
from .losses import EndpointLossWatch
from .notices import Notices
from .portions import NO_STEPS, Portions, Steps
from .proxier import Proxier
from .setup import Proxiers
from .sync_metrics import SyncMetrics

COLD = "cold"


class SyncOutcome(NamedTuple):
    """The result of syncing all families: success, new failures of health check node ports, number of changed entries.

    ``observed``: every family was compared with the kernel as a whole. ``loss``: in words, if most Services have
    begun to lose their endpoints. ``held_until``: when (by time.monotonic) a held-back loss is applied, or 0.
    ``earlier``: the seconds that comparisons which ended with this sync had taken before it.
    """

    succeeded: bool
    failed_services: list[FailedPort]
    changes: int
    observed: bool
    loss: str = ""
    held_until: float = 0.0
    earlier: float = 0.0


class Syncer:
    """Brings the families of a node in sync with the cluster view.

    ``suspects``: families whose tables another program may have changed, with the reason; they are observed.
    ``begun``: the Services of the previous view, the only ones in an otherwise empty kernel. ``last_error`` is
    empty after a sync that succeeded. ``started``: the first sync of the node has succeeded; until then, it must be
    repeated as the first one.
    """

    def __init__(
        self,
        view: ClusterView,
        health: ProxyHealth,
        *,
        surface: Surface,
        reports: Reports,
        losses: EndpointLossWatch,
        other_proxy: OtherProxy,
    ) -> None:
        self.view = view
        self.begun: frozenset[NamespacedName] = frozenset()
        self.last_error = ""
        self.started = False
        self.syncs = 0
        self._health = health
        self._log, self._metrics = reports.log, reports.metrics
        self.measures = SyncMetrics(reports.metrics)
        self.surface = surface
        self._notices = Notices(reports)
        self.repairs = ServiceRepairs(reports, other_proxy)
        self.tables = TableSync(self.repairs)
        self.suspects, self.suspect = self.tables.suspects, self.tables.suspect
        self._comparisons = self.tables.comparisons
        self.losses = losses
        self._held: set[NamespacedName] = set()
        self._portions = Portions()
        # The Services of a sync that has failed, which some family may not have applied.
        self._unapplied: set[NamespacedName] = set()
        self._filling: dict[str, float] = {}
        # Whether the last portion took steps of a comparison.
        self._in_turn = False

    def start(self, proxiers: Proxiers) -> SyncOutcome:
        """Sync a node for the first time: adopt the current state, or fill an empty kernel in order of importance."""
        self.started = False
        self._portions.clear()
        self._comparisons.clear()
        # Since an attempt that has failed, the desired tables may have Services that were deleted.
        services = list(dict.fromkeys([*self.view.state.services, *self.view.pop_dirty(), *self._unapplied]))
        self._unapplied = set(services)
        begun, self.begun = self.begun, frozenset()
        try:
            cold = bool(services and proxiers.families) and (
                begun or all(proxier.is_cold() for proxier in proxiers.families)
            )
        except KernelError as error:
            return self._failure(proxiers, str(error))
        filled = self._fill(proxiers, services, begun) if cold else set()
        try:
            for proxier in proxiers.families:
                if proxier.family not in filled:
                    self._update(proxier, services)
        except ProxyError as error:
            return self._failure(proxiers, str(error))
        self._held, self._unapplied = set(), set()
        self.losses.forget()
        outcome = self.sync(proxiers)
        if not outcome.succeeded:
            return outcome
        self.started = True
        self.losses.programmed(services, lambda service: self._serves(proxiers, service))
        return outcome._replace(loss=self._loss_of_start(proxiers))

    def _loss_of_start(self, proxiers: Proxiers) -> str:
        """Describe the loss by the first sync compared with what the kernel served before; empty if it is small."""
        services = self.view.state.services
        names = {ip: str(key) for key, item in services.items() for ip in (item.cluster_ip_v4, item.cluster_ip_v6)}
        for proxier in proxiers.families:
            after = {
                ip
                for key, item in services.items()
                for ip in (item.cluster_ip_v4, item.cluster_ip_v6)
                if proxier.summaries.serves(key)
            }
            for finding in loss_findings(proxier.take_found_served(), after, names, self.losses.max_percent):
                self._report_loss(finding.what)
                return finding.what
        return ""

    def _serves(self, proxiers: Proxiers, service: NamespacedName) -> bool:
        return any(proxier.summaries.serves(service) for proxier in proxiers.families)

    def _hold_back(self, proxiers: Proxiers, dirty: set[NamespacedName]) -> str:
        """Check the change of these Services for a loss; remove held-back Services from ``dirty``.

        Return a description of the loss if it is a new one.
        """
        state = self.view.state
        loss = self.losses.judge(
            dirty, lambda service: any(proxier.would_serve(state, service) for proxier in proxiers.families)
        )
        if loss.held and not all(proxier.rendered for proxier in proxiers.families):
            # Its tables do not have the former endpoints, so without them the Services would be removed.
            self._log.warning("a loss is no longer held back, because the node was set up again", loss=loss.text)
            self.losses.release()
        elif loss.held:
            self._held = loss.services
            dirty -= loss.services
        if not loss.is_new:
            return ""
        self._report_loss(loss.text, held=loss.held)
        return loss.text

    def _report_loss(self, text: str, held: bool = False) -> None:
        self._metrics.losses.inc()
        self._log.warning("most Services of this node lose their endpoints", loss=text, held_back=held)

    def _fill(self, proxiers: Proxiers, services: list[NamespacedName], begun: AbstractSet[NamespacedName]) -> set[str]:
        """Program an empty kernel step by step; return the families whose tables then contain every Service.

        The full sync that follows handles a failure. Its duration in the metrics includes the time of this call.
        """
        started = time.monotonic()
        state = self.view.state
        sizes = {proxier.family: proxier.size(state) for proxier in proxiers.families}
        for number, batch in enumerate(cold_batches(services, proxiers.mode.cold_batch, begun)):
            for proxier in proxiers.families:
                began = time.monotonic()
                try:
                    proxier.apply_services(state, batch, sizes[proxier.family])
                    self.tables.apply(proxier, full=number == 0)
                except ProxyError as error:
                    self._log.error("sync failed", family=proxier.family, kind=COLD, error=error)
                    self.measures.count_failure(proxiers, proxier, FULL, time.monotonic() - began, error)
                    return set()
                finally:
                    self._filling[proxier.family] = self._filling.get(proxier.family, 0.0) + time.monotonic() - began
            if number and batch[0] in FIRST_SERVICES:
                seconds = round(time.monotonic() - started, 3)
                self._log.info("API server and DNS are served", services=len(batch), seconds=seconds)
        seconds = round(time.monotonic() - started, 3)
        self._log.info("filled an empty node", services=len(services), seconds=seconds)
        return {proxier.family for proxier in proxiers.families}

    def sync(self, proxiers: Proxiers) -> SyncOutcome:
        """Render dirty Services again and apply every family's tables to the kernel.

        Services with very many entries may wait for :meth:`sync_waiting`.
        """
        dirty = self.view.pop_dirty() | self._held | self._unapplied
        self._held, self._unapplied = set(), set()
        loss = self._hold_back(proxiers, dirty)
        for proxier in proxiers.families:
            dirty |= proxier.request_slots(self.view.state, dirty)
        if all(proxier.rendered for proxier in proxiers.families):
            dirty = self._portions.urgent(dirty, lambda service: proxiers.size_of(self.view.state, service))
        else:
            # The node was set up again: without the Services that wait, the kernel would lose them.
            self._portions.clear()
        return self._sync(proxiers, dirty)._replace(loss=loss)

    @property
    def is_waiting(self) -> bool:
        """Whether Services, or steps of a comparison, wait for :meth:`sync_waiting`."""
        return bool(self._portions.waiting or self._comparisons)

    def sync_waiting(self, proxiers: Proxiers) -> SyncOutcome:
        """Render and apply a portion of the Services that wait, or take the next steps of comparisons, in turn."""
        self._in_turn = bool(self._comparisons) and not (self._in_turn and self._portions.waiting)
        if self._in_turn:
            return self._sync(proxiers, set(), continued=True)
        began = monotonic()
        steps = self._portions.take(lambda service: proxiers.size_of(self.view.state, service))
        outcome = self._sync(proxiers, set(steps), steps)
        self._portions.took(monotonic() - began)
        return outcome

    def _sync(
        self, proxiers: Proxiers, dirty: set[NamespacedName], steps: Steps = NO_STEPS, *, continued: bool = False
    ) -> SyncOutcome:
        succeeded = True
        failed: list[FailedPort] = []
        changes = 0
        suspects = self.tables.pop_suspects()
        self._comparisons.forget_ended()
        for proxier in proxiers.families:
            suspicion = suspects.get(proxier.family, "")
            kind = FULL if proxier.needs_full else PARTIAL
            began = time.monotonic()
            try:
                self._update(proxier, dirty, steps)
                changes += self._sync_family(proxiers, proxier, len(dirty), suspicion, began, continued=continued)
            except ProxyError as error:
                succeeded = False
                self.tables.failed(proxier, suspicion, error)
                self.measures.count_failure(proxiers, proxier, kind, time.monotonic() - began, error)
                self._family_failed(proxier, str(error))
                continue
            found = proxier.summaries
            failed += self.surface.sync_service_health(proxier.settings, found.health_ports, found.health_counts)
        if not succeeded:
            self._unapplied |= dirty
        else:
            self.losses.programmed(dirty, lambda service: self._serves(proxiers, service))
        self._finish(proxiers, succeeded)
        return SyncOutcome(
            succeeded=succeeded,
            failed_services=failed,
            changes=changes,
            observed=succeeded and self._comparisons.all_ended(proxiers.families),
            held_until=self.losses.held_until,
            earlier=self._comparisons.earlier,
        )

    def _update(self, proxier: Proxier, services: Iterable[NamespacedName], steps: Steps = NO_STEPS) -> None:
        """Bring the desired tables of a family up to date with these Services.

        Raises ProxyError if many Services fail while the kernel may serve them and the tables do not have them: the
        kernel must not be made equal to these tables.
        """
        proxier.apply_services(self.view.state, services, steps=steps)
        if len(proxier.failures) > MOST_FAILURES and not proxier.has_observed:
            raise ProxyError(f"{len(proxier.failures)} Services cannot be processed; this is a defect of the agent")

    def _sync_family(
        self, proxiers: Proxiers, proxier: Proxier, dirty: int, suspicion: str, began: float, *, continued: bool
    ) -> int:
        """Apply the desired tables of a family to the kernel, and measure the sync, which ``began`` at that time.

        ``continued``: also take the next steps of a comparison that has begun before.
        """
        synced = self.tables.sync(
            proxier, suspicion, at_once=not self.started, continued=continued, later=lambda: self._large(proxiers)
        )
        kind, result = synced.kind, synced.result
        if synced.compared:
            self._portions.wait(proxier.tables.lost, lambda service: proxiers.size_of(self.view.state, service))
        filling = self._filling.pop(proxier.family, 0.0)
        seconds = time.monotonic() - began + filling + synced.earlier
        latencies = self.view.triggers.pop(proxier.family, time.time())
        changed = sum(result.counts.values())
        if synced.repaired or (changed and kind == FULL):
            proxier.stale_flows.suspect(self.view.state.services.keys())
        conntrack = self._clean_conntrack(proxier)
        self.measures.measure(proxiers, proxier, FULL if filling else kind, seconds, result, latencies=latencies)
        self._health.updated(proxier.family)
        if changed or kind == FULL or conntrack:
            self._log.info(
                "synced",
                family=proxier.family,
                kind=kind,
                dirty=dirty,
                services=len(proxier.summaries),
                endpoints=proxier.summaries.totals.endpoints,
                **result.counts,
                draining=proxier.draining,
                conntrack_deleted=conntrack,
                seconds=round(seconds, 4),
            )
        return changed + synced.repaired

    def _large(self, proxiers: Proxiers) -> set[NamespacedName]:
        """Return the Services that may wait when everything is programmed."""
        state = self.view.state
        return {service for service in state.services if proxiers.size_of(state, service).entries}

    def _clean_conntrack(self, proxier: Proxier) -> int:
        """Delete stale entries. Services work without it, so a failure is only logged and the next sync retries."""
        try:
            state = self.view.state
            deleted, seconds = proxier.stale_flows.delete(state.services, partial(proxier.service_ports, state))
        except KernelError as error:
            self._log.warning("stale connection tracking entries cannot be deleted", family=proxier.family, error=error)
            return 0
        if seconds:
            self._metrics.conntrack_duration.labels(proxier.family).observe(seconds)
            self._metrics.conntrack_deleted.labels(proxier.family).inc(deleted)
        return deleted

    def _family_failed(self, proxier: Proxier, error: str) -> None:
        self.last_error = error
        self._log.error("sync failed", family=proxier.family, error=error)

    def broken(self, error: str) -> None:
        """Record that a sync ended by an unexpected exception; the next one must be the first of a node."""
        self.last_error = error
        self.started = False

    def _failure(self, proxiers: Proxiers, error: str) -> SyncOutcome:
        self._notices.report(self.view, proxiers.families)
        for proxier in proxiers.families:
            self._family_failed(proxier, error)
        return SyncOutcome(False, [], 0, False)

    def _finish(self, proxiers: Proxiers, succeeded: bool) -> None:
        self.syncs += 1
        metrics = self._metrics
        if succeeded:
            self.last_error = ""
            self.view.synced(self._portions.waiting)
        metrics.service_changes_pending.set(self.view.pending_services)
        metrics.endpoint_changes_pending.set(self.view.pending_slices)
        for kind, count in by_kind(self.view.state.refusals).items():
            metrics.objects_refused.labels(kind).set(count)
        for kind, count in by_kind(self.view.state.skipped).items():
            metrics.parts_skipped.labels(kind).set(count)
        self._notices.report(self.view, proxiers.families)

    def drain(self, families: Sequence[Proxier]) -> tuple[int, int]:
        """Remove real servers whose connections have ended; return how many were removed and how many are kept."""
        gone = 0
        for proxier in families:
            try:
                gone += proxier.drain()
            except KernelError as error:
                proxier.needs_full = True
                self._log.error("draining failed", family=proxier.family, error=error)
        left = sum(proxier.draining for proxier in families)
        if gone:
            self._log.info("drained", removed=gone, draining=left)
        return gone, left
