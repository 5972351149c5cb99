# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's metrics: kube-proxy 1.36's names, types and labels, and our own under kubenode_proxy_.

prometheus_client is needed to run the agent, not to import this module.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Tuple

from ...base.errors import ConfigurationError
from ...configuration.feature_gates import GATES
from ...configuration.model import KubeProxyConfiguration
from ...event_reasons import Reason
from ...packaging.identity import Identity
from ...rendering.iptables.fixed import INVALID_COUNTER, LOCALHOST_COUNTER
from ...resources import Resource

try:
    import prometheus_client
    import prometheus_client.core

    HAS_PROMETHEUS_CLIENT = True
except ImportError:
    HAS_PROMETHEUS_CLIENT = False

LATENCY_BUCKETS: Tuple[float, ...] = tuple(0.001 * 2**exponent for exponent in range(15))
PROGRAMMING_BUCKETS: Tuple[float, ...] = (
    0.25,
    0.5,
    *(float(second) for second in range(1, 60)),
    *(float(second) for second in range(60, 120, 5)),
    *(float(second) for second in range(120, 301, 30)),
)

REST_BUCKETS: Tuple[float, ...] = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)

_PACKET_COUNTERS = (
    (
        INVALID_COUNTER,
        "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
        "Packets dropped because connection tracking finds them invalid",
    ),
    (
        LOCALHOST_COUNTER,
        "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        "Packets to node ports on a loopback address that were accepted",
    ),
)
_FAMILY = ("ip_family",)


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


class PacketCounters:
    """The packets of nfacct counters, read from the kernel whenever the metrics are requested."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        """Yield one metric for each counter that exists."""
        packets = self._read()
        for counter, name, text in _PACKET_COUNTERS:
            if counter in packets:
                yield prometheus_client.core.CounterMetricFamily(name, text, value=packets[counter])


class CountedElsewhere:
    """A counter whose values another part of the agent maintains, by the value of one label."""

    def __init__(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, int]]) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._read = read

    def collect(self) -> Iterator[Any]:
        """Yield the counter with its current values."""
        found = prometheus_client.core.CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in self._read().items():
            found.add_metric([value], count)
        yield found


class ServerChanges:
    """How often the agent has begun to use another API server."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        """Yield the counter with its current value."""
        name, text = "kubenode_proxy_api_server_changes_total", "Times another API server was chosen"
        yield prometheus_client.core.CounterMetricFamily(name, text, value=self._read())


_FORWARDING_GAUGES = (
    ("connections", "connections", "TCP connections that are open in userspace mode"),
    ("sessions", "sessions", "UDP sessions that are open in userspace mode"),
    ("unboundCount", "listeners_unbound", "Listeners whose socket cannot be opened"),
)
_FORWARDING_COUNTERS = (
    ("accepted", "connections", "TCP connections that were accepted"),
    ("udpSessions", "sessions", "UDP sessions that were begun"),
    ("bytes", "bytes", "Bytes moved by TCP connections, in both directions"),
    ("connectFailures", "connect_failures", "Attempts to connect to an endpoint that failed"),
    ("unreachable", "unreachable", "Connections refused because no endpoint could be reached"),
    ("refusedBySourceRange", "refused_by_source_range", "Connections and datagrams from outside the source ranges"),
    ("refusedByLimit", "refused_by_limit", "Connections refused because there were too many"),
    ("evicted", "evicted", "Connections and sessions ended to make room for others"),
    ("droppedDatagrams", "dropped_datagrams", "Datagrams that could not be forwarded"),
)


class Forwarded:
    """What the agent forwards in userspace mode; no metrics in other modes."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        """Yield the current values."""
        found = self._read()
        if not found:
            return
        for key, name, text in _FORWARDING_GAUGES:
            yield prometheus_client.core.GaugeMetricFamily(f"kubenode_proxy_forwarding_{name}", text, value=found[key])
        for key, name, text in _FORWARDING_COUNTERS:
            full = f"kubenode_proxy_forwarding_{name}_total"
            yield prometheus_client.core.CounterMetricFamily(full, text, value=found[key])


class Metrics:
    """All metrics of one agent in a separate registry; the attributes are prometheus_client objects.

    Raises ConfigurationError when prometheus_client is not installed.
    """

    def __init__(self) -> None:
        if not HAS_PROMETHEUS_CLIENT:
            raise ConfigurationError(
                "the Python package prometheus_client is missing on this node: "
                "install python3-prometheus-client, or let the role kubenode.proxy.agent ship it"
            )
        self.registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        #: The packets of nfacct counters by name; the agent replaces it in the mode that has them.
        self.packets: Callable[[], Mapping[str, int]] = dict
        self.registry.register(PacketCounters(self._packets_now))
        #: The state of the forwarder; empty where no mode uses it.
        self.forwarding: Callable[[], Mapping[str, Any]] = dict
        self.registry.register(Forwarded(self._forwarding_now))
        #: How often the agent has begun to use another API server.
        self.api_server_changes: Callable[[], int] = int
        #: Connections that the HTTP server closed before an answer, by reason.
        self.http_closed: Callable[[], Mapping[str, int]] = dict
        self._kube_proxy()
        self._kubernetes()
        self._own()
        self._service_levels()

    def _packets_now(self) -> Mapping[str, int]:
        return self.packets()

    def _forwarding_now(self) -> Mapping[str, Any]:
        return self.forwarding()

    def _histogram(
        self, name: str, text: str, labels: Tuple[str, ...] = _FAMILY, buckets: Tuple[float, ...] = LATENCY_BUCKETS
    ) -> Any:
        return prometheus_client.Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Tuple[str, ...] = ()) -> Any:
        return prometheus_client.Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Tuple[str, ...] = ()) -> Any:
        return prometheus_client.Counter(name, text, labels, registry=self.registry)

    def _kube_proxy(self) -> None:
        self.sync_duration = self._histogram(
            "kubeproxy_sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds"
        )
        self.full_sync_duration = self._histogram(
            "kubeproxy_sync_full_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for full resyncs"
        )
        self.partial_sync_duration = self._histogram(
            "kubeproxy_sync_partial_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for partial resyncs",
        )
        self.last_sync = self._gauge(
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "Time of the last successful sync", _FAMILY
        )
        self.last_queued = self._gauge(
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "Time a sync was last requested", _FAMILY
        )
        self.programming_duration = self._histogram(
            "kubeproxy_network_programming_duration_seconds",
            "Seconds from a change of a Service's endpoints until the kernel has it",
            buckets=PROGRAMMING_BUCKETS,
        )
        self.endpoint_changes_pending = self._gauge(
            "kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Pending endpoint changes"
        )
        self.endpoint_changes = self._counter(
            "kubeproxy_sync_proxy_rules_endpoint_changes_total", "Endpoint changes seen"
        )
        self.service_changes_pending = self._gauge(
            "kubeproxy_sync_proxy_rules_service_changes_pending", "Pending Service changes"
        )
        self.service_changes = self._counter("kubeproxy_sync_proxy_rules_service_changes_total", "Service changes seen")
        self.no_local_endpoints = self._gauge(
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            "Service ports (ipvs mode: Services) with a Local traffic policy and endpoints, but none on this node",
            ("traffic_policy", "ip_family"),
        )
        self.healthz = self._counter("kubeproxy_proxy_healthz_total", "Answers given by /healthz", ("code",))
        self.livez = self._counter("kubeproxy_proxy_livez_total", "Answers given by /livez", ("code",))
        self.conntrack_duration = self._histogram(
            "kubeproxy_conntrack_reconciler_sync_duration_seconds", "Latency of the search for stale conntrack entries"
        )
        self.conntrack_deleted = self._counter(
            "kubeproxy_conntrack_reconciler_deleted_entries_total", "Stale conntrack entries deleted", _FAMILY
        )
        self.iptables_restore_failures = self._counter(
            "kubeproxy_sync_proxy_rules_iptables_restore_failures_total",
            "Failed iptables-restore transactions",
            _FAMILY,
        )
        self.iptables_partial_restore_failures = self._counter(
            "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total",
            "Failed partial iptables-restore transactions",
            _FAMILY,
        )
        self.iptables_rules = self._gauge(
            "kubeproxy_sync_proxy_rules_iptables_total", "iptables rules owned", ("table", "ip_family")
        )
        self.iptables_rules_last = self._gauge(
            "kubeproxy_sync_proxy_rules_iptables_last",
            "iptables rules written by the last sync",
            ("table", "ip_family"),
        )
        self.nftables_sync_failures = self._counter(
            "kubeproxy_sync_proxy_rules_nftables_sync_failures_total", "Failed nftables transactions", _FAMILY
        )

    def _kubernetes(self) -> None:
        """Create the metrics that all components of Kubernetes have."""
        self.rest_requests = self._counter(
            "rest_client_requests_total", "Requests to the API server", ("code", "host", "method")
        )
        self.rest_duration = self._histogram(
            "rest_client_request_duration_seconds",
            "Seconds until the API server begins its answer; watches are not counted",
            ("host", "verb"),
            REST_BUCKETS,
        )
        self.features = self._gauge(
            "kubernetes_feature_enabled", "1 for a feature gate that is on, 0 for one that is off", ("name", "stage")
        )

    def observe_request(self, method: str, host: str, code: str, seconds: Optional[float]) -> None:
        """Count a request to the API server; ``seconds`` is None if its duration is meaningless."""
        self.rest_requests.labels(code, host, method).inc()
        if seconds is not None:
            self.rest_duration.labels(host, method).observe(seconds)

    def show_gates(self, configuration: KubeProxyConfiguration) -> None:
        """Show the feature gates in effect."""
        for name, gate in GATES.items():
            self.features.labels(name, gate.stage).set(int(configuration.gate(name)))

    def _closed_connections(self) -> Mapping[str, int]:
        # The surface sets the function after the metrics were created.
        return self.http_closed()

    def show_identity(self, identity: Identity) -> None:
        """Show which version of the collection and of the engine this is."""
        self.build_info.labels(identity.text, identity.engine).set(1)

    def expect_repairs(self, tables: Iterable[Resource[Any, Any]]) -> None:
        """Expose the repair counters of these tables from the start, because a new series shows no increase."""
        for table in tables:
            self.drift_repaired.labels(table.kind, table.family)

    def _own(self) -> None:
        text = "Always 1, labelled with the running version"
        self.build_info = self._gauge("kubenode_proxy_build_info", text, ("version", "engine"))
        self.http_connections = self._gauge("kubenode_proxy_http_connections", "Connections that are open")
        closed = "kubenode_proxy_http_connections_closed_total"
        text = "Connections closed before they got an answer"
        self.registry.register(CountedElsewhere(closed, text, "reason", self._closed_connections))
        self.drift_repaired = self._counter(
            "kubenode_proxy_drift_repaired_total",
            "Entries found modified or missing in the kernel and repaired",
            ("kind", "ip_family"),
        )
        self.objects_refused = self._gauge(
            "kubenode_proxy_objects_refused", "Invalid objects of the cluster that are skipped", ("kind",)
        )
        text = "Objects that cannot be processed because of a defect of the agent"
        self.objects_failed = self._gauge("kubenode_proxy_objects_failed", text)
        self.parts_skipped = self._gauge(
            "kubenode_proxy_parts_skipped", "Invalid addresses and endpoints that are skipped", ("kind",)
        )
        self.conflicts = self._gauge(
            "kubenode_proxy_conflicts", "Addresses with port, and node ports, that several Services claim"
        )
        self.service_annotations_ignored = self._gauge(
            "kubenode_proxy_service_annotations_ignored",
            "Services with annotations that do not all have an effect on this node",
            ("ip_family",),
        )
        self.check_changes = self._counter(
            "kubenode_proxy_endpoint_check_changes_total",
            "Times that an endpoint began to fail its health checks, or to pass them again",
            ("to",),
        )
        self.checked_endpoints = self._gauge(
            "kubenode_proxy_checked_endpoints", "Endpoints with health checks from this node", ("state",)
        )
        for state in ("passing", "failing"):
            self.check_changes.labels(state)
            self.checked_endpoints.labels(state)
        self.events_dropped = self._counter(
            "kubenode_proxy_events_dropped_total", "Events not posted because there were too many", ("reason",)
        )
        for reason in Reason:
            self.events_dropped.labels(reason.value)
        self.losses = self._counter(
            "kubenode_proxy_endpoint_loss_events_total",
            "Times that most Services of the node lost their endpoints together",
        )
        self.longest_kernel_call = self._gauge(
            "kubenode_proxy_longest_kernel_call_seconds",
            "The longest time spent on one kernel table in a sync since the start",
        )
        self.cache_age = self._gauge(
            "kubenode_proxy_cluster_cache_age_seconds", "Age of the cluster state kept on disk"
        )
        self.table_entries = self._gauge(
            "kubenode_proxy_table_entries", "Entries desired per resource table", ("kind", "ip_family")
        )
        self.drained = self._gauge(
            "kubenode_proxy_drained", "1 while the node is drained: health checks fail and traffic is served"
        )
        self.api_connected = self._gauge(
            "kubenode_proxy_api_connected", "1 while all watches of the API server are open"
        )

        self.api_servers = self._gauge("kubenode_proxy_api_servers", "API servers that the agent knows")
        self.registry.register(ServerChanges(self._server_changes_now))

    def _server_changes_now(self) -> int:
        return self.api_server_changes()

    def _service_levels(self) -> None:
        self.slis = prometheus_client.CollectorRegistry()
        self.health_check = prometheus_client.Gauge(
            "kubernetes_healthcheck", "Result of the last health check", ("name", "type"), registry=self.slis
        )
        self.health_checks = prometheus_client.Counter(
            "kubernetes_healthchecks_total",
            "Results of health checks",
            ("name", "type", "status"),
            registry=self.slis,
        )

    def observe_health(self, kind: str, good: bool) -> None:
        """Record the result of a health check (``kind``: healthz or livez; KEP-3466)."""
        self.health_check.labels("proxy", kind).set(int(good))
        self.health_checks.labels("proxy", kind, "success" if good else "error").inc()

    def reset_slis(self) -> None:
        """Reset the results of health checks."""
        self._service_levels()

    def text(self, slis: bool = False) -> bytes:
        """Return all metrics in the Prometheus text format, or only the service level indicators."""
        shown: Any = Sampled(self.slis if slis else self.registry)
        result: bytes = prometheus_client.generate_latest(shown)
        return result
