# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The report as one HTML page that loads nothing else and can be read without its script.

Every value goes through :func:`escape` or into a JSON block in which no markup can end it. The page's own policy
(Content-Security-Policy) allows the one style sheet and the one script by their hashes and nothing else, so that even
a value that got through would not run.

The style sheet and the script are files beside this module. Ansible does not send them to hosts, so the page can only
be made on the controller.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ...base.timestamps import timestamp
from .changes_section import changes_section
from .document import (
    KINDS,
    REFUSED,
    Reason,
    Report,
    duration,
    running_engine,
    summary,
)
from .exceptions_section import exceptions_section
from .markup import LETTERS, WORDS, badge, escape, plural
from .matrix import reach_matrix
from .nodes import (
    OK,
    STATES,
    Agent,
    Node,
)

_TALLY_SHOWN = 5
_DENSE_FROM = 250
# More nodes do not fit into a screen together with the exceptions, so that their matrix comes first.
_MATRIX_FIRST_FROM = 60

_COLUMNS: Tuple[Tuple[str, str, bool], ...] = (
    ("name", "Node", False),
    ("state", "State", False),
    ("mode", "Mode", False),
    ("services", "Services", True),
    ("service_ports", "Ports", True),
    ("endpoints", "Endpoints", True),
    ("drift", "Drift", True),
    ("refused", "Refused", True),
    ("sync", "Last sync", True),
    ("engine", "Engine", False),
    ("kernel", "Kernel", False),
    ("distribution", "System", False),
)
# The columns by which nodes may be coloured.
_COLOURED = frozenset(("state", "mode", "engine", "kernel", "distribution"))


def script_data(value: Any) -> str:
    """Return a value as JSON for a script element; nothing in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _number(value: Optional[int]) -> str:
    return "" if value is None else f"{value:,}"


def _source(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii") + "'"


def _agent_words(agent: Optional[Agent], engine: str) -> str:
    if agent is None:
        return "installed" if engine else ""
    if not agent.running:
        return "does not answer"
    started = ", started from the state on disk" if agent.from_cache else ""
    lost = max(agent.lost_seconds.values(), default=0.0)
    alone = f", disconnected from the API server for {duration(lost)}" if lost else ""
    drained = f", drained until {agent.drained_until}" if agent.drained_until else ""
    syncs = plural(agent.syncs, "sync", "syncs")
    return f"{'healthy' if agent.healthy else 'not healthy'}{alone}{drained}, {syncs}{started}"


def _last_sync(agent: Optional[Agent]) -> str:
    if agent is None or agent.last_sync_age is None:
        return ""
    return f"{duration(agent.last_sync_age)} ago"


# -- the parts of the page ---------------------------------------------------------------------------------------------


def _share(report: Report) -> str:
    """Return a bar of all states over the whole width; the legend below the matrix has the same numbers."""
    by_state = Counter(report.states)
    total = max(len(report.nodes), 1)
    parts, x = [], 0.0
    for state in (OK, *reversed(STATES[:-1])):
        width = 1000 * by_state[state] / total
        if width:
            title = f"{WORDS[state]}: {by_state[state]:,}"
            parts.append(
                f'<rect class="f-{state}" x="{x:.2f}" width="{width:.2f}" height="14"><title>{title}</title></rect>'
            )
        x += width
    label = ", ".join(f"{WORDS[state]} {by_state[state]}" for state in STATES if by_state[state])
    return (
        f'<svg class="share" viewBox="0 0 1000 14" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _tally(title: str, counts: Mapping[str, int], exact: bool = False) -> str:
    most = max(counts.values(), default=1)
    lines = []
    listed = list(counts.items())
    for value, number in listed[:_TALLY_SHOWN]:
        style = ' class="mono"' if exact else ""
        lines.append(
            f'<tr><th scope="row" title="{escape(value)}"><span{style}>{escape(value)}</span></th><td class="graph">'
            f'<svg class="tally" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect width="{max(100 * number / most, 1):.1f}" height="8" rx="2"/></svg></td><td>{number:,}</td></tr>'
        )
    left = listed[_TALLY_SHOWN:]
    if left:
        count = sum(number for _value, number in left)
        lines.append(f'<tr><th scope="row" class="soft">{len(left)} more</th><td></td><td>{count:,}</td></tr>')
    if not lines:
        lines.append('<tr><td class="soft">not known</td></tr>')
    return f"<div><h3>{title}</h3><table>{''.join(lines)}</table></div>"


def _changed(difference: int) -> str:
    return f' <small class="soft">({difference:+,})</small>' if difference else ""


def _overview(report: Report) -> str:
    counts = summary(report)
    total, fine = counts["nodes"], counts["states"][OK]
    if not total:
        verdict = "There are no nodes in this report."
    elif fine == total:
        verdict = f"All {total:,} nodes are fine." if total > 1 else "The node is fine."
    else:
        look = total - fine
        verdict = f"{look:,} of {total:,} {'node needs' if total == 1 else 'nodes need'} a look."
    figures = (
        ("Nodes", "nodes"),
        ("Services", "services"),
        ("Endpoints on a node", "endpoints"),
        ("Drifted entries", "drift_entries"),
        ("Objects refused", "refused_objects"),
    )
    changed = report.changes.numbers if report.changes is not None else {}
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{counts[key]:,}{_changed(changed.get(key, 0))}</dd></div>" for name, key in figures
    )
    tallies = (
        _tally("Mode", counts["modes"])
        + _tally("Engine", counts["engines"], True)
        + _tally("Kernel", counts["kernels"])
        + _tally("System", counts["distributions"])
    )
    return (
        '<section class="card" aria-labelledby="verdict">'
        f'<h2 class="verdict" id="verdict">{verdict}</h2><dl class="figures">{shown}</dl>{_share(report)}'
        f'<div class="tallies">{tallies}</div></section>'
    )


def _legend(report: Report) -> str:
    by_state = Counter(report.states)
    return "".join(
        f'<li class="chip">{badge(state)}<span>{WORDS[state]}</span> <b>{by_state[state]:,}</b></li>'
        for state in STATES
        if by_state[state]
    )


def _cell(place: int, node: Node, state: str) -> str:
    label = f"{node.name}: {WORDS[state]}{', ' if node.mode else ''}{node.mode}"
    return (
        f'<li><a class="cell s-{state}" href="#n{place}" data-node="{place}" aria-label="{escape(label)}">'
        f"{LETTERS[state]}</a></li>"
    )


def _row(place: int, node: Node, state: str) -> str:
    drift = "" if node.drift is None else _number(node.drift_entries)
    engine = running_engine(node)
    cells = (
        f'<th scope="row"><a href="#n{place}" data-node="{place}">{escape(node.name)}</a></th>'
        f"<td>{badge(state)}{WORDS[state]}</td><td>{escape(node.mode)}</td>"
        f'<td class="number">{_number(node.services)}</td><td class="number">{_number(node.service_ports)}</td>'
        f'<td class="number">{_number(node.endpoints)}</td><td class="number">{drift}</td>'
        f'<td class="number">{_number(node.refused_count) if not node.failure else ""}</td>'
        f'<td class="number">{_last_sync(node.agent)}</td>'
        f'<td title="{escape(engine)}"><span class="mono">{escape(engine)}</span></td>'
        f"<td>{escape(node.kernel)}</td><td>{escape(node.distribution)}</td>"
    )
    return f'<tr id="n{place}">{cells}</tr>'


def _nodes(report: Report) -> Tuple[str, str]:
    """Return the section with the matrix of all nodes, and the table of all nodes."""
    listed = list(enumerate(zip(report.nodes, report.states)))
    cells = "".join(_cell(place, node, state) for place, (node, state) in listed)
    rows = "\n".join(_row(place, node, state) for place, (node, state) in listed)
    heads = "".join(
        f'<th scope="col" data-key="{key}"{" class=number" if number else ""}'
        f"{' aria-sort=ascending' if key == 'name' else ''}>{name}</th>"
        for key, name, number in _COLUMNS
    )
    orders = "".join(f'<option value="{key}">{name}</option>' for key, name, _number in _COLUMNS)
    colours = "".join(f'<option value="{key}">{name}</option>' for key, name, _number in _COLUMNS if key in _COLOURED)
    dense = " dense" if len(report.nodes) >= _DENSE_FROM else ""
    return (
        '<section id="nodes" aria-labelledby="h-nodes"><h2 id="h-nodes">Nodes</h2><div class="card">'
        '<div class="toolbar"><label>Filter<input id="filter" type="search" autocomplete="off" spellcheck="false" '
        'placeholder="name, mode, kernel, words of a message"></label>'
        f'<label>Colour by<select id="colour" autocomplete="off">{colours}</select></label>'
        f'<label>Order by<select id="order" autocomplete="off">{orders}</select></label>'
        f'<output id="shown" for="filter" aria-live="polite">{plural(len(report.nodes), "node", "nodes")}</output>'
        "</div>"
        f'<ul class="legend" id="legend" aria-label="What the colours mean">{_legend(report)}</ul>'
        f'<div class="stage{dense}"><div><ul class="matrix" id="matrix" aria-label="All nodes">{cells}</ul>'
        '<p class="nothing" id="nothing" hidden>No node matches.</p></div>'
        '<aside class="panel" id="panel" aria-label="Details of a node" aria-live="polite"></aside>'
        "</div></div></section>",
        '<section class="card" id="table" aria-label="Table of all nodes">'
        '<div class="wide" tabindex="0" role="region" aria-label="Table"><table class="nodes">'
        "<caption>All nodes. Drift counts entries of kernel tables that are missing, different or unexpected.</caption>"
        f'<thead><tr>{heads}</tr></thead><tbody id="rows">\n{rows}\n</tbody></table></div></section>'
        '<div class="tip" id="tip" role="status" aria-hidden="true" hidden></div>',
    )


def _node_data(node: Node, state: str, reasons: Sequence[Reason]) -> Dict[str, Any]:
    return {
        "name": node.name,
        "node_name": node.node_name,
        "state": state,
        "mode": node.mode,
        "mode_reason": node.mode_reason,
        "variant": node.variant,
        "families": node.families,
        "services": node.services,
        "service_ports": node.service_ports,
        "endpoints": node.endpoints,
        "drift_entries": None if node.drift is None else node.drift_entries,
        "refused_count": None if node.failure else node.refused_count,
        "engine": running_engine(node),
        "kernel": node.kernel,
        "distribution": node.distribution,
        "agent": _agent_words(node.agent, node.engine),
        "age": None if node.agent is None else node.agent.last_sync_age,
        "last_sync": _last_sync(node.agent),
        "repaired": 0 if node.agent is None else node.agent.drift_repaired,
        "changes": [change[:4] for change in node.changes],
        "programmed": list(node.programmed.items()),
        # Refused objects are the same on all nodes, and listed once, above.
        "reasons": [reason for reason in reasons if reason.kind != REFUSED],
    }


def _data(report: Report) -> str:
    def place(reason: Reason) -> int:
        return KINDS.index(reason.kind)

    nodes: List[Dict[str, Any]] = [
        _node_data(node, state, sorted(reasons, key=place))
        for node, state, reasons in zip(report.nodes, report.states, report.reasons)
    ]
    return script_data({"nodes": nodes, "letters": LETTERS, "words": WORDS, "states": STATES})


def _asset(name: str) -> str:
    """Return a file of the page without the comment at its beginning."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8").partition("*/\n")[2]


def page(report: Report) -> str:
    """Return the report as a complete HTML document."""
    style, script = _asset("page.css"), _asset("page.js")
    about = report.about
    places = {node.name: place for place, node in enumerate(report.nodes)}
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    made = timestamp(about.generated)
    parts = [f'<time datetime="{made}">{made.replace("T", " ").replace("Z", " UTC")}</time>']
    if about.collection_version:
        parts.append(f"kubenode.proxy {escape(about.collection_version)}")
    if about.engine:
        parts.append(f"engine <code>{escape(about.engine)}</code>")
    title = escape(about.title)
    matrix, table = _nodes(report)
    exceptions = f"{changes_section(report.changes, places)}{exceptions_section(report, places)}\n"
    reached = reach_matrix(report.nodes, places)
    first = (matrix, exceptions) if len(report.nodes) >= _MATRIX_FIRST_FROM else (exceptions, matrix)
    sections = f"{first[0]}{reached}{first[1]}{table}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#nodes">Skip to the nodes</a>\n'
        f'<header class="top"><h1>{title}</h1><p class="meta">{" &middot; ".join(parts)}</p></header>\n'
        f"<main>\n{_overview(report)}\n{sections}\n</main>\n"
        "<footer><p>Made by the playbook kubenode.proxy.report. Ages are by the clocks of the nodes.</p></footer>\n"
        f'<script type="application/json" id="fleet-data">{_data(report)}</script>\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )
