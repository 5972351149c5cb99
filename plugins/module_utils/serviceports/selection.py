# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Select the endpoints of a ServicePort that receive traffic on this node.

``service_ports.port_policy`` derives the conditions from the traffic policies. IPVS mode, whose virtual servers have
one list of endpoints for all clients, arranges the selected ones further in ``rendering.ipvs.entries``.

Source: kube-proxy 1.36; KEPs 1669, 2086, 2433, 3015.
"""

from __future__ import annotations

from typing import Iterable, NamedTuple

from .info import Endpoint

Endpoints = tuple[Endpoint, ...]

NO_TOPOLOGY = ""
SAME_NODE = "same-node"
SAME_ZONE = "same-zone"


class Selection(NamedTuple):
    """The selected endpoints: see :class:`ServicePortInfo`."""

    cluster: Endpoints
    local: Endpoints
    reachable: Endpoints
    has_any: bool


_NOTHING = Selection((), (), (), False)


def topology_mode(endpoints: Iterable[Endpoint], node_name: str, zone: str) -> str:
    """Return how hints narrow the cluster-wide list: SAME_NODE, SAME_ZONE or NO_TOPOLOGY.

    Only ready endpoints that have a weight count; a kind of hint is used only if all of them have it.
    """
    all_node_hints = all_zone_hints = True
    any_ready = this_node = this_zone = False
    for endpoint in endpoints:
        if not endpoint.ready or not endpoint.weight:
            continue
        any_ready = True
        if not endpoint.node_hints:
            all_node_hints = False
        elif node_name in endpoint.node_hints:
            this_node = True
        if not endpoint.zone_hints:
            all_zone_hints = False
        elif zone in endpoint.zone_hints:
            this_zone = True
        if not all_node_hints and not all_zone_hints:
            return NO_TOPOLOGY
    if any_ready and all_node_hints and this_node and node_name:
        return SAME_NODE
    if any_ready and all_zone_hints and this_zone and zone:
        return SAME_ZONE
    return NO_TOPOLOGY


def select(
    endpoints: Endpoints, uses_cluster_endpoints: bool, uses_local_endpoints: bool, node_name: str, zone: str
) -> Selection:
    """Select from the endpoints of one ServicePort, which are sorted by ``ip:port``; the lists keep that order.

    ``zone`` is this node's zone, empty if it has none. Without ready endpoints, those that are terminating but still
    serving are used; the cluster-wide and the local list each decide this independently. An endpoint of weight 0 is not
    selected in any case.
    """
    if 0 in [endpoint.weight for endpoint in endpoints]:
        endpoints = tuple([endpoint for endpoint in endpoints if endpoint.weight])
    if not endpoints:
        return _NOTHING
    mode = NO_TOPOLOGY
    cluster: Endpoints = ()
    if uses_cluster_endpoints:
        mode = topology_mode(endpoints, node_name, zone)
        cluster = _ready_in_mode(endpoints, mode, node_name, zone)
        if not cluster:
            cluster = tuple([endpoint for endpoint in endpoints if endpoint.serving and endpoint.terminating])
    if not uses_local_endpoints:
        return Selection(cluster, (), cluster, bool(cluster))
    has_any = bool(cluster) or any(
        endpoint.ready or (endpoint.serving and endpoint.terminating) for endpoint in endpoints
    )
    local = tuple([endpoint for endpoint in endpoints if endpoint.is_local and endpoint.ready])
    local_is_terminating = False
    if not local:
        local = tuple(
            [endpoint for endpoint in endpoints if endpoint.is_local and endpoint.serving and endpoint.terminating]
        )
        local_is_terminating = bool(local)
    if not uses_cluster_endpoints:
        return Selection((), local, local, has_any)
    if mode == NO_TOPOLOGY and not local_is_terminating:
        return Selection(cluster, local, cluster, has_any)
    chosen = {(endpoint.ip, endpoint.port) for endpoint in cluster}
    chosen.update((endpoint.ip, endpoint.port) for endpoint in local)
    reachable = tuple([endpoint for endpoint in endpoints if (endpoint.ip, endpoint.port) in chosen])
    return Selection(cluster, local, reachable, has_any)


def _ready_in_mode(endpoints: Endpoints, mode: str, node_name: str, zone: str) -> Endpoints:
    if mode == SAME_NODE:
        return tuple([item for item in endpoints if item.ready and node_name in item.node_hints])
    if mode == SAME_ZONE:
        return tuple([item for item in endpoints if item.ready and zone in item.zone_hints])
    ready = tuple([item for item in endpoints if item.ready])
    return endpoints if len(ready) == len(endpoints) else ready
