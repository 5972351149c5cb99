# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reports of modules that converge a few resource tables: the entries that differ, up to a limit.

This file depends only on the difference, to keep the payload of a small module small.
"""

from __future__ import annotations

from typing import Any, Sequence

from ..base.errors import ProxyError
from ..differences import changed_lines, differing
from ..resources import Change, PlannedChange

# Entries named per table in a result, and lines per side of one diff entry.
ENTRIES_LIMIT = 50
DIFF_LINES_LIMIT = 500


def _text(lines: Sequence[str], limit: int) -> str:
    shown = "".join(f"{line}\n" for line in lines[:limit])
    omitted = len(lines) - limit
    return f"{shown}... {omitted} more line(s) omitted\n" if omitted > 0 else shown


def difference_entry(name: str, before: Sequence[str], after: Sequence[str], limit: int) -> dict[str, str]:
    """Return one entry of a result's ``diff``: two texts with headers.

    They have at most ``limit`` lines each, or all of them if it is <= 0. Lines that both have count only if all do not
    fit.
    """
    longest = max(len(before), len(after))
    limit = limit if limit > 0 else longest
    if longest > limit:
        before, after = differing(before, after)
    return {"before_header": name, "after_header": name, "before": _text(before, limit), "after": _text(after, limit)}


def planned_differences(planned: Sequence[PlannedChange], limit: int = DIFF_LINES_LIMIT) -> list[dict[str, str]]:
    """Return a result's ``diff``: one entry per resource that differs, or per file or chain of such a resource."""
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


def _by_key(change: Change[Any, Any]) -> list[tuple[Any, Change[Any, Any]]]:
    parts: list[tuple[Any, Change[Any, Any]]] = []
    parts += [(key, Change(added={key: value})) for key, value in change.added.items()]
    parts += [(key, Change(replaced={key: pair})) for key, pair in change.replaced.items()]
    parts += [(key, Change(removed={key: value})) for key, value in change.removed.items()]
    return parts


def _label(key: Any) -> str:
    """Return the text of a key: its own if it defines one, else its parts joined."""
    if isinstance(key, tuple) and type(key).__str__ is object.__str__:
        return " ".join(str(part) for part in key)
    return str(key)


def change_record(table: str, sizes: tuple[int, int, int], entries: Sequence[str]) -> dict[str, Any]:
    """Return the record of a table that differs; ``sizes``: how many entries were added, replaced and removed."""
    counts = dict(zip(("added", "replaced", "removed"), sizes))
    return {"table": table, **counts, "entries": list(entries), "truncated": sum(sizes) > len(entries)}


def change_records(planned: Sequence[PlannedChange], limit: int = ENTRIES_LIMIT) -> list[dict[str, Any]]:
    """Return a result's ``changes``: for each table that differs, the counts and the first ``limit`` names."""
    records = []
    for item in planned:
        resource, change = item.resource, item.change
        if change:
            names = [_label(key) for key in (*change.added, *change.replaced, *change.removed)]
            sizes = (len(change.added), len(change.replaced), len(change.removed))
            records.append(change_record(resource.label, sizes, names[:limit]))
    return records


def planned_result(planned: Sequence[PlannedChange], with_diff: bool) -> dict[str, Any]:
    """Return the parts of a result that follow from the changes: ``changed``, ``changes`` and perhaps ``diff``."""
    result = {"changed": any(item.change for item in planned), "changes": change_records(planned)}
    return {**result, "diff": planned_differences(planned)} if with_diff else result


def failure(error: ProxyError) -> dict[str, str]:
    """Return the arguments of ``fail_json``: a message in one line, and the kind of error for playbooks.

    The kinds are the direct subclasses of ProxyError; an error derived from one of them has that kind.
    """
    lineage = type(error).__mro__
    kind = lineage[max(lineage.index(ProxyError) - 1, 0)].__name__
    return {"msg": str(error), "error_kind": (kind[: -len("Error")] if kind.endswith("Error") else kind).lower()}
