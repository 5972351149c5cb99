# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's answers to the node command: how it is, and why a destination is served the way it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Dict

from ...convergence.explain import ExplainedFamily, explain, explanation_document
from ...convergence.target import parse_target
from ...errors import ProxyError
from ...packaging.identity import identity

if TYPE_CHECKING:
    from ..daemon import Agent


def status_document(agent: Agent) -> Dict[str, Any]:
    """The state of a running agent as plain JSON values."""
    proxy = agent.proxy
    families = {}
    for family in proxy.families if proxy is not None else ():
        totals = family.summaries.totals
        families[family.family] = {
            "services": len(family.summaries),
            "ports": totals.ports,
            "endpoints": totals.endpoints,
            "draining": family.draining,
            "entries": {table: len(rows) for table, rows in family.tables.desired.items()},
            "iptables": str(family.variant) if family.variant is not None else "",
        }
    return {
        "agent": "running",
        "version": identity().text,
        "engine": identity().engine,
        "node": agent.node_name,
        "mode": proxy.configuration.mode if proxy is not None else "",
        "modeReason": proxy.mode_reason if proxy is not None else "",
        "healthy": agent.health.healthy,
        "since": round(agent.started, 3),
        "uptimeSeconds": round(time.time() - agent.started, 1),
        "apiServer": {
            reflector.resource.name: "watching" if reflector.connected else reflector.error or "connecting"
            for reflector in agent.reflectors
        },
        "apiServerLostSeconds": {
            reflector.resource.name: round(reflector.lost_for, 1) for reflector in agent.reflectors
        },
        "startedFromCache": agent.from_cache,
        "lastSync": round(agent.last_sync_end, 3),
        "lastError": agent.syncer.last_error,
        "syncs": agent.syncer.syncs,
        "driftRepaired": agent.syncer.drift_repaired,
        "refused": [str(refusal) for refusal in (*agent.view.state.refusals, *agent.view.state.skipped)],
        "conflicts": [str(conflict) for conflict in agent.view.state.conflicts],
        "families": families,
    }


def answer(agent: Agent, question: Dict[str, Any]) -> Dict[str, Any]:
    """The answer to one question; ``command`` is status or explain. An answer with ``error`` says what is wrong."""
    command = question.get("command")
    if command == "status":
        return status_document(agent)
    if command == "explain":
        if agent.proxy is None:
            return {"error": "the agent does not know the cluster yet"}
        try:
            target = parse_target(str(question.get("destination")))
        except ProxyError as error:
            return {"error": str(error)}
        mode = agent.proxy.configuration.mode
        families = [ExplainedFamily(proxier.context, proxier.tables) for proxier in agent.proxy.families]
        return explanation_document(explain(agent.view.state, families, mode, target))
    return {"error": f"unknown command {command!r}"}
