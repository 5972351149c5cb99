# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The metrics of syncs: durations, the sizes of tables, and the rules written."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

from ...base.errors import ProxyError
from ..sync.tables import FULL, PARTIAL, SyncResult
from ..telemetry.metrics import Metrics
from .proxier import Proxier
from .setup import Proxiers


class SyncMetrics:
    """Updates the metrics after each sync of a family."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._longest = 0.0

    def measure(
        self,
        proxiers: Proxiers,
        proxier: Proxier,
        kind: str,
        seconds: float,
        result: SyncResult,
        *,
        latencies: Iterable[float],
    ) -> None:
        """Record a sync of a family that succeeded.

        ``seconds``: how long it took. ``latencies``: the seconds since the triggers of the changes that it programmed.
        """
        metrics, name = self._metrics, proxier.family
        self._observe(proxiers, proxier, kind, seconds)
        metrics.last_sync.labels(name).set_to_current_time()
        for latency in latencies:
            metrics.programming_duration.labels(name).observe(latency)
        totals = proxier.summaries.totals
        metrics.no_local_endpoints.labels("internal", name).set(totals.no_local_internal)
        metrics.no_local_endpoints.labels("external", name).set(totals.no_local_external)
        for stage in proxier.stages:
            rows = proxier.tables.desired.get(stage.resource.kind)
            if rows is not None:
                metrics.table_entries.labels(stage.resource.kind, stage.resource.family).set(len(rows))
        metrics.service_annotations_ignored.labels(proxier.family).set(len(proxier.ignored))
        self._longest = max([self._longest, *result.seconds.values()])
        metrics.longest_kernel_call.set(self._longest)
        if kind == FULL:
            self.count_rules(proxiers, proxier)
        self._count_written(proxiers, proxier, kind, result)

    def count_rules(self, proxiers: Proxiers, proxier: Proxier) -> None:
        """Update the gauge of iptables rules; it costs O(cluster), so it is not done with every sync."""
        for table, rules in proxiers.mode.rule_counts(proxier.tables.desired).items():
            self._metrics.iptables_rules.labels(table, proxier.family).set(rules)

    def _count_written(self, proxiers: Proxiers, proxier: Proxier, kind: str, result: SyncResult) -> None:
        """Set the gauges of the rules that the last sync wrote; a full sync counts all rules."""
        written: Mapping[str, Mapping[Any, Any]] = proxier.tables.desired
        if kind != FULL:
            written = {item.resource.kind: item.change.new_values() for item in result.changes}
        for table, rules in proxiers.mode.rule_counts(written).items():
            self._metrics.iptables_rules_last.labels(table, proxier.family).set(rules)

    def _observe(self, proxiers: Proxiers, proxier: Proxier, kind: str, seconds: float) -> None:
        metrics, name = self._metrics, proxier.family
        metrics.sync_duration.labels(name).observe(seconds)
        if proxiers.mode.measures_kinds:
            by_kind = metrics.full_sync_duration if kind == FULL else metrics.partial_sync_duration
            by_kind.labels(name).observe(seconds)

    def count_failure(self, proxiers: Proxiers, proxier: Proxier, kind: str, seconds: float, error: ProxyError) -> None:
        """Count a failed sync that took ``seconds`` as kube-proxy counts it in this mode."""
        self._observe(proxiers, proxier, kind, seconds)
        for name in proxiers.mode.failure_counters(error, kind == PARTIAL):
            getattr(self._metrics, name).labels(proxier.family).inc()
