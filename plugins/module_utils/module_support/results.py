# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What modules return: small, stable in shape, documented; never the rule set itself."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence, Tuple

from ..convergence.request import Report, TableChange
from ..errors import ProxyError, Refusal

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


def capped(lines: Sequence[str], limit: int) -> Tuple[str, str]:
    """Text of at most ``limit`` lines (0: all of them), and a note for the header saying what was left out, or nothing."""
    if limit <= 0 or len(lines) <= limit:
        return "".join(f"{line}\n" for line in lines), ""
    kept = "".join(f"{line}\n" for line in lines[:limit])
    return kept, f" (first {limit} of {len(lines)} changed lines)"


def text_difference(name: str, before: Sequence[str], after: Sequence[str], limit: int) -> Dict[str, str]:
    """One entry of a result's ``diff``: two texts with headers, both capped at ``limit`` lines (0: not capped)."""
    before_text, before_note = capped(before, limit)
    after_text, after_note = capped(after, limit)
    return {
        "before_header": f"{name}{before_note}",
        "after_header": f"{name}{after_note}",
        "before": before_text,
        "after": after_text,
    }


def table_differences(changes: Iterable[TableChange], limit: int) -> List[Dict[str, str]]:
    """A result's ``diff``: one entry per table that differs, in the syntax of the table's usual tool."""
    return [text_difference(change.table, change.before, change.after, limit) for change in changes]


def failure_result(error: ProxyError) -> Dict[str, str]:
    """Arguments of ``fail_json``: one line for people, and the kind of the error for conditions in playbooks."""
    kind = type(error).__name__
    return {"msg": str(error), "error_kind": (kind[: -len("Error")] if kind.endswith("Error") else kind).lower()}
