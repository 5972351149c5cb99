# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The status of the node's agent, from its control socket, in the form in which modules return it."""

from __future__ import annotations

import os
import re
import time
from typing import Any, Mapping, Optional

from ..base.errors import ProxyError
from ..base.timestamps import timestamp
from ..convergence.runtime.agent_status import AgentStatus, DrainStatus, FamilyStatus, PolicyStatus, ask_status
from ..convergence.runtime.state_directory import control_socket

# The role agent installs this unit; the role schedule installs the same engine and command without it.
_UNIT = "/etc/systemd/system/kubenode-proxy.service"
# The last second that a time of four digits for the year can express.
_LATEST = 253402300800
# Kinds of objects that an agent follows but does not need in order to serve.
_NOT_NEEDED = ("servicecidrs",)
# A watch may be open again within seconds, after a restart of the API server.
_RECONNECTING_SECONDS = 30
_REFUSAL = re.compile(
    r"(?:\S+: )?(?P<kind>[A-Za-z]+) (?:(?P<namespace>[^/\s]+)/)?(?P<name>[^:\s]+): (?P<reason>.*)", re.S
)


def agent_state(state_directory: str) -> dict[str, Any]:
    """Return the agent's status; empty if no agent is installed and none listens."""
    if not any(map(os.path.exists, (_UNIT, control_socket(state_directory)))):
        return {}
    try:
        return state_of(ask_status(control_socket(state_directory)))
    except ProxyError as error:
        return {"running": False, "error": str(error)}


def state_of(answer: AgentStatus) -> dict[str, Any]:
    """Return the state in an agent's answer."""
    last = answer.get("lastSync") or 0
    return {
        "running": True,
        "healthy": answer.get("healthy", False),
        "ready": answer.get("ready", False),
        "error": answer.get("lastError")
        or answer.get("otherProxy")
        or answer.get("reloadError")
        or _policy_error(answer),
        "mode": answer.get("mode", ""),
        "version": answer.get("version", ""),
        "last_sync_age": round(max(time.time() - last, 0.0), 1) if last else None,
        "syncs": answer.get("syncs", 0),
        "drift_repaired": answer.get("driftRepaired", 0),
        "started_from_cache": answer.get("startedFromCache", False),
        "api_server": answer.get("apiServer", {}),
        "api_server_lost_seconds": answer.get("apiServerLostSeconds", {}),
        "obstacle": _obstacle(answer),
        "drained_until": _drained_until(answer.get("drain")),
    }


def watches_everything(state: Mapping[str, Any]) -> bool:
    """Return whether all watches that an agent needs are open. ``state``: of :func:`state_of`."""
    return all(watch == "watching" or kind in _NOT_NEEDED for kind, watch in state["api_server"].items())


def _obstacle(answer: AgentStatus) -> str:
    """Return why the agent does not follow the cluster; empty if it does, or has only just lost the API server."""
    mode, watches, lost = answer.get("mode"), answer.get("apiServer") or {}, answer.get("apiServerLostSeconds") or {}
    gone = [kind for kind in watches if kind not in _NOT_NEEDED and lost.get(kind, 0) > _RECONNECTING_SECONDS]
    if mode and not gone:
        return ""
    reasons = [watches[kind] for kind in gone or watches if watches[kind] not in ("watching", "connecting")]
    problem = "has lost the API server" if mode else "has not programmed anything yet"
    return ": ".join([f"the agent {problem}", *reasons[:1]])


def served_state(answer: AgentStatus) -> dict[str, Any]:
    """Return what an agent serves: its mode, numbers, the entries that it has programmed, and invalid objects."""
    families: dict[str, FamilyStatus] = answer.get("families") or {}
    refused: list[str] = answer.get("refused") or []
    numbers = list(families.values())
    policy: PolicyStatus = answer.get("networkPolicy") or {}
    return {
        "node_name": answer.get("node", ""),
        "mode": answer.get("mode", ""),
        "mode_reason": answer.get("modeReason", ""),
        "variant": next((item["iptables"] for item in numbers if item.get("iptables")), ""),
        "families": list(families),
        "counts": {
            "services": max((item.get("services", 0) for item in numbers), default=0),
            "service_ports": sum(item.get("ports", 0) for item in numbers),
            "endpoints": sum(item.get("endpoints", 0) for item in numbers),
        },
        "programmed": {
            f"{family} {table}": count
            for family, item in families.items()
            for table, count in (item.get("entries") or {}).items()
            if count
        },
        "refused": [_refusal(line) for line in refused],
        "refused_count": answer.get("refusedCount", len(refused)),
        "isolated_pods": max(0, policy.get("pods", 0) - len(policy.get("unselectedPods", ()))),
        "cautions": [str(line) for line in answer.get("ignored") or []],
    }


def _refusal(line: str) -> dict[str, str]:
    """Return the parts of a line about an object that the agent skips, or of one of its fields."""
    found = _REFUSAL.fullmatch(line)
    if found is None:
        return {"kind": "", "namespace": "", "name": "", "field": "", "reason": line}
    return {key: value or "" for key, value in {**found.groupdict(), "field": ""}.items()}


def _drained_until(drain: Optional[DrainStatus]) -> str:
    """Return when the drain in an agent's answer ends; empty without one, and for an agent that knows none."""
    if not isinstance(drain, dict) or not drain.get("drained"):
        return ""
    until = drain.get("until")
    return timestamp(until) if isinstance(until, (int, float)) and 0 <= until < _LATEST else "unknown"


def _policy_error(answer: AgentStatus) -> str:
    error = (answer.get("networkPolicy") or {}).get("error")
    return f"network policies: {error}" if error else ""
