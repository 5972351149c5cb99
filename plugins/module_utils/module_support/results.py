# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Results of the modules. They are small, stable and documented, and never contain the rule set itself."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

from ..base.errors import Refusal
from ..configuration.model import KubeProxyConfiguration
from ..configuration.node_proxy import AUTO
from ..convergence.probing.probe import ProbeResult
from ..convergence.request import Report, TableChange
from ..differences import unified
from .tables import change_record, difference_entry

# Without a limit, one invalid object per tenant would make the result as large as the cluster.
REFUSED_LIMIT = 100
# How many entries of a table the summary names.
_NAMED_ENTRIES = 3


def refused_result(refused: Sequence[Refusal], skipped: Sequence[Refusal]) -> dict[str, Any]:
    """Return the first 100 ``refused`` objects and ``refused_parts`` as dictionaries, and the number of each.

    The parts are not called ``skipped`` here: Ansible takes a task with a result of that name as skipped.
    """
    return _first_of({"refused": refused, "refused_parts": skipped})


def _first_of(lists: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the first items of each list, and by its name with ``_count`` how many there are."""
    found: dict[str, Any] = {f"{name}_count": len(items) for name, items in lists.items()}
    for name, items in lists.items():
        found[name] = [item._asdict() if isinstance(item, Refusal) else item for item in items[:REFUSED_LIMIT]]
    return found


def change_result(changes: Iterable[TableChange]) -> list[dict[str, Any]]:
    """Return counts per table that differs, and the names of the first few entries."""
    return [
        change_record(change.table, (change.added, change.replaced, change.removed), change.entries)
        for change in changes
    ]


def drift_summary(changes: Iterable[TableChange]) -> str:
    """Summarise in one line how a node differs, with the names of the first entries; empty without differences."""
    parts = []
    for change in changes:
        counts = (("missing", change.added), ("different", change.replaced), ("unexpected", change.removed))
        named = ", ".join(change.entries[:_NAMED_ENTRIES])
        if named and change.added + change.replaced + change.removed > _NAMED_ENTRIES:
            named += ", ..."
        text = ", ".join(f"{count} {word}" for word, count in counts if count)
        parts.append(f"{change.table}: {text} ({named})" if named else f"{change.table}: {text}")
    return "; ".join(parts)


def probe_records(results: Iterable[ProbeResult]) -> list[dict[str, Any]]:
    """Return results of probes as dictionaries, the probe as its URL."""
    return [{**item._asdict(), "probe": str(item.probe)} for item in results]


def report_result(report: Report) -> dict[str, Any]:
    """Return the part of a module's result that describes one convergence or inspection."""
    return {
        "mode": report.mode,
        "mode_reason": report.mode_reason,
        "behaviour": report.behaviour,
        "ipvs_filter_backend": report.ipvs_filter_backend,
        "node_name": report.node_name,
        "families": list(report.families),
        "variant": str(report.xtables_variant or ""),
        "counts": dict(report.counts),
        "changes": change_result(report.changes),
        "durations": {stage: round(seconds, 3) for stage, seconds in report.durations.items()},
        **refused_result(report.refused, report.skipped),
    }


def coverage_result(report: Report) -> dict[str, Any]:
    """Return the part of a result about pods that no policy selects, and policies that select no pod."""
    return _first_of({"unselected_pods": report.unselected_pods, "unused_policies": report.unused_policies})


def kernel_settings(configuration: KubeProxyConfiguration, filter_backend: str, localhost: bool) -> dict[str, Any]:
    """Return the settings that the role ``kernel`` makes persistent, as values of its variables.

    ``configuration`` is that of the mode in effect, and ``filter_backend`` the one of ipvs mode; ``localhost``: node
    ports answer on 127.0.0.1. Both the role and the service proxy use these values, so that they never want different
    values of one kernel parameter.
    """
    return {
        "mode": configuration.mode,
        "schedulers": list(configuration.effective_schedulers),
        "ipvs_filter_backend": filter_backend or AUTO,
        "strict_arp": configuration.effective_strict_arp,
        "route_localnet": localhost,
        "conntrack": configuration.conntrack.options(),
    }


def difference_lines(changes: Iterable[TableChange], limit: int) -> list[str]:
    """Return the diffs of all tables that differ, of at most ``limit`` lines each, all of them if it is 0 or less."""
    lines: list[str] = []
    for change in changes:
        before, after = ([line.expandtabs(2) for line in side] for side in (change.before, change.after))
        lines += unified(change.table, before, after, limit)
    return lines


def table_differences(changes: Iterable[TableChange], limit: int) -> list[dict[str, str]]:
    """Return a result's ``diff``: one entry per table that differs, in the syntax of the table's usual tool."""
    return [difference_entry(change.table, change.before, change.after, limit) for change in changes]
