# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Grafana dashboard as data: rows of panels, each with its expressions. The JSON file is generated from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence

PATH = Path("examples/monitoring/dashboard.json")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
NODE = 'job=~"$job", instance=~"$instance"'
_WIDTH = 24


class Panel(NamedTuple):
    """One panel: ``queries`` are (expression, legend); ``kind`` is stat or timeseries; sizes are in Grafana's units."""

    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    # From this value on a number is shown in red; None: never.
    alarm: Optional[float] = None


def selected(metric: str, more: str = "") -> str:
    """Return a selector of a metric for the chosen nodes."""
    return f"{metric}{{{NODE}{', ' if more else ''}{more}}}"


def rate(metric: str, more: str = "") -> str:
    """Return the rate per second of a counter."""
    return f"rate({selected(metric, more)}[$__rate_interval])"


def quantile(share: float, metric: str, by: str = "le") -> str:
    """Return a quantile of a histogram over all chosen nodes."""
    return f"histogram_quantile({share}, sum by ({by}) ({rate(metric + '_bucket')}))"


def _number(title: str, about: str, queries: tuple[tuple[str, str], ...], alarm: float, unit: str = "short") -> Panel:
    """Return a small panel with one number, red from ``alarm`` on."""
    return Panel(title, about, queries, "stat", unit, width=4, height=4, alarm=alarm)


_SYNC = "kubeproxy_sync_proxy_rules"
_PROGRAMMING = "kubeproxy_network_programming_duration_seconds"
_SERVICE = "namespace, service, port"
_COUNTED_BYTES = (
    "Of the ten ports of Services with the most, per second and in both directions; in ipvs mode, and with "
    "traffic.countBytes in nftables mode."
)
_SERVICE_NAME = "{{namespace}}/{{service}}:{{port}}"
REPAIRED = f"increase({selected('kubenode_proxy_drift_repaired_total')}[1h])"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "At a glance",
        (
            _number(
                "Nodes down",
                "Nodes whose service proxy cannot be scraped. They continue to serve the last state.",
                ((f"count({selected('up')} == 0) or vector(0)", ""),),
                alarm=1,
            ),
            _number(
                "Disconnected from the API server",
                "Nodes on which not all watches are open.",
                ((f"count({selected('kubenode_proxy_api_connected')} == 0) or vector(0)", ""),),
                alarm=1,
            ),
            _number(
                "Longest wait for a sync",
                "The longest time for which a node has waited for a sync to succeed.",
                (
                    (
                        f"max(({selected(_SYNC + '_last_queued_timestamp_seconds')}"
                        f" - {selected(_SYNC + '_last_timestamp_seconds')}) > 0) or vector(0)",
                        "",
                    ),
                ),
                alarm=60,
                unit="s",
            ),
            _number(
                "Programming latency, p99",
                "Time from a change of endpoints until it is programmed, over all selected nodes.",
                ((quantile(0.99, _PROGRAMMING), ""),),
                alarm=30,
                unit="s",
            ),
            _number(
                "Repaired in an hour",
                "Entries that other programs had changed or removed and that were repaired.",
                ((f"sum({REPAIRED}) or vector(0)", ""),),
                alarm=1,
            ),
            _number(
                "Objects refused",
                "Objects of the cluster that are skipped because they are invalid.",
                ((f"sum(max by (kind) ({selected('kubenode_proxy_objects_refused')})) or vector(0)", ""),),
                alarm=1,
            ),
        ),
    ),
    (
        "Syncs",
        (
            Panel(
                "Duration of a sync",
                "Median and 99th percentile of all syncs of the selected nodes.",
                (
                    (quantile(0.5, _SYNC + "_duration_seconds", "le, ip_family"), "p50 {{ip_family}}"),
                    (quantile(0.99, _SYNC + "_duration_seconds", "le, ip_family"), "p99 {{ip_family}}"),
                ),
                unit="s",
            ),
            Panel(
                "Syncs per second",
                "Partial syncs cost as much as the change; a full one observes everything.",
                (
                    (f"sum({rate('kubeproxy_sync_partial_proxy_rules_duration_seconds_count')})", "partial"),
                    (f"sum({rate('kubeproxy_sync_full_proxy_rules_duration_seconds_count')})", "full"),
                ),
                unit="ops",
            ),
            Panel(
                "Slowest nodes",
                "99th percentile of the duration of a sync on the ten slowest nodes.",
                ((f"topk(10, {quantile(0.99, _SYNC + '_duration_seconds', 'le, instance')})", "{{instance}}"),),
                unit="s",
            ),
            Panel(
                "Programming latency",
                "Time from a change of endpoints until it is programmed.",
                (
                    (quantile(0.5, _PROGRAMMING), "p50"),
                    (quantile(0.9, _PROGRAMMING), "p90"),
                    (quantile(0.99, _PROGRAMMING), "p99"),
                ),
                unit="s",
            ),
            Panel(
                "Changes per second",
                "Changes of Services and endpoints received by nodes.",
                (
                    (f"max({rate(_SYNC + '_service_changes_total')})", "Services"),
                    (f"max({rate(_SYNC + '_endpoint_changes_total')})", "endpoints"),
                ),
                unit="ops",
            ),
            Panel(
                "Changes that wait",
                "The largest number of changes on a node that are not synced yet.",
                (
                    (f"max({selected(_SYNC + '_service_changes_pending')})", "Services"),
                    (f"max({selected(_SYNC + '_endpoint_changes_pending')})", "endpoints"),
                ),
            ),
        ),
    ),
    (
        "The kernel",
        (
            Panel(
                "Entries per table",
                "The largest number of entries on a node, by resource table.",
                ((f"max by (kind, ip_family) ({selected('kubenode_proxy_table_entries')})", "{{ip_family}} {{kind}}"),),
            ),
            Panel(
                "Repaired, by table",
                "Entries found modified or missing and repaired, per hour.",
                ((f"sum by (kind, ip_family) ({REPAIRED}) > 0", "{{ip_family}} {{kind}}"),),
            ),
            Panel(
                "Repaired, by node",
                "The ten nodes with the most external changes, per hour.",
                ((f"topk(10, sum by (instance) ({REPAIRED}) > 0)", "{{instance}}"),),
            ),
            Panel(
                "Failed transactions",
                "Transactions that the kernel rejected, in 15 minutes.",
                (
                    (
                        f"sum(increase({selected(_SYNC + '_iptables_restore_failures_total')}[15m]))",
                        "iptables-restore",
                    ),
                    (f"sum(increase({selected(_SYNC + '_nftables_sync_failures_total')}[15m]))", "nftables"),
                ),
                alarm=1,
            ),
            Panel(
                "Longest kernel call",
                "The longest time spent on one kernel table in a sync since the start of the agent, on the ten nodes"
                " with the longest.",
                ((f"topk(10, {selected('kubenode_proxy_longest_kernel_call_seconds')})", "{{instance}}"),),
                unit="s",
            ),
            Panel(
                "Connection tracking",
                "Stale entries deleted per second, and the time to search for them.",
                (
                    (
                        f"sum by (ip_family) ({rate('kubeproxy_conntrack_reconciler_deleted_entries_total')})",
                        "deleted {{ip_family}}",
                    ),
                    (quantile(0.99, "kubeproxy_conntrack_reconciler_sync_duration_seconds"), "p99 of the search, s"),
                ),
            ),
        ),
    ),
    (
        "The cluster and the agents",
        (
            Panel(
                "Refused objects",
                "By kind, with parts of objects that are served otherwise, addresses that several Services claim, and "
                "Services with annotations that do not all have an effect; "
                "kubenode-proxy status on any node names them.",
                (
                    (f"max by (kind) ({selected('kubenode_proxy_objects_refused')})", "{{kind}}"),
                    (f"max by (kind) ({selected('kubenode_proxy_parts_skipped')})", "parts of {{kind}}"),
                    (f"max({selected('kubenode_proxy_objects_failed')})", "that a defect keeps from being processed"),
                    (f"max({selected('kubenode_proxy_conflicts')})", "conflicts"),
                    (f"max({selected('kubenode_proxy_service_annotations_ignored')})", "ignored annotations"),
                    (
                        f"sum(increase({selected('kubenode_proxy_endpoint_loss_events_total')}[$__rate_interval]))",
                        "losses",
                    ),
                    (
                        f"sum(increase({selected('kubenode_proxy_events_dropped_total')}[$__rate_interval]))",
                        "dropped Events",
                    ),
                    (f"sum by (state) ({selected('kubenode_proxy_checked_endpoints')})", "{{state}} their checks"),
                    (
                        "sum by (to) (increase("
                        f"{selected('kubenode_proxy_endpoint_check_changes_total')}[$__rate_interval]))",
                        "now {{to}}",
                    ),
                ),
            ),
            Panel(
                "API servers",
                "How often an agent began to use another API server, and how many servers the agents know.",
                (
                    (
                        f"sum(increase({selected('kubenode_proxy_api_server_changes_total')}[$__rate_interval]))",
                        "changes",
                    ),
                    (f"min({selected('kubenode_proxy_api_servers')})", "known, at least"),
                ),
            ),
            Panel(
                "Local policy without local endpoints",
                "The largest number of ports with endpoints, none of which is local although the policy is Local.",
                (
                    (
                        f"max by (traffic_policy, ip_family) ({selected(_SYNC + '_no_local_endpoints_total')})",
                        "{{traffic_policy}} {{ip_family}}",
                    ),
                ),
            ),
            Panel(
                "Health answers per second",
                "Answers of /healthz and /livez by status, and the nodes that are drained.",
                (
                    (f"sum by (code) ({rate('kubeproxy_proxy_healthz_total')})", "healthz {{code}}"),
                    (f"sum({selected('kubenode_proxy_drained')})", "drained nodes"),
                    (f"sum by (code) ({rate('kubeproxy_proxy_livez_total')})", "livez {{code}}"),
                ),
                unit="ops",
            ),
            Panel(
                "Age of the state on disk",
                "Of the ten nodes with the oldest. It is written when the cluster changes.",
                ((f"topk(10, {selected('kubenode_proxy_cluster_cache_age_seconds')})", "{{instance}}"),),
                unit="s",
            ),
            Panel(
                "Versions",
                "Number of agents by version of the collection and the engine.",
                ((f"count by (version) ({selected('kubenode_proxy_build_info')})", "{{version}}"),),
            ),
            Panel(
                "Requests to the API server",
                "By status of the answer, per second; <error> means no answer.",
                ((f"sum by (code) ({rate('rest_client_requests_total')})", "{{code}}"),),
                unit="reqps",
            ),
            Panel(
                "Answers of the API server",
                "Median and 99th percentile of the time until an answer begins, without watches.",
                (
                    (quantile(0.5, "rest_client_request_duration_seconds"), "p50"),
                    (quantile(0.99, "rest_client_request_duration_seconds"), "p99"),
                ),
                unit="s",
            ),
            Panel(
                "Connections to the agent",
                "The largest number on a node, and connections closed per second before an answer.",
                (
                    (f"max({selected('kubenode_proxy_http_connections')})", "open"),
                    (f"sum by (reason) ({rate('kubenode_proxy_http_connections_closed_total')})", "closed: {{reason}}"),
                ),
            ),
            Panel(
                "Memory of the agent",
                "Of the ten largest.",
                ((f"topk(10, {selected('process_resident_memory_bytes')})", "{{instance}}"),),
                unit="bytes",
            ),
            Panel(
                "Processor of the agent",
                "Share of one processor, of the ten busiest agents.",
                ((f"topk(10, {rate('process_cpu_seconds_total')})", "{{instance}}"),),
                unit="percentunit",
            ),
        ),
    ),
    (
        "Traffic of Services, where traffic.metricsPorts is set",
        (
            Panel(
                "New connections",
                "Of the ten ports of Services with the most, per second and over all nodes.",
                (
                    (
                        f"topk(10, sum by ({_SERVICE}) ({rate('kubenode_proxy_service_connections_total')}))",
                        _SERVICE_NAME,
                    ),
                ),
            ),
            Panel(
                "Bytes",
                _COUNTED_BYTES,
                ((f"topk(10, sum by ({_SERVICE}) ({rate('kubenode_proxy_service_bytes_total')}))", _SERVICE_NAME),),
                unit="Bps",
            ),
            Panel(
                "Packets",
                _COUNTED_BYTES,
                ((f"topk(10, sum by ({_SERVICE}) ({rate('kubenode_proxy_service_packets_total')}))", _SERVICE_NAME),),
                unit="pps",
            ),
            Panel(
                "Open connections",
                "Of the ten ports of Services with the most: active and inactive, as IPVS counts them.",
                (
                    (
                        f"topk(10, sum by ({_SERVICE}, state) ({selected('kubenode_proxy_service_open_connections')}))",
                        _SERVICE_NAME + " {{state}}",
                    ),
                ),
            ),
            Panel(
                "Connections by node",
                "New connections to these Services per second, of the ten nodes with the most.",
                (
                    (
                        f"topk(10, sum by (instance) ({rate('kubenode_proxy_service_connections_total')}))",
                        "{{instance}}",
                    ),
                ),
            ),
            Panel(
                "Ports without these metrics",
                "Ports of Services that are beyond traffic.metricsPorts: the largest number on a node.",
                ((f"max({selected('kubenode_proxy_service_ports_without_metrics')})", "ports"),),
            ),
        ),
    ),
)


def _thresholds(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.alarm is not None:
        steps.append({"color": "red", "value": panel.alarm})
    return {"mode": "absolute", "steps": steps}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    custom: dict[str, Any] = {"fillOpacity": 8, "lineWidth": 1, "showPoints": "never"}
    if panel.kind == "stat":
        options = {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
        custom = {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "thresholds": _thresholds(panel), "custom": custom},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": expression,
                "legendFormat": legend or "__auto",
                "range": True,
            }
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _panels(rows: Sequence[tuple[str, Sequence[Panel]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in rows:
        place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        found.append(
            {"id": len(found) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            found.append(_panel(panel, len(found) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return found


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 7,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the format of Grafana's import."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    # A metric that kube-proxy has as well, so that both can be compared side by side.
    jobs = "label_values(kubeproxy_sync_proxy_rules_last_timestamp_seconds, job)"
    nodes = 'label_values(kubeproxy_sync_proxy_rules_last_timestamp_seconds{job=~"$job"}, instance)'
    return {
        "uid": "kubenode-proxy",
        "title": "Service proxy",
        "description": "Nodes served by the agent of kubenode.proxy.",
        "tags": ["kubernetes", "kube-proxy"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [source, _variable("job", "Job", jobs), _variable("instance", "Node", nodes)]},
        "annotations": {"list": []},
        "links": [],
        "panels": _panels(ROWS),
    }


def dashboard_text() -> str:
    """Return the dashboard's JSON file."""
    return json.dumps(dashboard(), indent=2) + "\n"
