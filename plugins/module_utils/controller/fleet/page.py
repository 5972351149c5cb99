# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The report as one HTML page that loads nothing else and can be read without its script.

The template escapes every value, except in a JSON block in which no markup can end it. The page's own policy
(Content-Security-Policy) allows the one style sheet and the one script by their hashes and nothing else, so that even
a value that got through would not run.

The template, the style sheet and the script are files beside this module. Ansible does not send them to hosts, so the
page can only be made on the controller.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from ...base.timestamps import timestamp
from .document import Exceptions, Item, Reason, Report, duration, running_engine, summary
from .kinds import ERROR, KINDS, OK, REFUSED, STATES
from .nodes import Agent, Node

# Values, names and groups that are shown at once; the rest is counted, or one click away.
_SHOWN = {"values": 5, "names": 6, "groups": 5}
_DENSE_FROM = 250
# More nodes do not fit into a screen together with the exceptions, so that their matrix comes first.
_MATRIX_FIRST_FROM = 60
# If more nodes than this reach everything, they are counted and not shown.
_FINE_SHOWN = 40
_REACH_ROWS_SHOWN = 400


class Column(NamedTuple):
    """A column of the table of nodes; the script reads ``key`` of a node. ``number``: it is aligned as a number."""

    key: str
    title: str
    number: bool = False


_COLUMNS = (
    Column("name", "Node"),
    Column("state", "State"),
    Column("mode", "Mode"),
    Column("services", "Services", True),
    Column("service_ports", "Ports", True),
    Column("endpoints", "Endpoints", True),
    Column("drift", "Drift", True),
    Column("refused", "Refused", True),
    Column("sync", "Last sync", True),
    Column("engine", "Engine"),
    Column("kernel", "Kernel"),
    Column("distribution", "System"),
)
# The columns by which nodes may be coloured.
_COLOURED: frozenset[str] = frozenset(("state", "mode", "engine", "kernel", "distribution"))


# The fields of a node that the template and the script show as they are.
_SHOWN_AS_THEY_ARE = (
    *("name", "node_name", "mode", "mode_reason", "variant", "families", "services", "service_ports", "endpoints"),
    *("kernel", "distribution"),
)
_FIGURES = (
    ("Nodes", "nodes"),
    ("Services", "services"),
    ("Endpoints on a node", "endpoints"),
    ("Drifted entries", "drift_entries"),
    ("Objects refused", "refused_objects"),
)


def script_data(value: Any) -> str:
    """Return a value as JSON for a script element; nothing in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plural(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"


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
    syncs = _plural(agent.syncs, "sync")
    return f"{'healthy' if agent.healthy else 'not healthy'}{alone}{drained}, {syncs}{started}"


def _last_sync(agent: Optional[Agent]) -> str:
    if agent is None or agent.last_sync_age is None:
        return ""
    return f"{duration(agent.last_sync_age)} ago"


def _verdict(total: int, fine: int) -> str:
    if not total:
        return "There are no nodes in this report."
    if fine == total:
        return f"All {total:,} nodes are fine." if total > 1 else "The node is fine."
    return f"{total - fine:,} of {total:,} {'node needs' if total == 1 else 'nodes need'} a look."


def _shares(by_state: Mapping[str, int], total: int) -> list[tuple[str, float, float]]:
    """Return the place and the width of each state in a bar that is 1000 wide."""
    shares, x = [], 0.0
    for state in (OK, *reversed(STATES[:-1])):
        width = 1000 * by_state[state] / max(total, 1)
        if width:
            shares.append((state, x, width))
        x += width
    return shares


def _groups(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the items in groups of one subject and one reason, apart from numbers such as ages and addresses."""
    groups: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        groups.setdefault((item.subject, re.sub(r"[0-9]+", "0", item.words)), []).append(item)
    return [
        {
            "subject": subject,
            "reasons": [item.words for item in group],
            "nodes": tuple(dict.fromkeys(name for item in group for name in item.nodes)),
        }
        for (subject, _pattern), group in groups.items()
    ]


def _exception(found: Exceptions) -> dict[str, Any]:
    """Return what the template shows of one kind of exceptions."""
    refused = len({item.subject for item in found.items})
    return {
        "kind": found.kind,
        "meaning": KINDS[found.kind].meaning,
        "severe": KINDS[found.kind].severity == ERROR,
        "amount": _plural(refused, "object") if found.kind == REFUSED else _plural(found.nodes, "node"),
        "subjects": any(item.subject for item in found.items),
        "groups": _groups(found.items),
    }


def _reach(nodes: Sequence[Node]) -> dict[str, Any]:
    """Return the table that shows which node reaches which Service: a row per node, a column per Service."""
    probed = [node for node in nodes if node.traffic]
    failing = [node for node in probed if any(item.reached is False for item in node.traffic)]
    fine = len(probed) - len(failing)
    services = list(dict.fromkeys(item.service for node in probed for item in node.traffic))
    rows = []
    for node in (probed if fine <= _FINE_SHOWN else failing)[:_REACH_ROWS_SHOWN]:
        own = {item.service: item for item in node.traffic}
        rows.append((node.name, [own.get(name) for name in services]))
    return {"probed": len(probed), "fine": fine, "services": services, "rows": rows}


def _node_data(node: Node, state: str, reasons: Sequence[Reason]) -> dict[str, Any]:
    return {
        **{name: getattr(node, name) for name in _SHOWN_AS_THEY_ARE},
        "state": state,
        "drift_entries": None if node.drift is None else node.drift_entries,
        "refused_count": None if node.failure else node.refused_count,
        "engine": running_engine(node),
        "agent": _agent_words(node.agent, node.engine),
        "age": None if node.agent is None else node.agent.last_sync_age,
        "last_sync": _last_sync(node.agent),
        "repaired": 0 if node.agent is None else node.agent.drift_repaired,
        "changes": [change[:4] for change in node.changes],
        "programmed": list(node.programmed.items()),
        # Refused objects are the same on all nodes, and listed once, above.
        "reasons": [reason for reason in reasons if reason.kind != REFUSED],
    }


def _nodes(report: Report) -> list[dict[str, Any]]:
    """Return what the template and the script show of each node."""
    order = list(KINDS)
    return [
        _node_data(node, state, sorted(reasons, key=lambda reason: order.index(reason.kind)))
        for node, state, reasons in zip(report.nodes, report.states, report.reasons)
    ]


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _asset(name: str) -> str:
    """Return a file of the page without the comment at its beginning."""
    return _file(name).partition("*/\n")[2]


def page(report: Report) -> str:
    """Return the report as a complete HTML document."""
    # ansible-core has it on the controller; nodes, which do not make pages, need not.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters["number"] = lambda value: "" if value is None else f"{value:,}"
    # ``clock``: of RFC 3339.
    environment.filters.update(plural=_plural, clock=lambda time: time.replace("T", " ").replace("Z", " UTC"))
    template = environment.from_string("".join(map(str.strip, _file("page.html.j2").splitlines())))
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    counts, by_state = summary(report), Counter(report.states)
    nodes = _nodes(report)
    letters = {name: kind.letter for name, kind in KINDS.items()}
    words = {name: kind.title for name, kind in KINDS.items()}
    return template.render(
        about=report.about,
        made=timestamp(report.about.generated),
        policy=policy,
        style=style,
        script=script,
        data=script_data({"nodes": nodes, "letters": letters, "words": words, "states": STATES}),
        letters=letters,
        words=words,
        states=STATES,
        shown=_SHOWN,
        nodes=nodes,
        places={node.name: place for place, node in enumerate(report.nodes)},
        verdict=_verdict(len(report.nodes), by_state[OK]),
        figures=_FIGURES,
        counts=counts,
        changed=report.changes.numbers if report.changes is not None else {},
        by_state=by_state,
        shares=_shares(by_state, len(report.nodes)),
        changes=report.changes,
        exceptions=[_exception(found) for found in report.exceptions],
        columns=_COLUMNS,
        coloured=_COLOURED,
        dense=len(report.nodes) >= _DENSE_FROM,
        matrix_first=len(report.nodes) >= _MATRIX_FIRST_FROM,
        reach=_reach(report.nodes),
    )
