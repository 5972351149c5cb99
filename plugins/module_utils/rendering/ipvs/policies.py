# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Assign the selected endpoints of one ServicePort (``serviceports.selection``) to its virtual servers.

A virtual server has one list of real servers for all clients. With externalTrafficPolicy Local, connections from inside
the node reach all endpoints and those from outside only local ones, so one of the two must go to another virtual
server: that of the cluster IP, which has the right list. So the destination of connections from inside is rewritten to
the cluster IP, or, where the cluster IP itself is limited to local endpoints, that of connections from outside.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

from ...configuration.behaviour import Behaviour
from ...serviceports.info import Endpoint, ServicePortInfo

Endpoints = Tuple[Endpoint, ...]

NOBODY, INSIDE, OUTSIDE = "", "inside", "outside"


class Lists(NamedTuple):
    """The endpoints behind the cluster IP, and behind external addresses and node ports.

    ``redirected``: whose connections to external addresses are sent to the cluster IP: NOBODY, INSIDE or OUTSIDE.
    ``internal_dropped``, ``external_dropped``: connections that arrive there are dropped.
    """

    internal: Endpoints
    external: Endpoints
    redirected: str = NOBODY
    internal_dropped: bool = False
    external_dropped: bool = False


def endpoint_lists(info: ServicePortInfo, behaviour: Behaviour) -> Lists:
    """Return the endpoints of the ServicePort's virtual servers.

    kube-proxy 1.36 uses all endpoints where a policy Local finds none on this node.
    """
    closed = behaviour.local_means_local
    internal = info.local if info.internal_local and (info.local or closed) else info.cluster
    external = info.local if info.external_local and (info.local or closed) else info.cluster
    redirected = NOBODY
    if info.external_local and behaviour.inside_reaches_all:
        redirected = OUTSIDE if info.internal_local else INSIDE
        external = info.cluster if redirected == OUTSIDE else external
    without_local = closed and info.has_any and not info.local
    return Lists(
        internal,
        external,
        redirected,
        without_local and info.internal_local,
        without_local and info.external_local and redirected != OUTSIDE,
    )


def keeps_flows(info: ServicePortInfo, endpoint: Endpoint, behaviour: Behaviour) -> bool:
    """Return whether an endpoint that gets no new connections remains as a real server of weight 0.

    The kernel then keeps its connections. TCP connections of a removed real server are kept without this: see
    ``draining``. An endpoint of weight 0 keeps those of every protocol for as long as it has that weight.
    """
    if not endpoint.weight:
        return endpoint.ready or endpoint.serving
    return behaviour.terminating_keep_flows and info.key.protocol != "TCP" and endpoint.serving and endpoint.terminating
