# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables of hand-written pages, generated from the tables in the code: fields, feature gates and metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.field import Field

PAGE = Path("docs/configuration.md")
# Units that format_duration writes as 0 after a larger one.
_ZERO_UNITS = re.compile("(?<=[hm])0[ms]")


def documented_default(row: Field, model: Any) -> str:
    """Return the default of a field as the tables show it; ``model``: with the default of every field."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.base.durations import format_duration
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.field import NO_MODE, value_of
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.values import PORT_RANGE

    if row.default or row.kind is None:
        return str(row.default or NO_MODE)
    value = row.kind.to_json(value_of(model, row.attribute))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if row.kind is PORT_RANGE:
        value = "-".join(map(str, value))
    elif row.kind.to_json is format_duration:
        value = _ZERO_UNITS.sub("", value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value or value is False else "none"


def fields() -> str:
    """Return the table of all fields of a KubeProxyConfiguration."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.fields import FIELDS
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration

    lines = [
        "| Field | Default | Effect here | What it does, or why it has no effect | Modes |",
        "|---|---|---|---|---|",
    ]
    for row in FIELDS:
        default = documented_default(row, KubeProxyConfiguration())
        lines.append(f"| `{row.name}` | {default} | {row.effect} | {row.text} | {row.modes} |")
    return "\n".join(lines)


def node_fields() -> str:
    """Return the table of all fields of a NodeProxyConfiguration."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.fields import NODE_FIELDS
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import NodeProxyConfiguration

    lines = ["| Field | Default | Used by | What it does |", "|---|---|---|---|"]
    used_by = {"yes": "all", "agent": "agent"}
    for row in NODE_FIELDS:
        default = documented_default(row, NodeProxyConfiguration())
        lines.append(f"| `{row.name}` | {default} | {used_by[row.effect]} | {row.text} |")
    return "\n".join(lines)


def gates() -> str:
    """Return the table of all feature gates."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.configuration import feature_gates, gate_table

    lines: list[str] = ["| Gate | Default | Effect here |", "|---|---|---|"]
    for name, gate in gate_table.GATES.items():
        default = ("on" if gate.default else "off") + (", locked" if gate.locked else "")
        effect = feature_gates.EFFECTS.get(name) or ("always on" if gate.locked else "none")
        if name in feature_gates.REASONS:
            effect += f": {feature_gates.REASONS[name]}"
        lines.append(f"| `{name}` | {default} | {effect} |")
    return "\n".join(lines)


def metrics(*tables: Any) -> str:
    """Return the table of the metrics that these tables of the code declare."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metric_tables import declared

    lines = ["| metric | type | meaning |", "|---|---|---|"]
    for metric in (metric for table in tables for metric in declared(table).values()):
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        lines.append(f"| `{metric.name}{labels}` | {metric.kind.value} | {metric.text} |")
    return "\n".join(lines)


def pages(root: Path) -> dict[Path, str]:
    """Return the pages with their tables replaced. Raises ValueError if the placeholder of one is missing."""
    from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry import metric_tables

    tables = {
        PAGE: {"fields": fields(), "node fields": node_fields(), "gates": gates()},
        Path("docs/agent.md"): {
            "metrics": metrics(*metric_tables.OWN),
            "metrics of network policies": metrics(metric_tables.POLICIES),
        },
        Path("docs/modes.md"): {"metrics": metrics(metric_tables.FORWARDING)},
        Path("docs/traffic.md"): {"metrics": metrics(metric_tables.TRAFFIC)},
    }
    return {path: _replaced(path, (root / path).read_text(encoding="utf-8"), of) for path, of in tables.items()}


def _replaced(path: Path, text: str, tables: Mapping[str, str]) -> str:
    for name, table in tables.items():
        begin, end = f"<!-- {name}: written by make docs -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = text.partition(begin)
        _old, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{path}: no place for the table of {name}")
        text = f"{before}{begin}{table}\n{end}{after}"
    return text
