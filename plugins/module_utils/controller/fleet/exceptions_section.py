# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The section of the page with the exceptions of the whole cluster, by kind."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Sequence, Tuple

from .document import POLICIES, REFUSED, SEVERITIES, TITLES, Exceptions, Item, Report
from .markup import badge, escape, names, plural
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


def _pattern(item: Item) -> Tuple[str, str]:
    """Return the kind of an item's reason: its subject and its words without numbers, such as ages and addresses."""
    return item.subject, re.sub(r"[0-9]+", "0", item.words)


def _grouped(items: Sequence[Item]) -> List[List[Item]]:
    """Return the items by the kind of their reason, in the order of the first of each kind."""
    groups: Dict[Tuple[str, str], List[Item]] = {}
    for item in items:
        groups.setdefault(_pattern(item), []).append(item)
    return list(groups.values())


def _words(group: Sequence[Item]) -> str:
    """Return the words of the first item, with those of the others one click away."""
    first, others = escape(group[0].words), group[1:]
    if not others:
        return first
    listed = "".join(f"<li>{escape(item.words)}</li>" for item in others)
    more = f"and {len(others):,} similar"
    return f'{first} <details class="more"><summary>{more}</summary><ul>{listed}</ul></details>'


def _group_row(group: Sequence[Item], subjects: bool, places: Mapping[str, int], total: int) -> str:
    subject = f'<th scope="row">{escape(group[0].subject)}</th>' if subjects else ""
    nodes = tuple(dict.fromkeys(name for item in group for name in item.nodes))
    everywhere = total > 1 and len(nodes) == total
    who = '<span class="soft">every node</span>' if everywhere else names(nodes, places)
    return f'<tr>{subject}<td>{_words(group)}</td><td class="number">{len(nodes):,}</td><td class="who">{who}</td></tr>'


def _exception(found: Exceptions, report: Report, places: Mapping[str, int]) -> str:
    subjects = any(item.subject for item in found.items)
    head = (
        "<thead><tr>"
        + (f'<th scope="col">{"Object" if found.kind == REFUSED else "What"}</th>' if subjects else "")
        + '<th scope="col">Reason</th><th scope="col" class="number">Nodes</th><th scope="col">Which</th></tr></thead>'
    )
    total = len(report.nodes)
    lines = [_group_row(group, subjects, places, total) for group in _grouped(found.items)]
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
