# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The values of the metrics that :mod:`metric_tables` declares, and their page.

prometheus_client is needed to run the agent, not to import this module.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Mapping, Optional

from ...base.errors import ConfigurationError
from ...configuration.gate_table import GATES
from ...configuration.model import KubeProxyConfiguration
from ...resources import Resource
from .metric_tables import AgentMetrics, Kind, KubeProxyMetrics, Metric, ServiceLevels, declared

try:
    import prometheus_client
    import prometheus_client.core

    HAS_PROMETHEUS_CLIENT = True
except ImportError:
    HAS_PROMETHEUS_CLIENT = False

#: Returns for keys of a table the value of the metric, or its values by those of its labels; other keys are ignored.
Read = Callable[[], Mapping[str, Any]]


class Sampled:
    """A registry that exposes metrics as kube-proxy does.

    It omits metrics without any sample yet, and the creation times of counters and histograms, which prometheus_client
    exposes as additional gauges; versions before 0.17 cannot disable them.
    """

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that have samples."""
        for metric in self._registry.collect():
            if metric.type != "gauge":
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            if metric.samples:
                yield metric


def _create(metric: Metric, registry: Any) -> Any:
    """Return an object of prometheus_client that holds the values of a metric."""
    if metric.kind is Kind.HISTOGRAM:
        return prometheus_client.Histogram(
            metric.name, metric.text, metric.labels, buckets=metric.buckets, registry=registry
        )
    create = prometheus_client.Counter if metric.kind is Kind.COUNTER else prometheus_client.Gauge
    created = create(metric.name, metric.text, metric.labels, registry=registry)
    for values in metric.starts:
        created.labels(*values)
    return created


class _OnScrape:
    """Reads metrics when they are requested; ``table`` names them, and those that ``read`` omits are not exposed."""

    def __init__(self, table: Mapping[str, Metric], read: Read) -> None:
        self._table = table
        self._read = read

    def collect(self) -> Iterator[Any]:
        """Yield the current values."""
        values = self._read()
        for key, metric in self._table.items():
            if key not in values:
                continue
            core = prometheus_client.core
            create = core.CounterMetricFamily if metric.kind is Kind.COUNTER else core.GaugeMetricFamily
            found = create(metric.name, metric.text, labels=metric.labels)
            value = values[key]
            for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
                found.add_metric(labels, float(number))
            yield found


class Metrics(KubeProxyMetrics, AgentMetrics, ServiceLevels):
    """All metrics of one agent in a separate registry; the attributes are prometheus_client objects.

    Raises ConfigurationError when prometheus_client is not installed.
    """

    def __init__(self) -> None:
        if not HAS_PROMETHEUS_CLIENT:
            raise ConfigurationError(
                "the Python package prometheus_client is missing on this node: "
                "install python3-prometheus-client, or let the role kubenode.proxy.agent ship it"
            )
        self.registry = self._fill(KubeProxyMetrics, AgentMetrics)
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        self.reset_slis()

    def _fill(self, *tables: type) -> Any:
        """Return a registry with the metrics of these tables, which become attributes."""
        registry = prometheus_client.CollectorRegistry()
        for table in tables:
            for attribute, metric in declared(table).items():
                setattr(self, attribute, _create(metric, registry))
        return registry

    def on_scrape(self, table: Mapping[str, Metric], read: Read) -> None:
        """Call ``read`` whenever the metrics are requested; it returns values by the keys of the table."""
        self.registry.register(_OnScrape(table, read))

    def observe_request(self, method: str, host: str, code: str, seconds: Optional[float]) -> None:
        """Count a request to the API server; ``seconds`` is None if its duration is meaningless."""
        self.rest_requests.labels(code, host, method).inc()
        if seconds is not None:
            self.rest_duration.labels(host, method).observe(seconds)

    def show_gates(self, configuration: KubeProxyConfiguration) -> None:
        """Show the feature gates in effect."""
        for name, gate in GATES.items():
            self.features.labels(name, gate.stage).set(int(configuration.gate(name)))

    def expect_repairs(self, tables: Iterable[Resource[Any, Any]]) -> None:
        """Expose the repair counters of these tables from the start, because a new series shows no increase."""
        for table in tables:
            self.drift_repaired.labels(table.kind, table.family)

    def observe_health(self, kind: str, good: bool) -> None:
        """Record the result of a health check (``kind``: healthz or livez; KEP-3466)."""
        self.health_check.labels("proxy", kind).set(int(good))
        self.health_checks.labels("proxy", kind, "success" if good else "error").inc()

    def reset_slis(self) -> None:
        """Reset the results of health checks."""
        self._slis = self._fill(ServiceLevels)

    def text(self, slis: bool = False) -> bytes:
        """Return all metrics in the Prometheus text format, or only the service level indicators."""
        shown: Any = Sampled(self._slis if slis else self.registry)
        result: bytes = prometheus_client.generate_latest(shown)
        return result
