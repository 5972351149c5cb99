# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The section of the page with the exceptions of the whole cluster, by kind."""

from __future__ import annotations

from typing import Dict, Mapping, Sequence

from .document import POLICIES, REFUSED, SEVERITIES, TITLES, Exceptions, Item, Report
from .markup import badge, escape, plural
from .nodes import AGENT, DIFFERS, DRIFTED, FAILED, OK, STALE, UNREACHABLE, UNREACHED, WARNED

_MEANINGS: Dict[str, str] = {
    UNREACHABLE: "nodes that could not be connected to",
    FAILED: "nodes that could not be inspected",
    AGENT: "nodes whose agent is not healthy",
    DRIFTED: "nodes whose kernel differs from the cluster's state",
    UNREACHED: "nodes from which a Service does not answer",
    STALE: "nodes whose agent has not synced for a long time",
    REFUSED: "invalid objects of the cluster, which are skipped; all others are served",
    WARNED: "warnings of nodes",
    POLICIES: "pods that no network policy selects, and policies that select no pod",
    DIFFERS: "nodes with another mode or engine than most",
}
# Shown at once; the rest is one click away.
_ITEMS_SHOWN = 5
_NAMES_SHOWN = 6


def _names(names: Sequence[str], places: Mapping[str, int]) -> str:
    links = [f'<a href="#n{places[name]}" data-node="{places[name]}">{escape(name)}</a>' for name in names]
    shown = " ".join(links[:_NAMES_SHOWN])
    if len(links) > _NAMES_SHOWN:
        left = " ".join(links[_NAMES_SHOWN:])
        shown += (
            f' <details class="more"><summary>and {len(links) - _NAMES_SHOWN:,} more</summary> '
            f'<span class="names">{left}</span></details>'
        )
    return f'<span class="names">{shown}</span>'


def _item_row(item: Item, subjects: bool, places: Mapping[str, int], total: int) -> str:
    subject = f'<th scope="row">{escape(item.subject)}</th>' if subjects else ""
    everywhere = total > 1 and len(item.nodes) == total
    who = '<span class="soft">every node</span>' if everywhere else _names(item.nodes, places)
    return (
        f'<tr>{subject}<td>{escape(item.words)}</td><td class="number">{len(item.nodes):,}</td>'
        f'<td class="who">{who}</td></tr>'
    )


def _exception(found: Exceptions, report: Report, places: Mapping[str, int]) -> str:
    subjects = any(item.subject for item in found.items)
    head = (
        "<thead><tr>"
        + (f'<th scope="col">{"Object" if found.kind == REFUSED else "What"}</th>' if subjects else "")
        + '<th scope="col">Reason</th><th scope="col" class="number">Nodes</th><th scope="col">Which</th></tr></thead>'
    )
    total = len(report.nodes)
    lines = [_item_row(item, subjects, places, total) for item in found.items]
    body = f"<table>{head}<tbody>{''.join(lines[:_ITEMS_SHOWN])}</tbody></table>"
    if len(lines) > _ITEMS_SHOWN:
        body += (
            f'<details class="more"><summary>Show {len(lines) - _ITEMS_SHOWN:,} more</summary>'
            f"<table>{head}<tbody>{''.join(lines[_ITEMS_SHOWN:])}</tbody></table></details>"
        )
    if found.kind == REFUSED:
        amount = plural(len({item.subject for item in found.items}), "object", "objects")
    else:
        amount = plural(found.nodes, "node", "nodes")
    opened = " open" if SEVERITIES[found.kind] == "error" else ""
    return (
        f'<details class="kind" id="kind-{found.kind}"{opened}><summary>{badge(found.kind)}'
        f'<h3>{TITLES[found.kind]}</h3><b>{amount}</b><span class="what">{_MEANINGS[found.kind]}</span></summary>'
        f'<div class="body">{body}</div></details>'
    )


def exceptions_section(report: Report, places: Mapping[str, int]) -> str:
    """Return the section of the page. ``places``: the number of each node on the page, by its name."""
    if report.exceptions:
        body = "".join(_exception(found, report, places) for found in report.exceptions)
        body = f'<div class="exceptions">{body}</div>'
    else:
        body = f'<p class="card allclear">{badge(OK)} None: every node is as it should be, and like the others.</p>'
    heading = '<h2 id="h-exceptions">Exceptions</h2>'
    return f'<section id="exceptions" aria-labelledby="h-exceptions">{heading}{body}</section>'
