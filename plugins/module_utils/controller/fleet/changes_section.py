# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The section of the page with what has changed since the previous report."""

from __future__ import annotations

from typing import Dict, Mapping, Optional

from .changes import FIELDS, Change, Changes
from .markup import WORDS, escape, names, plural

_FIELDS: Dict[str, str] = dict(zip(FIELDS, ("State", "Mode", "Engine")))


def _value(change: Change, value: str) -> str:
    if not value:
        return '<span class="soft">not in the report</span>'
    return escape(WORDS.get(value, value) if change.field == FIELDS[0] else value)


def _row(change: Change, places: Mapping[str, int]) -> str:
    return (
        f'<tr><th scope="row">{_FIELDS[change.field]}</th><td>{_value(change, change.before)}</td>'
        f'<td>{_value(change, change.now)}</td><td class="number">{len(change.nodes):,}</td>'
        f'<td class="who">{names(change.nodes, places)}</td></tr>'
    )


def changes_section(found: Optional[Changes], places: Mapping[str, int]) -> str:
    """Return the section, empty without an earlier report. ``places``: the number of each node on the page."""
    if found is None:
        return ""
    since = escape(found.since.replace("T", " ").replace("Z", " UTC"))
    heading = f'<h2 id="h-changes">Changes since {since}</h2>'
    head = "".join(f'<th scope="col">{name}</th>' for name in ("What", "Before", "Now"))
    head += '<th scope="col" class="number">Nodes</th><th scope="col">Which</th>'
    if found.items:
        count = plural(len({name for change in found.items for name in change.nodes}), "node", "nodes")
        rows = "".join(_row(change, places) for change in found.items)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        body = (
            f'<div class="exceptions"><details class="kind" open><summary><h3>Nodes</h3><b>{count}</b></summary>'
            f'<div class="body">{table}</div></details></div>'
        )
    else:
        body = '<p class="card allclear">None: each node has the same state, mode and engine as then.</p>'
    return f'<section id="changes" aria-labelledby="h-changes">{heading}{body}</section>'
