# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's own comparison of the kernel with what it is meant to serve, for checks that run beside it."""

from __future__ import annotations

from typing import Dict, Mapping, Sequence, Tuple

from ...cluster.model import Failing, NamespacedName
from ...cluster.state import ClusterState
from ...convergence.agent_comparison import AgentComparison
from ...convergence.report import table_changes
from ...convergence.request import TableChange
from ...convergence.settings_digest import settings_digest
from ...resources import plan
from ..services.notices import failures_of
from ..services.proxier import Proxier
from ..services.setup import Proxiers
from .agent_state import AgentState


def compare(state: AgentState, kernel: bool, describe: bool) -> AgentComparison:
    """Return what the agent excludes, and with ``kernel`` how the kernel differs from its tables.

    The kernel is not read while the tables are not those of the cluster. Changes nothing. Raises KernelError.
    """
    proxiers, cluster = state.sync.proxiers, state.view.state
    if proxiers is None:
        return AgentComparison("the agent does not know the cluster yet", "")
    families = proxiers.families
    failing = _failing(cluster)
    digest = settings_digest(
        proxiers.configuration, proxiers.mode.filter_backend, state.node, [item.family for item in families], cluster
    )
    obstacle = _obstacle(state, proxiers)
    return AgentComparison(
        obstacle=obstacle,
        settings=digest,
        failing=failing,
        rising={key: rising for key in cluster.services if (rising := cluster.rising(key))},
        excluded=_excluded(cluster, failing, families),
        changes=_changes(state, families, describe) if kernel and not obstacle else None,
    )


def _failing(cluster: ClusterState) -> Dict[NamespacedName, Failing]:
    return {key: failing for key in cluster.services if (failing := cluster.failing(key)) is not None}


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


def _obstacle(state: AgentState, proxiers: Proxiers) -> str:
    """Return why the agent does not serve what the API server has; empty if it does."""
    source, syncer = state.source, state.sync.syncer
    if state.view is not source.view:
        return "the agent does not know the cluster yet"
    lost = [item for item in source.reflectors if not item.connected]
    if lost or not source.reflectors:
        reason = next((f": {item.error}" for item in lost if item.error), "")
        return f"the agent does not follow the API server{reason}"
    if syncer.last_error:
        return f"the agent's last sync failed: {syncer.last_error}"
    if syncer.losses.held_until:
        return "the agent holds back the loss of most endpoints"
    if state.memory.exceeded or source.view.held_back:
        return "the agent's memory limit keeps it from following the cluster"
    if failures_of(source.view, proxiers.families):
        return "the agent cannot process all objects"
    if state.policy.enabled and not state.policy.in_force:
        return "the agent's network policies are not in force"
    return ""


def _changes(state: AgentState, families: Sequence[Proxier], describe: bool) -> Tuple[TableChange, ...]:
    planned = [item for family in families for item in plan(family.stages)]
    return table_changes([*planned, *state.policy.compared()], describe)
