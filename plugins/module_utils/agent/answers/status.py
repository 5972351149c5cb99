# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's answers to the node command: its status, explanations, and how the kernel differs from its tables."""

from __future__ import annotations

import time
from typing import Any, Callable, Mapping, Sequence

from ...base.addresses import canonical_address
from ...base.errors import ProxyError
from ...base.timestamps import timestamp, wall_time
from ...cluster.model import Failing, NamespacedName
from ...cluster.state import ClusterState
from ...convergence.agent_comparison import QUESTION as COMPARISON
from ...convergence.agent_comparison import AgentComparison, comparison_document
from ...convergence.drain.external import serving_document
from ...convergence.prepare import missing_node
from ...convergence.report import table_changes
from ...convergence.request import TableChange
from ...convergence.runtime.agent_client import ENDPOINTS
from ...convergence.runtime.agent_status import AgentStatus, FamilyStatus
from ...convergence.runtime.listeners import QUESTION as LISTENERS
from ...convergence.runtime.listeners import listeners_document
from ...convergence.settings_digest import settings_digest
from ...explain.connection import Subject, connection_document
from ...explain.explain import ExplainedFamily, explain, explained_families, explanation_document
from ...explain.flows import Kernel
from ...explain.target import parse_end, parse_target
from ...packaging.identity import identity
from ...resources import Stage, plan
from ..components import Components
from ..services.notices import failures_of
from ..services.proxier import Proxier
from ..services.setup import Proxiers

#: How many lines of a kind about objects the status has: two Services may have tens of thousands of conflicts.
_MOST_NAMED = 100


def status_document(components: Components) -> AgentStatus:
    """Return the state of a running agent."""
    proxiers, view = components.sync.proxiers, components.views.current
    families: dict[str, FamilyStatus] = {}
    for proxier in proxiers.families if proxiers is not None else ():
        totals = proxier.summaries.totals
        families[proxier.family] = {
            "services": len(proxier.summaries),
            "ports": totals.ports,
            "endpoints": totals.endpoints,
            "draining": proxier.draining,
            "entries": {table: len(rows) for table, rows in proxier.tables.desired.items()},
            "iptables": str(proxier.variant) if proxier.variant is not None else "",
        }
    reflectors, synced = components.source.reflectors, components.sync.last_sync_end
    refused = (*view.state.refusals, *view.state.skipped)
    failed = sorted(failures_of(view, proxiers.families if proxiers is not None else ()))
    return {
        "agent": "running",
        "version": identity().text,
        "engine": identity().engine,
        "node": components.node_name,
        "mode": proxiers.configuration.mode if proxiers is not None else "",
        "modeReason": proxiers.mode_reason if proxiers is not None else "",
        "behaviour": components.sync.configuration.behaviour.name,
        "ipvsFilterBackend": proxiers.mode.filter_backend if proxiers is not None else "",
        "healthy": components.health.healthy,
        "ready": components.health.ready,
        "otherProxy": components.other_proxy.text,
        "closedPorts": components.surface.failed_ports,
        "since": round(wall_time(components.started), 3),
        "uptimeSeconds": round(time.monotonic() - components.started, 1),
        "apiServer": {
            reflector.resource.name: "watching" if reflector.connected else reflector.error or "connecting"
            for reflector in reflectors
        },
        "apiServerLostSeconds": {reflector.resource.name: round(reflector.lost_for, 1) for reflector in reflectors},
        "apiServers": components.api.servers.status(),
        "startedFromCache": components.source.from_cache,
        "staticServices": {str(key): item.static for key, item in sorted(view.state.static_services.items())},
        "checks": components.checks.status(),
        "unchecked": _named(components.checks.unchecked),
        "clusterKnown": view is components.source.view,
        "lastSync": round(wall_time(synced), 3) if synced else 0.0,
        "lastError": components.sync.syncer.last_error,
        "reloadError": components.reload_error,
        "syncs": components.sync.syncer.syncs,
        "driftRepaired": components.sync.syncer.repairs.count,
        "refused": [str(refusal) for refusal in refused[:_MOST_NAMED]],
        "refusedCount": len(refused),
        "failed": [f"{item.name}: {item.error}" for item in failed[:_MOST_NAMED]],
        "failedCount": len(failed),
        "ignored": _ignored(components),
        "conflicts": [str(conflict) for conflict in view.state.conflicts.first(_MOST_NAMED)],
        "conflictCount": len(view.state.conflicts),
        "families": families,
        "forwarding": components.forwarding.status(),
        "drain": components.drain.status(),
        "memory": components.memory.status(),
        "networkPolicy": {**components.policy.status(), **components.policy.coverage()},
    }


def _ignored(components: Components) -> list[str]:
    """Return that no Node is this host's, and what annotations request that the mode or the kernel cannot do."""
    proxiers = components.sync.proxiers
    if proxiers is None:
        return []
    # Before the cluster is known, no Node is.
    missing = [] if components.views.preliminary else missing_node(components.request(), proxiers.node_view)
    annotations = {line for family in proxiers.families for lines in family.ignored.values() for line in lines}
    return _named([*map(str, missing), *sorted(annotations)])


def _named(lines: list[str]) -> list[str]:
    others = len(lines) - _MOST_NAMED
    return [*lines[:_MOST_NAMED], f"and {others} more"] if others > 0 else lines


def status_text(components: Components) -> str:
    """Return the agent's state in one line, for the service manager."""
    drain = components.drain.status()
    prefix = f"drained until {timestamp(drain['until'])}; " if drain["drained"] else ""
    return "; ".join([prefix + _served_text(components), *components.surface.failed_ports])


def _served_text(components: Components) -> str:
    proxiers, syncer = components.sync.proxiers, components.sync.syncer
    if proxiers is None:
        return "waiting for the API server"
    if components.other_proxy.text:
        return components.other_proxy.text
    if syncer.last_error:
        return f"last sync failed: {syncer.last_error}"
    if components.reload_error:
        return f"reload failed, the previous configuration is in effect: {components.reload_error}"
    if components.memory.exceeded:
        return "memory limit exceeded: programmed rules are kept, updates are suspended"
    if components.policy.error:
        return f"network policies: {components.policy.error}"
    if not proxiers.mode.serves:
        return f"network policies only: {components.policy.policy_count} policies"
    services = max((len(family.summaries) for family in proxiers.families), default=0)
    endpoints = sum(family.summaries.totals.endpoints for family in proxiers.families)
    origin = "state of the API server"
    if components.views.current is not components.source.view:
        origin = "essential Services only; waiting for the API server"
    elif components.source.from_cache and not components.source.listed:
        origin = "state kept on disk, API server unreachable"
    return f"mode {proxiers.configuration.mode}: {services} Services, {endpoints} endpoints ({origin})"


def answer(components: Components, question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one question of the node command; ``error`` in the answer is a message for the user.

    Raises ProxyError, whose text is such a message as well.

    ``question``: ``command`` is status, explain, listeners, comparison, endpoints, traffic or drain. explain has a
    ``destination`` and possibly the address of a ``client``, or the ends ``from`` and ``to`` of a connection;
    ``kernel`` False: do not read the kernel. comparison reads it only with ``kernel`` True, and may want to
    ``describe`` each change. drain may ask to ``read`` the drain file, and for what is needed to count external
    ``connections``; traffic may have a ``namespace``, want ``endpoints``, and give the time of the reading that is
    ``known`` already.
    """
    command = question.get("command")
    find = _ANSWERS.get(str(command))
    return find(components, question) if find is not None else {"error": f"unknown command {command!r}"}


def _comparison(components: Components, question: dict[str, Any]) -> dict[str, Any]:
    return comparison_document(compare(components, bool(question.get("kernel")), bool(question.get("describe"))))


def _addresses(components: Components) -> set[str]:
    """Return the addresses of all endpoints that do not terminate. Raises ProxyError before the cluster is known."""
    view = components.views.current
    if view is not components.source.view:
        raise ProxyError("the agent does not know the cluster yet")
    slices = (piece for pieces in view.state.slices.values() for piece in pieces.values())
    return {each.address for piece in slices for each in piece.endpoints if not each.terminating}


def _traffic(components: Components, question: dict[str, Any]) -> dict[str, Any]:
    document = components.traffic.document(
        str(question.get("namespace", "")), bool(question.get("endpoints")), question.get("known")
    )
    return {"node": components.node_name, **document}


def _drain(components: Components, question: dict[str, Any]) -> dict[str, Any]:
    if question.get("read"):
        components.drain.read()
    proxiers = components.sync.proxiers
    document: dict[str, Any] = {
        **components.drain.status(),
        "node": components.node_name,
        "serves": proxiers is None or proxiers.mode.serves,
    }
    if question.get("connections") and proxiers is not None and components.views.current is components.source.view:
        node = proxiers.node_view.node
        document["serving"] = serving_document(
            components.views.current.state.services.values(),
            [family.settings for family in proxiers.families],
            node.pod_cidrs if node is not None else (),
            proxiers.mode.tracks_connections,
        )
        document["forwarded"] = [list(client) for client in components.forwarding.clients()]
    return document


def _explanation(components: Components, question: dict[str, Any]) -> dict[str, Any]:
    proxiers = components.sync.proxiers
    if proxiers is None:
        return {"error": "the agent does not know the cluster yet"}
    mode, cluster = proxiers.configuration.mode, components.views.current.state
    families = [ExplainedFamily(item.context, item.tables, item.slot_limit) for item in proxiers.families]
    if not proxiers.mode.serves:
        families = explained_families(cluster, proxiers.configuration, proxiers.node_view, proxiers.mode)
    of_family = {item.family: item.stages for item in proxiers.families}
    reads = proxiers.mode.serves and bool(question.get("kernel", True))

    def stages(family: ExplainedFamily) -> Sequence[Stage]:
        return of_family[family.context.family]

    if "from" not in question:
        target = parse_target(str(question.get("destination")))
        client = canonical_address(str(question.get("client", ""))) or ""
        read = stages if reads else None
        return explanation_document(explain(cluster, families, mode, target, client=client, stages=read))
    source = parse_end(str(question["from"]), destination=False)
    destination = parse_end(str(question.get("to")), destination=True)
    policies = components.policy.explainer if components.policy.enabled or not proxiers.mode.serves else None
    subject = Subject(
        state=cluster,
        families=families,
        mode=proxiers.mode,
        node=components.node_name,
        kernel=Kernel(components.handles, stages) if question.get("kernel", True) else None,
        policies=policies,
    )
    return connection_document(subject, source, destination)


def compare(components: Components, kernel: bool, describe: bool) -> AgentComparison:
    """Return the endpoints that the agent excludes; with ``kernel``, also the drift of the kernel from its tables.

    The kernel is not read while the tables are not those of the cluster. Changes nothing. Raises KernelError.
    """
    proxiers, cluster = components.sync.proxiers, components.views.current.state
    if proxiers is None:
        return AgentComparison("the agent does not know the cluster yet", "")
    families = proxiers.families
    failing = {key: found for key in cluster.services if (found := cluster.failing(key)) is not None}
    digest = settings_digest(
        proxiers.configuration,
        proxiers.mode.filter_backend,
        components.node_name,
        [item.family for item in families],
        cluster,
    )
    obstacle = _obstacle(components, proxiers)
    return AgentComparison(
        obstacle=obstacle,
        settings=digest,
        failing=failing,
        rising={key: rising for key in cluster.services if (rising := cluster.rising(key))},
        excluded=_excluded(cluster, failing, families),
        changes=_changes(components, families, describe) if kernel and not obstacle else None,
    )


def _excluded(cluster: ClusterState, failing: Mapping[NamespacedName, Failing], families: Sequence[Proxier]) -> int:
    """Return how many endpoints of these Services are not served; where too few pass, all are."""
    return len(
        {
            (service, endpoint.text)
            for service in failing
            for family in families
            for info in family.service_ports(cluster, service) or ()
            for endpoint in info.endpoints
            if endpoint.failed and not endpoint.ready
        }
    )


def _obstacle(components: Components, proxiers: Proxiers) -> str:
    """Return why the agent does not serve what the API server has; empty if it does."""
    source, syncer = components.source, components.sync.syncer
    if components.views.current is not source.view:
        return "the agent does not know the cluster yet"
    lost = [item for item in source.reflectors if not item.connected]
    if lost or not source.reflectors:
        reason = next((f": {item.error}" for item in lost if item.error), "")
        return f"the agent does not follow the API server{reason}"
    if syncer.last_error:
        return f"the agent's last sync failed: {syncer.last_error}"
    if syncer.losses.held_until:
        return "the agent holds back the loss of most endpoints"
    if components.memory.exceeded or source.view.held_back:
        return "the agent's memory limit keeps it from following the cluster"
    if failures_of(source.view, proxiers.families):
        return "the agent cannot process all objects"
    if components.policy.enabled and not components.policy.in_force:
        return "the agent's network policies are not in force"
    return ""


def _changes(components: Components, families: Sequence[Proxier], describe: bool) -> tuple[TableChange, ...]:
    planned = [item for family in families for item in plan(family.stages)]
    return table_changes([*planned, *components.policy.compared()], describe)


_ANSWERS: Mapping[str, Callable[[Components, dict[str, Any]], dict[str, Any]]] = {
    "status": lambda components, _question: dict(status_document(components)),
    "explain": _explanation,
    LISTENERS: lambda components, _question: {"listeners": listeners_document(components.forwarding.table())},
    COMPARISON: _comparison,
    ENDPOINTS: lambda components, _question: {"addresses": sorted(_addresses(components))},
    "drain": _drain,
    "traffic": _traffic,
}
