# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The declarations of all metrics: kube-proxy 1.36's names, types and labels, and our own under kubenode_proxy_.

A metric that the agent updates is an attribute of one of the classes. One that is read when the metrics are requested
is in one of the mappings, by the name under which its reader returns the value. The tables of the documentation are
made from both.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Mapping, NamedTuple

from ...event_reasons import Reason
from ...rendering.iptables.fixed import INVALID_COUNTER, LOCALHOST_COUNTER
from ...rendering.nftables.layout import LOCALHOST_COUNTS, LOCALHOST_LISTENERS, LOCALHOST_UNOPENED

LATENCY_BUCKETS: tuple[float, ...] = tuple(0.001 * 2**exponent for exponent in range(15))
PROGRAMMING_BUCKETS: tuple[float, ...] = (
    0.25,
    0.5,
    *(float(second) for second in range(1, 60)),
    *(float(second) for second in range(60, 120, 5)),
    *(float(second) for second in range(120, 301, 30)),
)
REST_BUCKETS: tuple[float, ...] = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)

_FAMILY = ("ip_family",)
_SERVICE_PORT = ("namespace", "service", "port", "protocol", "ip_family")


class Kind(Enum):
    """The types of the Prometheus text format that are in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """A metric: ``text`` is its help, and what the documentation says about it.

    ``starts``: values of its labels whose series exist from the start, because a new series shows no increase.
    """

    kind: Kind
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = LATENCY_BUCKETS
    starts: tuple[tuple[str, ...], ...] = ()


def counter(name: str, text: str, labels: tuple[str, ...] = (), starts: tuple[tuple[str, ...], ...] = ()) -> Any:
    """Declare a counter; in the classes below, the type is that of the object that holds its values."""
    return Metric(Kind.COUNTER, name, text, labels, starts=starts)


def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
    """Declare a gauge."""
    return Metric(Kind.GAUGE, name, text, labels)


def histogram(
    name: str, text: str, labels: tuple[str, ...] = _FAMILY, buckets: tuple[float, ...] = LATENCY_BUCKETS
) -> Any:
    """Declare a histogram."""
    return Metric(Kind.HISTOGRAM, name, text, labels, buckets)


class KubeProxyMetrics:
    """The metrics of kube-proxy."""

    sync_duration = histogram("kubeproxy_sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds")
    full_sync_duration = histogram(
        "kubeproxy_sync_full_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for full resyncs"
    )
    partial_sync_duration = histogram(
        "kubeproxy_sync_partial_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for partial resyncs"
    )
    last_sync = gauge("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "Time of the last successful sync", _FAMILY)
    last_queued = gauge(
        "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "Time a sync was last requested", _FAMILY
    )
    programming_duration = histogram(
        "kubeproxy_network_programming_duration_seconds",
        "Seconds from a change of a Service's endpoints until the kernel has it",
        buckets=PROGRAMMING_BUCKETS,
    )
    endpoint_changes_pending = gauge("kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Pending endpoint changes")
    endpoint_changes = counter("kubeproxy_sync_proxy_rules_endpoint_changes_total", "Endpoint changes seen")
    service_changes_pending = gauge("kubeproxy_sync_proxy_rules_service_changes_pending", "Pending Service changes")
    service_changes = counter("kubeproxy_sync_proxy_rules_service_changes_total", "Service changes seen")
    no_local_endpoints = gauge(
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
        "Service ports (ipvs mode: Services) with a Local traffic policy and endpoints, but none on this node",
        ("traffic_policy", "ip_family"),
    )
    healthz = counter("kubeproxy_proxy_healthz_total", "Answers given by /healthz", ("code",))
    livez = counter("kubeproxy_proxy_livez_total", "Answers given by /livez", ("code",))
    conntrack_duration = histogram(
        "kubeproxy_conntrack_reconciler_sync_duration_seconds", "Latency of the search for stale conntrack entries"
    )
    conntrack_deleted = counter(
        "kubeproxy_conntrack_reconciler_deleted_entries_total", "Stale conntrack entries deleted", _FAMILY
    )
    iptables_restore_failures = counter(
        "kubeproxy_sync_proxy_rules_iptables_restore_failures_total", "Failed iptables-restore transactions", _FAMILY
    )
    iptables_partial_restore_failures = counter(
        "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total",
        "Failed partial iptables-restore transactions",
        _FAMILY,
    )
    iptables_rules = gauge("kubeproxy_sync_proxy_rules_iptables_total", "iptables rules owned", ("table", "ip_family"))
    iptables_rules_last = gauge(
        "kubeproxy_sync_proxy_rules_iptables_last", "iptables rules written by the last sync", ("table", "ip_family")
    )
    nftables_sync_failures = counter(
        "kubeproxy_sync_proxy_rules_nftables_sync_failures_total", "Failed nftables transactions", _FAMILY
    )
    # Those that all components of Kubernetes have.
    rest_requests = counter("rest_client_requests_total", "Requests to the API server", ("code", "host", "method"))
    rest_duration = histogram(
        "rest_client_request_duration_seconds",
        "Seconds until the API server begins its answer; watches are not counted",
        ("host", "verb"),
        REST_BUCKETS,
    )
    features = gauge(
        "kubernetes_feature_enabled", "1 for a feature gate that is on, 0 for one that is off", ("name", "stage")
    )


class ServiceLevels:
    """The service level indicators of Kubernetes (KEP-3466), which have their own page."""

    health_check = gauge("kubernetes_healthcheck", "Result of the last health check", ("name", "type"))
    health_checks = counter("kubernetes_healthchecks_total", "Results of health checks", ("name", "type", "status"))


class AgentMetrics:
    """The agent's own metrics that it updates."""

    build_info = gauge(
        "kubenode_proxy_build_info",
        "1; the collection's version with the hash of the engine, such as `1.0.0+658f7d18e1be`, and the whole hash",
        ("version", "engine"),
    )
    drift_repaired = counter(
        "kubenode_proxy_drift_repaired_total",
        "entries found modified or missing in the kernel and repaired",
        ("kind", "ip_family"),
    )
    objects_refused = gauge(
        "kubenode_proxy_objects_refused", "objects of the cluster that are skipped because they are invalid", ("kind",)
    )
    objects_failed = gauge(
        "kubenode_proxy_objects_failed",
        "objects that a defect of the agent prevents from being processed; their last versions remain in effect; "
        "the log and `kubenode-proxy status` name them",
    )
    parts_skipped = gauge(
        "kubenode_proxy_parts_skipped",
        "invalid addresses and endpoints that are skipped in objects that are otherwise served; "
        "of one object 20 at most count",
        ("kind",),
    )
    conflicts = gauge(
        "kubenode_proxy_conflicts",
        "addresses with port, and node ports, that a Service claims and another one gets; "
        "the log and `kubenode-proxy status` name both claimants of the first of them",
    )
    service_annotations_ignored = gauge(
        "kubenode_proxy_service_annotations_ignored",
        "Services with annotations of which the mode, the kernel or the limit of stable hashing leaves something out; "
        "`kubenode-proxy status` names them",
        _FAMILY,
    )
    check_changes = counter(
        "kubenode_proxy_endpoint_check_changes_total",
        "how often an endpoint began to fail its checks (`failing`), or to pass them again (`passing`)",
        ("to",),
        starts=(("passing",), ("failing",)),
    )
    events_dropped = counter(
        "kubenode_proxy_events_dropped_total",
        "Events not posted, because there were too many",
        ("reason",),
        starts=tuple((reason.value,) for reason in Reason),
    )
    losses = counter(
        "kubenode_proxy_endpoint_loss_events_total",
        "how often more than `agent_max_unserved_percent` of the Services with endpoints, if there were at least ten "
        "of them, lost them within a minute, or by a restart",
    )
    longest_kernel_call = gauge(
        "kubenode_proxy_longest_kernel_call_seconds", "the longest time spent on one kernel table in a sync"
    )
    table_entries = gauge(
        "kubenode_proxy_table_entries",
        "desired entries per table, by kind (`chains`, `table objects`, `virtual servers`, `real servers`, `sets`, "
        "`set elements`, `addresses`) and family; the labels are those of `kubenode_proxy_drift_repaired_total`, "
        "so the two can be joined",
        ("kind", "ip_family"),
    )


#: By the names of kube-proxy's nfacct counters, or of sets and the like of the table, in the mode that has them.
PACKETS = {
    INVALID_COUNTER: counter(
        "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
        "Packets dropped because connection tracking finds them invalid",
    ),
    LOCALHOST_COUNTER: counter(
        "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        "Packets to node ports on a loopback address that were accepted",
    ),
    LOCALHOST_LISTENERS: gauge(
        "kubeproxy_nftables_localhost_nodeport_listeners",
        "Sockets that listen for node ports on a loopback address",
        _FAMILY,
    ),
    LOCALHOST_UNOPENED: counter(
        "kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total",
        "Failed attempts to open such a socket",
        _FAMILY,
    ),
    LOCALHOST_COUNTS: counter(
        "kubeproxy_nftables_localhost_nodeport_rejected_packets_total",
        "Packets to node ports on a loopback address that were rejected",
        ("ip_family", "protocol"),
    ),
}
CHECKS = {
    "checked": gauge(
        "kubenode_proxy_checked_endpoints", "endpoints with health checks that are `passing` or `failing`", ("state",)
    )
}
#: What the agent knows about its source.
SOURCE = {
    "age": gauge("kubenode_proxy_cluster_cache_age_seconds", "age of the state kept on disk"),
    "connected": gauge("kubenode_proxy_api_connected", "1 while all watches are open"),
}
API_SERVERS = {
    "known": gauge("kubenode_proxy_api_servers", "API servers that the agent knows"),
    "changes": counter("kubenode_proxy_api_server_changes_total", "how often the agent began to use another one"),
}
#: By the fields of the status of the memory, and the number of lists; without a limit there are none.
MEMORY = {
    "limit": gauge(
        "kubenode_proxy_memory_limit_bytes",
        "the limit of the agent's control group; this and the next five exist only with a limit",
    ),
    "used": gauge("kubenode_proxy_memory_used_bytes", "memory in use in that group that the kernel cannot reclaim"),
    "cluster": gauge("kubenode_proxy_cluster_bytes", "size of the cluster's objects as the agent keeps them"),
    "capacity": gauge(
        "kubenode_proxy_cluster_capacity_bytes", "size of the cluster's objects that fits into the limit"
    ),
    "heldBack": gauge(
        "kubenode_proxy_objects_held_back", "objects whose latest version is not applied because of the limit"
    ),
    "refused": gauge("kubenode_proxy_lists_refused", "collections that are not followed because of the limit"),
}
DRAIN = {
    "drained": gauge(
        "kubenode_proxy_drained",
        "1 while the node is drained: `/healthz` and health check node ports answer 503, and traffic is served",
    )
}
HTTP = {
    "open": gauge("kubenode_proxy_http_connections", "open connections to the agent's ports"),
    "closed": counter(
        "kubenode_proxy_http_connections_closed_total",
        "connections closed before they got an answer: `deadline`, or `evicted` to make room",
        ("reason",),
    ),
}
#: By the fields of the forwarder's status; in modes without it there are none.
FORWARDING = {
    "connections": gauge("kubenode_proxy_forwarding_connections", "TCP connections that are open"),
    "sessions": gauge("kubenode_proxy_forwarding_sessions", "UDP sessions that are open"),
    "unboundCount": gauge("kubenode_proxy_forwarding_listeners_unbound", "listeners whose socket cannot be opened"),
    "accepted": counter("kubenode_proxy_forwarding_connections_total", "TCP connections that were accepted"),
    "udpSessions": counter("kubenode_proxy_forwarding_sessions_total", "UDP sessions that were begun"),
    "bytes": counter("kubenode_proxy_forwarding_bytes_total", "bytes moved by TCP connections, in both directions"),
    "connectFailures": counter(
        "kubenode_proxy_forwarding_connect_failures_total", "attempts to connect to an endpoint that failed"
    ),
    "unreachable": counter(
        "kubenode_proxy_forwarding_unreachable_total", "connections refused because no endpoint could be reached"
    ),
    "refusedBySourceRange": counter(
        "kubenode_proxy_forwarding_refused_by_source_range_total",
        "connections and datagrams from outside the source ranges",
    ),
    "refusedByLimit": counter(
        "kubenode_proxy_forwarding_refused_by_limit_total", "connections refused because there were too many"
    ),
    "evicted": counter(
        "kubenode_proxy_forwarding_evicted_total", "connections and sessions ended to make room for others"
    ),
    "droppedDatagrams": counter(
        "kubenode_proxy_forwarding_dropped_datagrams_total", "datagrams that could not be forwarded"
    ),
}
#: By the fields of the status of network policies, and two more; there are none while policies are not enforced.
POLICIES = {
    "inForce": gauge(
        "kubenode_proxy_network_policy_in_force", "1 while the table in the kernel is that of the known policies"
    ),
    "policies": gauge("kubenode_proxy_network_policy_policies", "policies of the cluster that are known"),
    "pods": gauge("kubenode_proxy_network_policy_pods", "pods of this node that policies can select"),
    "elements": gauge("kubenode_proxy_network_policy_elements", "elements of the table"),
    "refusedPolicies": gauge(
        "kubenode_proxy_network_policy_refused",
        "policies that allow nothing in a direction, because of their size; `kubenode-proxy status` names them",
    ),
    "lastSync": gauge(
        "kubenode_proxy_network_policy_last_sync_timestamp_seconds", "when the table was last brought up to date"
    ),
    "failures": counter(
        "kubenode_proxy_network_policy_sync_failures_total", "attempts to change the table that failed"
    ),
    "repaired": counter(
        "kubenode_proxy_network_policy_repaired_total", "entries of the table found modified or missing and repaired"
    ),
    "denied": counter(
        "kubenode_proxy_network_policy_denied_packets_total",
        "packets of the pods of this node that policies denied, in the direction `ingress` or `egress`; starts at 0 "
        "for each new pod; on nodes with more than 1,000 pods without their names",
        ("direction", "namespace", "pod"),
    ),
    "forged": counter(
        "kubenode_proxy_network_policy_forged_packets_total",
        "packets from an interface of pods that were dropped because their source is of none of them; starts at 0 "
        "for each new interface",
        ("interface",),
    ),
}
#: The traffic of Services, for as many ServicePorts as the configuration allows.
TRAFFIC = {
    "connections": counter("kubenode_proxy_service_connections_total", "connections to Services", _SERVICE_PORT),
    "packets": counter(
        "kubenode_proxy_service_packets_total",
        "packets, `in` from clients and `out` to clients; in ipvs mode, and in nftables mode with `traffic.countBytes`",
        (*_SERVICE_PORT, "direction"),
    ),
    "bytes": counter("kubenode_proxy_service_bytes_total", "bytes, as well", (*_SERVICE_PORT, "direction")),
    "open": gauge(
        "kubenode_proxy_service_open_connections",
        "`active` and `inactive` connections; in ipvs mode",
        (*_SERVICE_PORT, "state"),
    ),
    "omitted": gauge("kubenode_proxy_service_ports_without_metrics", "ports of Services beyond the limit"),
}


def declared(table: Any) -> dict[str, Metric]:
    """Return the metrics of one of the classes or mappings above, by attribute or key."""
    rows: Mapping[str, Any] = table if isinstance(table, dict) else vars(table)
    return {key: metric for key, metric in rows.items() if isinstance(metric, Metric)}


#: The tables with which the page docs/agent.md describes the agent's own metrics.
OWN = (AgentMetrics, CHECKS, SOURCE, API_SERVERS, MEMORY, DRAIN, HTTP)
TABLES = (KubeProxyMetrics, ServiceLevels, *OWN, PACKETS, FORWARDING, POLICIES, TRAFFIC)
