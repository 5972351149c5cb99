# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the records of the nodes to the report: exceptions of the whole cluster first, then node by node.

The same nodes give the same report, byte for byte; the time of the report is an argument.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Optional, Sequence

from ...base.timestamps import timestamp
from .changes import Changes, changes
from .drift import differences, merged
from .kinds import (
    AGENT,
    DIFFERS,
    DRIFTED,
    FAILED,
    KINDS,
    OK,
    POLICIES,
    REFUSED,
    STALE,
    STATES,
    UNREACHABLE,
    UNREACHED,
    WARNED,
)
from .nodes import Node, natural_key

# Raised when a field is renamed, removed or changes its meaning; not when one is added.
SCHEMA = "kubenode.proxy/fleet-report/v1"
# What the document has in another form, or not at all.
_NOT_OF_DOCUMENT = frozenset(("name", "failure", "summary", "refused"))


class About(NamedTuple):
    """The subject of the report: ``generated`` in seconds since 1970, and the collection that created it.

    ``engine``: the collection's version with the hash of its engine, as nodes report theirs. ``stale_after``: the age
    in seconds above which a last sync counts as long ago.
    """

    generated: float
    title: str = "Service proxy fleet"
    collection_version: str = ""
    engine: str = ""
    stale_after: float = 7200.0


class Reason(NamedTuple):
    """One reason for one node: the kind of exception, its subject (may be empty) and its description."""

    kind: str
    subject: str
    words: str


class Item(NamedTuple):
    """One line of an exception: the same reason on all its nodes."""

    subject: str
    words: str
    nodes: tuple[str, ...]


class Exceptions(NamedTuple):
    """All items of one kind. ``nodes`` counts nodes, each once."""

    kind: str
    nodes: int
    items: tuple[Item, ...]


class Report(NamedTuple):
    """The whole content. ``states`` has the state of each node, in the order of ``nodes``.

    ``changes``: those since an earlier report, None without one.
    """

    about: About
    nodes: tuple[Node, ...]
    states: tuple[str, ...]
    reasons: tuple[tuple[Reason, ...], ...]
    exceptions: tuple[Exceptions, ...]
    changes: Optional[Changes] = None


def duration(seconds: float) -> str:
    """Return a length of time as text for people, in its one or two largest units."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def running_engine(node: Node) -> str:
    """Return the engine version of the node's running agent, otherwise the installed version."""
    return (node.agent.version if node.agent is not None else "") or node.engine


def tally(values: Iterable[str]) -> dict[str, int]:
    """Count how often each value occurs; the most frequent first, then in natural order, without empty values."""
    found = Counter(value for value in values if value)
    return dict(sorted(found.items(), key=lambda item: (-item[1], natural_key(item[0]))))


_COMPARED: tuple[tuple[str, str, Callable[[Node], str]], ...] = (
    ("mode", "mode", lambda node: node.mode),
    ("engine", "engine", running_engine),
)


def _agent_reasons(node: Node, about: About) -> list[Reason]:
    agent = node.agent
    if agent is None:
        return []
    if not agent.running:
        return [Reason(AGENT, "", f"does not answer: {agent.trouble}" if agent.trouble else "does not answer")]
    found = []
    if not agent.healthy:
        found.append(Reason(AGENT, "", f"is not healthy{': ' if agent.trouble else ''}{agent.trouble}"))
    for kind, state in agent.disconnected.items():
        found.append(Reason(AGENT, "", f"does not follow {kind}: {state}"))
    if agent.version and node.engine and agent.version != node.engine:
        found.append(Reason(AGENT, "", "runs another engine than is installed: restart kubenode-proxy.service"))
    if agent.mode and node.mode and agent.mode != node.mode:
        found.append(Reason(AGENT, "", f"runs in mode {agent.mode}, but the node was compared with mode {node.mode}"))
    if agent.drained_until:
        found.append(Reason(WARNED, "", "is drained: load balancers leave it"))
    if agent.last_sync_age is None:
        found.append(Reason(STALE, "", "has not synced yet"))
    elif agent.last_sync_age > about.stale_after:
        found.append(Reason(STALE, "", f"last synced {duration(agent.last_sync_age)} ago"))
    return found


def _drift_reasons(node: Node) -> list[Reason]:
    """Return how a node has drifted, the most harmful first; its own summary if it does not say which tables."""
    own = merged(item for change in node.changes for item in differences(change)).values()
    found = [Reason(DRIFTED, item.table, item.words) for item in own]
    return found or [Reason(DRIFTED, "", node.summary or "differs from the cluster's state")]


def _reasons(node: Node, about: About, majority: Mapping[str, str]) -> tuple[Reason, ...]:
    if node.failure:
        subject = node.error_kind if node.failure == FAILED else ""
        return (Reason(node.failure, subject, node.message), *_agent_reasons(node, about))
    found = _agent_reasons(node, about)
    if node.schedule_failure:
        found.append(Reason(STALE, "", node.schedule_failure))
    if node.booted_from:
        found.append(Reason(STALE, "", f"has not converged since it booted with its state of {node.booted_from}"))
    if node.drift:
        found += _drift_reasons(node)
    found += [Reason(DRIFTED, "", proxy) for proxy in node.other_proxies]
    found += [Reason(UNREACHED, item.service, item.reason) for item in node.traffic if item.reached is False]
    found += [Reason(REFUSED, item.object, item.reason) for item in node.refused]
    found += [Reason(WARNED, "", caution) for caution in node.warnings]
    found += [Reason(POLICIES, f"Pod {name}", "no NetworkPolicy selects it") for name in node.unselected_pods]
    found += [Reason(POLICIES, f"NetworkPolicy {name}", "selects no pod") for name in node.unused_policies]
    for field, word, value in _COMPARED:
        own, most = value(node), majority[field]
        if own and own != most:
            found.append(Reason(DIFFERS, word, f"{own}, most nodes have {most}"))
        elif own and field == "engine" and about.engine and own != about.engine:
            words = f"{own}, this collection has {about.engine}"
            found.append(Reason(DIFFERS, word, words))
    return tuple(found)


def _common_warnings(reasons: Sequence[Sequence[Reason]]) -> frozenset[Reason]:
    """Return the warnings that more than half of the inspected nodes share: they are about the cluster."""
    looked = sum(1 for own in reasons if not any(reason.kind in (UNREACHABLE, FAILED) for reason in own))
    shared = Counter(reason for own in reasons for reason in own if reason.kind == WARNED)
    return frozenset(reason for reason, number in shared.items() if 2 * number > looked)


def _state(reasons: Sequence[Reason], common: frozenset[Reason]) -> str:
    """Return a node's state; refused objects, warnings of most nodes and selections of policies do not affect it."""
    kinds = {reason.kind for reason in reasons if reason not in common}
    return next((state for state in STATES if state in kinds), OK)


def _drift_items(nodes: Sequence[Node]) -> list[Item]:
    """Return one item for each table and kind of difference, the most harmful first, with first names."""
    own = [(node.name, item) for node in nodes if node.drift for each in node.changes for item in differences(each)]
    who: dict[tuple[str, str], dict[str, None]] = {}
    for name, item in own:
        who.setdefault((item.table, item.kind), {})[name] = None
    found = merged(item for _name, item in own)
    return [Item(item.table, item.words, tuple(who[key])) for key, item in found.items()]


def _items(kind: str, nodes: Sequence[Node], reasons: Sequence[Sequence[Reason]]) -> list[Item]:
    """Return one item for each reason, the reasons of the most nodes first."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for node, own in zip(nodes, reasons):
        for reason in own:
            if reason.kind == kind and (kind != DRIFTED or not node.changes or reason.words in node.other_proxies):
                groups.setdefault((reason.subject, reason.words), {})[node.name] = None
    order = sorted(groups, key=lambda key: (-len(groups[key]), natural_key(key[0]), natural_key(key[1])))
    return [Item(subject, words, tuple(groups[subject, words])) for subject, words in order]


def _exceptions(nodes: Sequence[Node], reasons: Sequence[Sequence[Reason]]) -> tuple[Exceptions, ...]:
    found = []
    for kind in KINDS:
        items = [*(_drift_items(nodes) if kind == DRIFTED else ()), *_items(kind, nodes, reasons)]
        if items:
            found.append(Exceptions(kind, len({name for item in items for name in item.nodes}), tuple(items)))
    return tuple(found)


def make_report(nodes: Sequence[Node], about: About, previous: Optional[Mapping[str, Any]] = None) -> Report:
    """Return the report of these nodes. ``previous``: the document of an earlier report, to show what has changed."""
    majority = {field: next(iter(tally(map(value, nodes))), "") for field, _word, value in _COMPARED}
    reasons = tuple(_reasons(node, about, majority) for node in nodes)
    common = _common_warnings(reasons)
    report = Report(
        about=about,
        nodes=tuple(nodes),
        states=tuple(_state(own, common) for own in reasons),
        reasons=reasons,
        exceptions=_exceptions(nodes, reasons),
    )
    return report if previous is None else report._replace(changes=changes(previous, document(report)))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a named tuple as an object with its fields."""
    if isinstance(value, tuple):
        named = getattr(value, "_asdict", None)
        return {name: _plain(item) for name, item in named().items()} if named else [_plain(item) for item in value]
    return value


def _node_document(node: Node, state: str, reasons: Sequence[Reason]) -> dict[str, Any]:
    fields = {name: _plain(value) for name, value in node._asdict().items() if name not in _NOT_OF_DOCUMENT}
    return {
        "name": node.name,
        "state": state,
        "exceptions": [kind for kind in KINDS if any(reason.kind == kind for reason in reasons)],
        **fields,
        "drift_entries": node.drift_entries,
    }


def summary(report: Report) -> dict[str, Any]:
    """Return counts over the cluster."""
    nodes = report.nodes
    by_state = Counter(report.states)
    refused = next((found.items for found in report.exceptions if found.kind == REFUSED), ())
    return {
        "nodes": len(nodes),
        "states": {state: by_state[state] for state in STATES},
        "modes": tally(node.mode for node in nodes),
        "engines": tally(map(running_engine, nodes)),
        "kernels": tally(node.kernel for node in nodes),
        "distributions": tally(node.distribution for node in nodes),
        "services": max((node.services or 0 for node in nodes), default=0),
        "endpoints": max((node.endpoints or 0 for node in nodes), default=0),
        "drift_entries": sum(node.drift_entries for node in nodes),
        "refused_objects": len({item.subject for item in refused}),
    }


def document(report: Report) -> dict[str, Any]:
    """Return the report as plain JSON values, which docs/fleet.md describes."""
    about = report.about
    return {
        "schema": SCHEMA,
        "generated": timestamp(about.generated),
        "title": about.title,
        "collection": {"version": about.collection_version, "engine": about.engine},
        "stale_after_seconds": about.stale_after,
        "summary": summary(report),
        "previous": _plain(report.changes),
        "exceptions": [
            {
                "kind": found.kind,
                "severity": KINDS[found.kind].severity,
                "nodes": found.nodes,
                "items": _plain(found.items),
            }
            for found in report.exceptions
        ],
        "nodes": [
            _node_document(node, state, reasons)
            for node, state, reasons in zip(report.nodes, report.states, report.reasons)
        ],
    }


def document_text(report: Report) -> str:
    """Return the document as the text of a JSON file, readable and identical for identical reports."""
    return json.dumps(document(report), indent=1, ensure_ascii=False) + "\n"


def one_sentence(report: Report) -> str:
    """Return the report in one line for people."""
    total = len(report.nodes)
    by_state = Counter(report.states)
    parts = [f"{by_state[state]} {KINDS[state].nodes}" for state in STATES if by_state[state]]
    return f"{total} {'node' if total == 1 else 'nodes'}: {', '.join(parts) or 'none'}"
