# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The reasons why an endpoint of a ServicePort gets traffic or none."""

from __future__ import annotations

from ..cluster.account import EIGHTHS
from ..serviceports.info import Endpoint, ServicePortInfo
from ..serviceports.selection import NO_TOPOLOGY, SAME_NODE, topology_mode
from ..serviceports.table import NodeContext


def topology_of(port: ServicePortInfo, context: NodeContext) -> str:
    """Return how hints narrow the endpoints of a ServicePort on this node."""
    if not port.uses_cluster_endpoints:
        return NO_TOPOLOGY
    return topology_mode(port.endpoints, context.node_name, context.zone)


def reason_of(endpoint: Endpoint, local_only: bool, chosen: bool, topology: str) -> str:
    """Return why an endpoint is chosen, or why it is not; ``local_only``: the traffic policy is Local."""
    state = _state(endpoint)
    if not endpoint.weight:
        return f"{state}; in maintenance: its weight is 0, so it gets no new connections and keeps its open ones"
    if endpoint.weight != 1:
        state = f"{state}, weight {endpoint.weight}"
    if endpoint.rising != EIGHTHS:
        state = f"{state}, in slow start with {endpoint.rising}/{EIGHTHS} of its share"
    if endpoint.failed:
        return f"{state}; served because too few endpoints pass" if chosen else state
    if chosen:
        if not endpoint.ready:
            return f"{state}; used because no endpoint is ready"
        if local_only:
            return f"{state}, on this node"
        if topology != NO_TOPOLOGY:
            return f"{state}, hinted for this {'node' if topology == SAME_NODE else 'zone'}"
        return state
    if not endpoint.ready and not (endpoint.serving and endpoint.terminating):
        return state
    if local_only and not endpoint.is_local:
        return f"{state}, but not on this node and the traffic policy is Local"
    if not endpoint.ready:
        return f"{state}; used only if no endpoint is ready"
    if topology != NO_TOPOLOGY:
        hints = endpoint.node_hints if topology == SAME_NODE else endpoint.zone_hints
        return f"{state}, but hinted for {', '.join(hints)}"
    return state


def _state(endpoint: Endpoint) -> str:
    if endpoint.failed:
        return f"{'ready' if endpoint.ready else 'excluded'}: {endpoint.failed}"
    if endpoint.terminating:
        return "terminating, still serving" if endpoint.serving else "terminating"
    return "ready" if endpoint.ready else "not ready"
