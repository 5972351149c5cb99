# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversion of one node's answers, as collected by a playbook, to a record of known types.

Data from a node, and through it from the cluster, is not trusted: texts become one printable line of limited length,
numbers are numbers, and a value of an unexpected type counts as absent.
"""

from __future__ import annotations

import re
from typing import Any, Mapping, NamedTuple, Optional

from ...base.errors import one_line
from .kinds import FAILED, UNREACHABLE

TEXT_LIMIT = 1000
NAME_LIMIT = 253
# Names of differing entries that are read of each table of a node, and Services that it has probed.
_NAMES_READ = 20
# Names of pods and of policies that are read of each node.
_POLICY_NAMES_READ = 100
_SERVICES_READ = 100
# Texts of a result that a Node has by the same name.
_TEXTS = ("mode", "mode_reason", "variant", "summary", "kernel", "distribution", "schedule_failure", "booted_from")


class Agent(NamedTuple):
    """The report of a node's agent; ages are in seconds by the node's own clock, None if it never happened.

    ``running``: it answered. ``trouble``: why it did not, or its last error. ``version``: of the engine that runs.
    ``disconnected``: the kinds of objects whose watch is not open, with the reason. ``lost_seconds``: for how long.
    ``drained_until``: when the drain of the node ends, empty without one.
    """

    running: bool
    healthy: bool
    trouble: str
    mode: str
    version: str
    last_sync_age: Optional[float]
    syncs: int
    drift_repaired: int
    from_cache: bool
    disconnected: dict[str, str]
    lost_seconds: dict[str, float]
    drained_until: str = ""


class TableDrift(NamedTuple):
    """How many entries of one table are missing, different and unexpected, and the names of the first."""

    table: str
    added: int
    replaced: int
    removed: int
    entries: tuple[str, ...] = ()


class RefusedObject(NamedTuple):
    """An invalid object that a node skips: ``Service ns/name``, and the field with the reason."""

    object: str
    reason: str


class ServiceReach(NamedTuple):
    """Whether a node reaches a Service (None: nothing was probed), and why not."""

    service: str
    reached: Optional[bool]
    reason: str


class Node(NamedTuple):
    """One node. ``failure`` (UNREACHABLE or FAILED) with ``message`` if it could not be inspected, else empty.

    ``drift``: None where there was nothing to compare with. ``engine``: version of the installed engine, empty without
    an agent. ``programmed``: entries per table in the kernel. ``traffic``: the Services that it has probed.
    ``other_proxies``: what is wrong with other service proxies. ``unselected_pods``: its pods that no NetworkPolicy
    selects; ``unused_policies``: those that select no pod. ``schedule_failure``: that its scheduled runs fail.
    ``booted_from``: the time of the state that its boot has restored, empty if it has converged since.
    """

    name: str
    node_name: str = ""
    failure: str = ""
    message: str = ""
    error_kind: str = ""
    mode: str = ""
    mode_reason: str = ""
    variant: str = ""
    families: tuple[str, ...] = ()
    services: Optional[int] = None
    service_ports: Optional[int] = None
    endpoints: Optional[int] = None
    drift: Optional[bool] = None
    changes: tuple[TableDrift, ...] = ()
    summary: str = ""
    programmed: dict[str, int] = {}
    refused_count: int = 0
    refused: tuple[RefusedObject, ...] = ()
    engine: str = ""
    kernel: str = ""
    distribution: str = ""
    warnings: tuple[str, ...] = ()
    other_proxies: tuple[str, ...] = ()
    agent: Optional[Agent] = None
    unselected_pods: tuple[str, ...] = ()
    unused_policies: tuple[str, ...] = ()
    traffic: tuple[ServiceReach, ...] = ()
    schedule_failure: str = ""
    booted_from: str = ""

    @property
    def drift_entries(self) -> int:
        """How many entries differ."""
        return sum(change.added + change.replaced + change.removed for change in self.changes)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key by which worker-2 precedes worker-10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(part[:18]), part) if part[0] in "0123456789" else (1, 0, part) for part in parts)


def text(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Return one printable line of at most ``limit`` characters; empty unless the value is text or a number."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    line = one_line(str(value))
    return line if len(line) <= limit else line[: limit - 1] + "\u2026"


def count(value: Any) -> Optional[int]:
    """Return a count, or None for anything that is not one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _seconds(value: Any) -> Optional[float]:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if good else None


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _names(value: Any) -> tuple[str, ...]:
    return tuple(filter(None, (text(name, 2 * NAME_LIMIT + 1) for name in _list(value)[:_POLICY_NAMES_READ])))


def _flag(value: Any) -> Optional[bool]:
    return value if isinstance(value, bool) else None


def _refused(value: Any) -> RefusedObject:
    item = _mapping(value)
    name = text(item.get("name"), NAME_LIMIT) or "(without a name)"
    namespace = text(item.get("namespace"), NAME_LIMIT)
    kind = text(item.get("kind"), NAME_LIMIT) or "object"
    parts = [text(item.get("field")), text(item.get("reason"))]
    where = f"{namespace}/{name}" if namespace else name
    return RefusedObject(f"{kind} {where}", ": ".join(part for part in parts if part) or "no reason given")


def _traffic(value: Any) -> tuple[ServiceReach, ...]:
    items = [item for item in map(_mapping, _list(value)[:_SERVICES_READ]) if text(item.get("service"))]
    return tuple(
        ServiceReach(text(item["service"], NAME_LIMIT), _flag(item.get("reached")), text(item.get("reason")))
        for item in items
    )


def _agent(value: Any) -> Optional[Agent]:
    item = _mapping(value)
    if not item:
        return None
    watches, lost = _mapping(item.get("api_server")), _mapping(item.get("api_server_lost_seconds"))
    return Agent(
        running=item.get("running") is True,
        healthy=item.get("healthy") is True,
        trouble=text(item.get("error")),
        mode=text(item.get("mode")),
        version=text(item.get("version")),
        last_sync_age=_seconds(item.get("last_sync_age")),
        syncs=count(item.get("syncs")) or 0,
        drift_repaired=count(item.get("drift_repaired")) or 0,
        from_cache=item.get("started_from_cache") is True,
        disconnected={
            text(kind): text(state) for kind, state in sorted(watches.items(), key=str) if state != "watching"
        },
        lost_seconds={
            text(kind): seconds
            for kind, seconds in ((kind, _seconds(value)) for kind, value in sorted(lost.items(), key=str))
            if seconds and watches.get(kind) not in (None, "watching")
        },
        drained_until=text(item.get("drained_until")),
    )


def _message(result: Mapping[Any, Any]) -> str:
    """Return why a task did not succeed, without the prefix that ansible-core 2.19 adds to every such message."""
    return re.sub(r"^(?:Task failed: )+", "", text(result.get("msg")))


def _node(name: str, found: Mapping[Any, Any], failure: str, message: str) -> Node:
    counts, policy = _mapping(found.get("counts")), _mapping(found.get("network_policy"))
    changes = tuple(
        TableDrift(
            text(item.get("table")),
            count(item.get("added")) or 0,
            count(item.get("replaced")) or 0,
            count(item.get("removed")) or 0,
            tuple(text(name, NAME_LIMIT) for name in _list(item.get("entries"))[:_NAMES_READ]),
        )
        for item in map(_mapping, _list(found.get("changes")))
    )
    same: dict[str, Any] = {name: text(found.get(name)) for name in _TEXTS}
    same.update((name, count(counts.get(name))) for name in ("services", "service_ports", "endpoints"))
    return Node(
        name=name,
        node_name=text(found.get("node_name"), NAME_LIMIT),
        failure=failure,
        message=message,
        error_kind=text(found.get("error_kind")) if failure else "",
        families=tuple(text(family) for family in _list(found.get("families"))),
        drift=_flag(found.get("drift")),
        changes=changes,
        programmed={
            text(table): number
            for table, number in sorted(_mapping(found.get("programmed")).items(), key=str)
            if count(number) is not None
        },
        refused_count=count(found.get("refused_count")) or 0,
        refused=tuple(map(_refused, _list(found.get("refused")))),
        engine=text(found.get("agent_version")),
        other_proxies=tuple(text(item) for item in _list(found.get("other_proxies"))),
        warnings=tuple(dict.fromkeys(text(item) for item in _list(found.get("cautions")) if text(item))),
        agent=_agent(found.get("agent")),
        unselected_pods=_names(policy.get("unselected_pods")),
        unused_policies=_names(policy.get("unused_policies")),
        traffic=_traffic(found.get("traffic")),
        **same,
    )


def read_node(entry: Any) -> Node:
    """Return the record of one entry of the input: ``name`` and ``results``.

    ``results`` are those of the tasks that inspected the node, in their order: the first that is unreachable or failed
    says why there is nothing more, and the last that is not skipped is that of ``service_proxy_info``. An entry without
    any is a node that the play did not reach.
    """
    item = _mapping(entry)
    name = text(item.get("name"), NAME_LIMIT) or "(without a name)"
    results = [result for result in map(_mapping, _list(item.get("results"))) if result and not result.get("skipped")]
    for result in results:
        if result.get("unreachable"):
            return _node(name, {}, UNREACHABLE, _message(result) or "cannot be reached")
        if result.get("failed"):
            return _node(name, result, FAILED, _message(result) or "failed without a message")
    found = results[-1] if results else {}
    if "programmed" not in found:
        return _node(name, {}, FAILED, "was not inspected: the play ended before")
    return _node(name, found, "", "")


def read_nodes(entries: Any) -> tuple[Node, ...]:
    """Return the records of all entries in the natural order of their names."""
    return tuple(sorted(map(read_node, _list(entries)), key=lambda node: (natural_key(node.name), node.name)))
