# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The expressions of the rules and the dashboard, and the metrics that they use."""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Set

import yaml

from tests.conftest import ROOT

from .dashboard import PATH

ALERTS = ROOT / "examples" / "monitoring" / "alerts.yml"
# Tokens of an expression other than metrics, labels and numbers.
WORDS = frozenset(
    {"absent", "and", "bool", "by", "count", "count_over_time", "delta", "histogram_quantile", "ignoring", "increase"}
    | {"max", "min", "offset", "on", "or", "rate", "sum", "time", "topk", "unless", "vector", "without"}
)
# Values of Grafana's own variables, for tests without Grafana.
VARIABLES = {"$__rate_interval": "5m", "$__range": "3h", "$instance": ".+", "$job": ".+"}


def rules() -> List[Dict[str, Any]]:
    """Return all alerts."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> Dict[str, Any]:
    """Return the dashboard as it is shipped."""
    return dict(json.loads((ROOT / PATH).read_text(encoding="utf-8")))


def panels() -> List[Dict[str, Any]]:
    """Return the panels that show data."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def substituted(expression: str) -> str:
    """Return an expression with Grafana's variables replaced."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def dashboard_expressions() -> List[str]:
    """Return all expressions of the dashboard."""
    return [substituted(target["expr"]) for panel in panels() for target in panel["targets"]]


def metrics_of(expression: str) -> Set[str]:
    """Return the names of the metrics in an expression: without strings, labels, durations and keywords of PromQL."""
    text = re.sub(r"\{[^}]*\}", " ", re.sub(r'"[^"]*"', "''", expression))
    text = re.sub(r"\b(?:by|on|without|ignoring)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\[[^\]]*\]|\boffset\s+\w+", " ", text)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", text)) - WORDS


def exported() -> Set[str]:
    """Return the names of all series that an agent can export, including those without traffic."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.agent.answers.on_scrape import TrafficMetrics
    from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metrics import Metrics
    from ansible_collections.kubenode.proxy.plugins.module_utils.agent.traffic import Measured

    names: Set[str] = set()
    # With any number of ports, all metrics of traffic exist.
    for family in (*Metrics().registry.collect(), *TrafficMetrics(lambda: Measured(omitted=1)).collect()):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names.update(family.name + suffix for suffix in suffixes)
    return names


def exported_on_request() -> Set[str]:
    """Return the gauges that an agent exports only where it enforces network policies, or has a memory limit."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.agent.answers.on_scrape import MemoryMetrics
    from ansible_collections.kubenode.proxy.plugins.module_utils.agent.memory import MemoryUse
    from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import policy_metrics

    use = MemoryUse(**{**dict.fromkeys(MemoryUse._fields, 0), "limit": 1})
    limited = {family.name for family in MemoryMetrics(lambda: use).collect()}
    return limited | {f"{policy_metrics._PREFIX}{name}" for _key, name, _text in policy_metrics._GAUGES}
