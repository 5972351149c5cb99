# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the desired tables owe to the observed ones: draining real servers, and virtual servers left to others.

All functions are pure and meant for ``resources.Stage``, which takes a function from the observed to the desired table.
"""

from __future__ import annotations

from typing import Collection, Dict, Iterable, Mapping

from ...addresses import Network
from .model import RealServer, RealServerKey, VirtualServer, VirtualServerKey


def with_draining(
    desired: Mapping[RealServerKey, RealServer],
    observed: Mapping[RealServerKey, RealServer],
    connections: Mapping[RealServerKey, int],
    servers: Collection[VirtualServerKey],
) -> Mapping[RealServerKey, RealServer]:
    """The desired real servers, and at weight 0 those that are no longer desired but still have connections.

    ``connections`` maps a real server to its active and inactive connections; ``servers`` are the virtual servers that
    stay (those of one that goes, go at once). Only TCP is drained: for other protocols there is
    net.ipv4.vs.expire_nodest_conn.
    """
    draining: Dict[RealServerKey, RealServer] = {}
    for key, count in connections.items():
        if count and key not in desired and key.server.protocol == "tcp" and key.server in servers:
            server = observed.get(key)
            if server is not None:
                draining[key] = server._replace(weight=0)
    return {**desired, **draining} if draining else desired


def in_networks(address: str, networks: Iterable[Network]) -> bool:
    """Whether the address lies in one of the networks."""
    return any(network.contains(address) for network in networks)


def with_excluded_servers(
    desired: Mapping[VirtualServerKey, VirtualServer],
    observed: Mapping[VirtualServerKey, VirtualServer],
    excluded: Collection[Network],
) -> Mapping[VirtualServerKey, VirtualServer]:
    """The desired virtual servers, and as they are the observed others that excludeCIDRs (``excluded``) cover."""
    if not excluded:
        return desired
    foreign = {
        key: value for key, value in observed.items() if key not in desired and in_networks(key.address, excluded)
    }
    return {**desired, **foreign} if foreign else desired


def with_excluded_real_servers(
    desired: Mapping[RealServerKey, RealServer],
    observed: Mapping[RealServerKey, RealServer],
    servers: Collection[VirtualServerKey],
    excluded: Collection[Network],
) -> Mapping[RealServerKey, RealServer]:
    """The desired real servers, and as they are those of virtual servers that ``with_excluded_servers`` leaves alone.

    ``servers`` are the desired virtual servers: the real servers of these are ours even where excludeCIDRs cover them.
    """
    if not excluded:
        return desired
    foreign = {
        key: value
        for key, value in observed.items()
        if key not in desired and key.server not in servers and in_networks(key.server.address, excluded)
    }
    return {**desired, **foreign} if foreign else desired
