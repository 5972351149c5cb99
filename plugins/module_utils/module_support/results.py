# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What modules return: small, stable in shape, documented; never the rule set itself."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence

from ..convergence.request import Report, TableChange
from ..errors import Refusal
from .tables import difference_entry

# With one bad object per tenant the list of refusals would otherwise be as large as the cluster.
REFUSED_LIMIT = 100


def refused_result(refused: Sequence[Refusal]) -> Dict[str, Any]:
    """The keys ``refused`` (the first 100 as dictionaries) and ``refused_count`` (all of them)."""
    return {"refused": [refusal._asdict() for refusal in refused[:REFUSED_LIMIT]], "refused_count": len(refused)}


def change_result(changes: Iterable[TableChange]) -> List[Dict[str, Any]]:
    """Counts per table that differs, without any lines."""
    return [
        {"table": change.table, "added": change.added, "replaced": change.replaced, "removed": change.removed}
        for change in changes
    ]


def report_result(report: Report) -> Dict[str, Any]:
    """The part of a module's result that tells of one convergence or inspection."""
    return {
        "mode": report.mode,
        "mode_reason": report.mode_reason,
        "node_name": report.node_name,
        "families": list(report.families),
        "variant": report.xtables_variant,
        "counts": dict(report.counts),
        "changes": change_result(report.changes),
        "durations": {stage: round(seconds, 3) for stage, seconds in report.durations.items()},
        **refused_result(report.refused),
    }


def text_difference(name: str, before: Sequence[str], after: Sequence[str], limit: int) -> Dict[str, str]:
    """One entry of a result's ``diff``; at most ``limit`` lines of each side, all of them if it is 0 or less."""
    return difference_entry(name, before, after, limit if limit > 0 else max(len(before), len(after)))


def table_differences(changes: Iterable[TableChange], limit: int) -> List[Dict[str, str]]:
    """A result's ``diff``: one entry per table that differs, in the syntax of the table's usual tool."""
    return [text_difference(change.table, change.before, change.after, limit) for change in changes]
