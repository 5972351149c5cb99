# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The expressions of the rules and the dashboard, and the metrics that they use."""

from __future__ import annotations

import json
import re
from typing import Any, Iterable

import prometheus_client
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry import metric_tables
from tests.conftest import ROOT

from .dashboard import PATH

ALERTS = ROOT / "examples" / "monitoring" / "alerts.yml"
# Tokens of an expression other than metrics, labels and numbers.
WORDS = frozenset(
    {"absent", "and", "bool", "by", "count", "count_over_time", "delta", "histogram_quantile", "ignoring", "increase"}
    | {"changes", "max", "min", "offset", "on", "or", "rate", "sum", "time", "topk", "unless", "vector", "without"}
)
# Values of Grafana's own variables, for tests without Grafana.
VARIABLES = {"$__rate_interval": "5m", "$__range": "3h", "$instance": ".+", "$job": ".+"}
_ON_REQUEST = (metric_tables.POLICIES, metric_tables.MEMORY, metric_tables.FORWARDING)


def rules() -> list[dict[str, Any]]:
    """Return all alerts."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as it is shipped."""
    return dict(json.loads((ROOT / PATH).read_text(encoding="utf-8")))


def panels() -> list[dict[str, Any]]:
    """Return the panels that show data."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def substituted(expression: str) -> str:
    """Return an expression with Grafana's variables replaced."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def dashboard_expressions() -> list[str]:
    """Return all expressions of the dashboard."""
    return [substituted(target["expr"]) for panel in panels() for target in panel["targets"]]


def metrics_of(expression: str) -> set[str]:
    """Return the names of the metrics in an expression: without strings, labels, durations and keywords of PromQL."""
    text = re.sub(r"\{[^}]*\}", " ", re.sub(r'"[^"]*"', "''", expression))
    text = re.sub(r"\b(?:by|on|without|ignoring)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\[[^\]]*\]|\boffset\s+\w+", " ", text)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", text)) - WORDS


def exported() -> set[str]:
    """Return the names of all series that any agent can export, including those without traffic."""
    return _series([table for table in metric_tables.TABLES if table not in _ON_REQUEST]) | {
        f"{family.name}{'_total' if family.type == 'counter' else ''}"
        for collector in (prometheus_client.PROCESS_COLLECTOR, prometheus_client.PLATFORM_COLLECTOR)
        for family in collector.collect()
    }


def exported_on_request() -> set[str]:
    """Return the names of series that exist only with network policies, a memory limit, or in userspace mode."""
    return _series(_ON_REQUEST)


def _series(tables: Iterable[Any]) -> set[str]:
    metrics = [metric for table in tables for metric in metric_tables.declared(table).values()]
    suffixes = {metric_tables.Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    return {metric.name + suffix for metric in metrics for suffix in suffixes.get(metric.kind, ("",))}
