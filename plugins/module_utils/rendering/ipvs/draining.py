# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Adjust the desired servers of ipvs mode to the kernel: draining real servers, and servers in excluded ranges.

All functions are pure. Those that begin with ``with_`` compute the desired table of a full sync from the observed one,
for ``resources.Stage``; the others adjust the changes of a partial sync, which observes nothing.
"""

from __future__ import annotations

from typing import Any, Collection, Container, Iterable, Mapping, MutableMapping, TypeVar

from ...base.addresses import Network
from ...resources import Change
from .model import RealServer, RealServerKey, VirtualServerKey, server_of

AnyKey = TypeVar("AnyKey", VirtualServerKey, RealServerKey)


def may_drain(key: RealServerKey) -> bool:
    """Return whether a real server is drained: only TCP; others are covered by net.ipv4.vs.expire_nodest_conn."""
    return key.server.protocol == "tcp"


def draining_servers(
    desired: Collection[RealServerKey], connections: Mapping[RealServerKey, int], servers: Collection[VirtualServerKey]
) -> list[RealServerKey]:
    """Return the undesired real servers that have connections, of the virtual servers that are kept.

    ``connections`` maps a real server to its active and inactive connections. ``servers`` are the virtual servers that
    are desired: the real servers of one that is removed are removed at once.
    """
    return [
        key
        for key, count in connections.items()
        if count and key not in desired and may_drain(key) and key.server in servers
    ]


def with_draining(
    desired: Mapping[RealServerKey, RealServer],
    observed: Mapping[RealServerKey, RealServer],
    connections: Mapping[RealServerKey, int],
    servers: Collection[VirtualServerKey],
) -> Mapping[RealServerKey, RealServer]:
    """Return the desired real servers, plus those of :func:`draining_servers` at weight 0."""
    draining: dict[RealServerKey, RealServer] = {}
    for key in draining_servers(desired, connections, servers):
        server = observed.get(key)
        if server is not None:
            draining[key] = server._replace(weight=0)
    return {**desired, **draining} if draining else desired


def leaving(change: Change[Any, Any], removed_servers: Collection[VirtualServerKey]) -> list[RealServerKey]:
    """Return the real servers that a change removes and that drain if they have connections."""
    return [key for key in change.removed if may_drain(key) and key.server not in removed_servers]


def drain_change(
    change: Change[Any, Any],
    draining: MutableMapping[RealServerKey, RealServer],
    connections: Mapping[RealServerKey, int],
    removed_servers: Collection[VirtualServerKey],
) -> None:
    """Keep the real servers that a change removes at weight 0 while they have connections.

    ``draining`` are those kept already; it is updated. ``connections``: of the real servers of :func:`leaving`.
    ``removed_servers``: virtual servers that the same sync removes, with all their real servers.
    """
    for key in [key for key in draining if key.server in removed_servers]:
        del draining[key]
    for key in [key for key in change.added if key in draining]:
        change.replaced[key] = (draining.pop(key), change.added.pop(key))
    for key in leaving(change, removed_servers):
        if connections.get(key):
            before = change.removed.pop(key)
            draining[key] = before._replace(weight=0)
            change.replaced[key] = (before, draining[key])


def ended(
    draining: Mapping[RealServerKey, RealServer], connections: Mapping[RealServerKey, int]
) -> dict[RealServerKey, RealServer]:
    """Return the draining real servers whose connections have all ended."""
    return {key: value for key, value in draining.items() if not connections.get(key)}


def in_networks(address: str, networks: Iterable[Network]) -> bool:
    """Return whether the address is in one of the networks."""
    return any(network.contains(address) for network in networks)


def with_excluded(
    desired: Mapping[AnyKey, Any],
    observed: Mapping[AnyKey, Any],
    servers: Collection[VirtualServerKey],
    excluded: Collection[Network],
    own: Container[VirtualServerKey] = (),
) -> Mapping[AnyKey, Any]:
    """Return the desired virtual or real servers, plus other observed ones in the ``excluded`` networks, unchanged.

    ``servers`` are the desired virtual servers: their real servers are ours even in excluded networks. ``own``: virtual
    servers that are known to be ours are not kept either.
    """
    external = {
        key: value
        for key, value in (observed.items() if excluded else ())
        if key not in desired
        and server_of(key) not in servers
        and in_networks(server_of(key).address, excluded)
        and server_of(key) not in own
    }
    return {**desired, **external} if external else desired
