# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What has changed since an earlier report, given its JSON document."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

from .nodes import NAME_LIMIT, natural_key, text

#: The compared fields of a node, in the order of the report. A node that one report does not have has no state there.
FIELDS = ("state", "mode", "engine")
#: The compared numbers of the summary.
NUMBERS = ("nodes", "services", "endpoints", "drift_entries", "refused_objects")


class Change(NamedTuple):
    """The same change of one field on all its nodes; ``before`` or ``now`` is empty for a node that is not in it."""

    field: str
    before: str
    now: str
    nodes: tuple[str, ...]


class Changes(NamedTuple):
    """All changes. ``generated``: when the earlier report was made; ``numbers``: how those of its summary differ."""

    generated: str
    numbers: dict[str, int]
    changes: tuple[Change, ...]


def changes(previous: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return the changes from an earlier document to another. The earlier one is a file, so it may hold anything."""
    before, after = _nodes(previous), _nodes(now)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted({*before, *after}, key=natural_key):
        for field in FIELDS:
            old, new = before.get(name, {}).get(field, ""), after.get(name, {}).get(field, "")
            # The mode and the engine of a node that cannot be read are not known.
            if old != new and (field == FIELDS[0] or (old and new)):
                groups.setdefault((field, old, new), []).append(name)
    order = sorted(groups, key=lambda key: (FIELDS.index(key[0]), -len(groups[key]), key))
    return Changes(
        generated=text(previous.get("generated")),
        numbers={name: number for name, number in _differences(previous, now) if number},
        changes=tuple(Change(*key, tuple(groups[key])) for key in order),
    )


def _nodes(document: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    listed = document.get("nodes")
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, dict) and text(item.get("name"), NAME_LIMIT):
            fields = {field: text(item.get(field)) for field in FIELDS}
            agent = item.get("agent")
            running = text(agent.get("version")) if isinstance(agent, dict) else ""
            found[text(item["name"], NAME_LIMIT)] = {**fields, "engine": running or fields["engine"]}
    return found


def _differences(previous: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, int]]:
    old, new = previous.get("summary"), now.get("summary")
    if not isinstance(old, dict) or not isinstance(new, dict):
        return []
    pairs = [(name, old.get(name), new.get(name)) for name in NUMBERS]
    return [(name, b - a) for name, a, b in pairs if isinstance(a, int) and isinstance(b, int)]
