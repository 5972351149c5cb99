# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The status of a running agent, as JSON values: the agent's answer to the question ``status``.

An agent of another version may lack fields, or may have others.
"""

from __future__ import annotations

from typing import Any, Optional, TypedDict, cast

from .agent_client import ask_agent

#: An API server: ``from``: where it is named. ``lastError``: empty if it works.
ServerStatus = TypedDict("ServerStatus", {"server": str, "from": str, "inUse": bool, "lastError": str})


class FamilyStatus(TypedDict):
    """The numbers of one family. ``entries``: by table. ``iptables``: the variant, empty without iptables."""

    services: int
    ports: int
    endpoints: int
    draining: int
    entries: dict[str, int]
    iptables: str


class CheckStatus(TypedDict):
    """The results of the checks of one endpoint. ``failures``: in a row."""

    service: str
    endpoint: str
    passing: bool
    checks: int
    failures: int
    lastError: str


class DrainStatus(TypedDict):
    """The drain of the node; times are in seconds since the epoch, 0 without a drain."""

    drained: bool
    since: float
    until: float
    remainingSeconds: float
    problem: str


class MemoryStatus(TypedDict):
    """The use of the agent's memory limit, in bytes. ``heldBack``: objects that keep their previous version."""

    limit: int
    used: int
    cluster: int
    capacity: Optional[int]
    heldBack: int
    refusedLists: list[str]


class PolicyStatus(TypedDict, total=False):
    """The state of network policies; empty if they are not enforced.

    ``inForce``: the table is that of the policies that are known. ``warnings``: policies and pods with a problem.
    ``unselectedPods``: pods of this node that no policy selects. ``unusedPolicies``: those that select no pod.
    """

    inForce: bool
    error: str
    policies: int
    pods: int
    elements: int
    refusedPolicies: int
    lastSync: float
    failures: int
    repaired: int
    warnings: list[str]
    unselectedPods: list[str]
    unusedPolicies: list[str]


class AgentStatus(TypedDict):
    """The agent's status. Times are Unix seconds; ``apiServer`` has the state of each watch by kind of object."""

    agent: str
    version: str
    engine: str
    node: str
    mode: str
    modeReason: str
    behaviour: str
    ipvsFilterBackend: str
    healthy: bool
    ready: bool
    otherProxy: str
    closedPorts: list[str]
    since: float
    uptimeSeconds: float
    apiServer: dict[str, str]
    apiServerLostSeconds: dict[str, float]
    apiServers: list[ServerStatus]
    startedFromCache: bool
    staticServices: dict[str, str]
    checks: list[CheckStatus]
    unchecked: list[str]
    clusterKnown: bool
    lastSync: float
    lastError: str
    reloadError: str
    syncs: int
    driftRepaired: int
    refused: list[str]
    refusedCount: int
    failed: list[str]
    failedCount: int
    ignored: list[str]
    conflicts: list[str]
    conflictCount: int
    families: dict[str, FamilyStatus]
    forwarding: dict[str, Any]
    drain: DrainStatus
    memory: MemoryStatus
    networkPolicy: PolicyStatus


def ask_status(path: str) -> AgentStatus:
    """Return the status of the agent that listens at ``path``, whose fields are not checked.

    Raises NoAgent if no agent is running, ProxyError.
    """
    return cast(AgentStatus, ask_agent(path, {"command": "status"}))
