# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How modules that converge a few resource tables report them: what differs, entry by entry, capped.

It depends on nothing but the difference, so that the payload of a small module stays small.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from ..errors import ProxyError
from ..resources import Change, PlannedChange, Resource

# Entries named per table in a result, and lines per side of one diff entry.
ENTRIES_LIMIT = 50
DIFF_LINES_LIMIT = 500


def changed_lines(resource: Resource[Any, Any], change: Change[Any, Any]) -> Tuple[List[str], List[str]]:
    """Lines of the entries that differ, before and after, in the syntax of the table's usual tool."""
    before: List[str] = []
    after: List[str] = []
    for key, value in change.removed.items():
        before += resource.describe(key, value)
    for key, (old, new) in change.replaced.items():
        before += resource.describe(key, old)
        after += resource.describe(key, new)
    for key, value in change.added.items():
        after += resource.describe(key, value)
    return before, after


def _text(lines: Sequence[str], limit: int) -> str:
    shown = "".join(f"{line}\n" for line in lines[:limit])
    left_out = len(lines) - limit
    return f"{shown}... {left_out} more line(s) left out\n" if left_out > 0 else shown


def difference_entry(name: str, before: Sequence[str], after: Sequence[str], limit: int) -> Dict[str, str]:
    """One entry of a result's ``diff``: two texts of at most ``limit`` lines each, headed by what they are about."""
    return {
        "before_header": f"{name} (before)",
        "after_header": f"{name} (after)",
        "before": _text(before, limit),
        "after": _text(after, limit),
    }


def planned_differences(planned: Sequence[PlannedChange], limit: int = DIFF_LINES_LIMIT) -> List[Dict[str, str]]:
    """A result's ``diff``: one entry per resource that differs; files and chains are entries of their own."""
    entries = []
    for item in planned:
        resource, change = item.resource, item.change
        if not change:
            continue
        if getattr(resource, "diff_by_key", False):
            for key, part in _by_key(change):
                name = key if isinstance(key, str) else f"{resource.label}: {_label(key)}"
                entries.append(difference_entry(name, *changed_lines(resource, part), limit))
        else:
            entries.append(difference_entry(resource.label, *changed_lines(resource, change), limit))
    return entries


def _by_key(change: Change[Any, Any]) -> List[Tuple[Any, Change[Any, Any]]]:
    parts: List[Tuple[Any, Change[Any, Any]]] = []
    parts += [(key, Change(added={key: value})) for key, value in change.added.items()]
    parts += [(key, Change(replaced={key: pair})) for key, pair in change.replaced.items()]
    parts += [(key, Change(removed={key: value})) for key, value in change.removed.items()]
    return parts


def _label(key: Any) -> str:
    """A key in words: its own text if it has one, else its parts."""
    if isinstance(key, tuple) and type(key).__str__ is object.__str__:
        return " ".join(str(part) for part in key)
    return str(key)


def change_records(planned: Sequence[PlannedChange], limit: int = ENTRIES_LIMIT) -> List[Dict[str, Any]]:
    """A result's ``changes``: per table that differs the counts, and the names of the first ``limit`` entries."""
    records = []
    for item in planned:
        resource, change = item.resource, item.change
        if change:
            names = [_label(key) for key in (*change.added, *change.replaced, *change.removed)]
            records.append(
                {
                    "table": resource.label,
                    "added": len(change.added),
                    "replaced": len(change.replaced),
                    "removed": len(change.removed),
                    "entries": names[:limit],
                    "truncated": len(names) > limit,
                }
            )
    return records


def failure(error: ProxyError) -> Dict[str, str]:
    """Arguments of ``fail_json``: one line for people, and the kind of the error for conditions in playbooks.

    The kinds are the direct subclasses of ProxyError; what is derived from one of them is of its kind.
    """
    lineage = type(error).__mro__
    kind = lineage[max(lineage.index(ProxyError) - 1, 0)].__name__
    return {"msg": str(error), "error_kind": (kind[: -len("Error")] if kind.endswith("Error") else kind).lower()}


def root_needed(effective_user: int, what: str) -> Dict[str, str]:
    """Arguments of ``fail_json`` for a user who is not root, empty for root."""
    if effective_user == 0:
        return {}
    return {
        "msg": f"{what} needs root: run the task with become: true (it runs as user id {effective_user})",
        "error_kind": "preflight",
    }
