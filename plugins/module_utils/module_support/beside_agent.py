# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The comparison of a node with a cluster state while an agent may follow the API server there.

A node differs from the state that was read for three reasons. Endpoints that fail the agent's health checks are
omitted on purpose, so they are omitted from the state as well. If the cluster has changed since, the agent serves
another state, and has compared the kernel with that one. Everything else is drift.
"""

from __future__ import annotations

import time
from typing import Callable, NamedTuple, Optional, Tuple

from ..base.errors import ProxyError
from ..cluster.state import ClusterState
from ..configuration.validate import in_mode
from ..convergence.agent_comparison import AgentComparison, ask_comparison
from ..convergence.report import change_counts
from ..convergence.request import Report, Request, TableChange
from ..convergence.runtime.agent_client import NoAgent
from ..convergence.runtime.state_directory import control_socket
from ..convergence.settings_digest import settings_digest
from ..rollback.converged import inspect

#: How often the agent is asked until it finds no difference: it may be about to sync, or to open a watch again.
ATTEMPTS = 6
PAUSE_SECONDS = 1.0


class Inspection(NamedTuple):
    """The result of :func:`inspect_beside_agent`.

    ``report``: its changes are drift. ``newer``: the differences from the state that was given, if they are changes of
    the cluster that the agent knows. ``excluded``: how many endpoints the agent does not serve because they fail their
    health checks. ``problem``: why the agent's own comparison does not count, if there are differences that it could
    have explained.
    """

    report: Report
    newer: Tuple[TableChange, ...] = ()
    excluded: int = 0
    problem: str = ""


def inspect_beside_agent(request: Request, sleep: Callable[[float], None] = time.sleep) -> Inspection:
    """Inspect the node, and distinguish drift from what a running agent does on purpose. Raises as ``inspect`` does.

    The cluster of the request gets the results of the agent's health checks.
    """
    path = control_socket(request.state_directory)
    agent, problem = _asked(path, kernel=False)
    if agent is not None:
        _adopt(request.cluster, agent)
    report = inspect(request)
    excluded = agent.excluded if agent is not None else 0
    of_cluster = tuple(change for change in report.changes if change.of_cluster)
    if agent is None or not of_cluster:
        return Inspection(report, excluded=excluded, problem=problem if of_cluster else "")
    given = _settings(request, report)
    for attempt in range(ATTEMPTS):
        if attempt:
            sleep(PAUSE_SECONDS)
        agent, problem = _asked(path, kernel=True, describe=request.describe)
        if agent is None:
            break
        problem = agent.obstacle
        if not problem and agent.settings != given:
            problem = "the agent has other settings than those that were given"
            break
        if not problem and not agent.changes:
            break
    if agent is None or problem:
        return Inspection(report, excluded=excluded, problem=problem)
    changes = (*(change for change in report.changes if not change.of_cluster), *(agent.changes or ()))
    counts = {**report.counts, **change_counts(changes)}
    return Inspection(
        report._replace(changes=changes, changed=bool(changes), counts=counts),
        newer=of_cluster,
        excluded=agent.excluded,
    )


def _asked(path: str, kernel: bool, describe: bool = False) -> Tuple[Optional[AgentComparison], str]:
    """Return the agent's answer, or None and why there is none; that is empty if no agent runs."""
    try:
        return ask_comparison(path, kernel, describe), ""
    except NoAgent:
        return None, ""
    except ProxyError as error:
        return None, str(error)


def _adopt(cluster: ClusterState, agent: AgentComparison) -> None:
    for service, failing in agent.failing.items():
        if service in cluster.services:
            cluster.set_failing(service, failing)
    for service, rising in agent.rising.items():
        if service in cluster.services:
            cluster.set_rising(service, rising)


def _settings(request: Request, report: Report) -> str:
    """Return the digest of the settings that the node was compared with."""
    configuration = in_mode(request.configuration, report.mode)
    return settings_digest(
        configuration, report.ipvs_filter_backend, report.node_name, report.families, request.cluster
    )
