# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Virtual and real servers of ipvs mode, its addresses and timeouts, and their removal.

Removals are planned and applied after the resources of the mode in effect: the new entries exist first, and
connections that began meanwhile are not interrupted.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Container, Mapping, NamedTuple

from ....base.addresses import FAMILIES
from ....kernel.ipvs.connections import used_connections
from ....kernel.ipvs.servers import RealServersResource, TimeoutsResource, VirtualServersResource
from ....kernel.rtnetlink.links import AddressesResource
from ....rendering.ipvs import model as ipvs
from ....rendering.ipvs.nftables_layout import SETTLING
from ....rendering.ipvs.own_servers import OwnServers
from ....resources import Change, ObservedOnce, Resource, Stage, UnloadedResource, WrappedResource
from ...handles import KernelHandles
from .ipvs_filter_backend import FilterBackendResources, device_removal_stages, filter_backend_resources
from .still_connected import StillConnected

Table = Mapping[Any, Any]


class OnlyOurServers(WrappedResource[Any, Any]):
    """Virtual or real servers that belong to Services, for removal: :class:`.OwnServers` decides which.

    All others are kept, except ``others``: virtual servers that are known to be ours.
    """

    def __init__(
        self,
        resource: Resource[Any, Any],
        addresses: Resource[str, bool],
        elements: Resource[Any, Any],
        others: Container[ipvs.VirtualServerKey] = (),
    ) -> None:
        super().__init__(resource)
        self._addresses = addresses
        self._elements = elements
        self._others = others

    def observe(self) -> dict[Any, Any]:
        """Return the servers that are ours. Raises KernelError."""
        own = OwnServers(self._elements.observe(), self._addresses.observe())
        observed = self._resource.observe()
        chosen = {server for server in map(ipvs.server_of, observed) if server in own or server in self._others}
        return {key: value for key, value in observed.items() if ipvs.server_of(key) in chosen}


class IpvsResources(NamedTuple):
    """The resources of ipvs mode for one family, whatever its filter backend is.

    ``connections`` and ``used`` are results of the last observation of real servers.
    """

    servers: Resource[Any, Any]
    real_servers: Resource[Any, Any]
    addresses: Resource[Any, Any]
    connections: Callable[[], Mapping[ipvs.RealServerKey, int]]
    used: Callable[[], Mapping[ipvs.RealServerKey, int]]


def ipvs_resources(handles: KernelHandles, family: str) -> IpvsResources:
    """Return the resources of ipvs mode for a family. Raises KernelError."""
    real_servers = RealServersResource(handles.ipvs, family)
    return IpvsResources(
        servers=VirtualServersResource(handles.ipvs, family),
        real_servers=real_servers,
        addresses=AddressesResource(handles.route, family),
        connections=lambda: real_servers.connections,
        used=lambda: real_servers.used,
    )


def after_servers(addresses: Resource[str, bool]) -> Callable[[Change[Any, Any]], bool]:
    """Return for ``Stage.postponed`` whether a change of the table beside IPVS must come after virtual servers.

    With the table, connections to ``addresses`` on the dummy device reach IPVS, whichever mode served before. When ipvs
    mode returns, some addresses may still be on the device for open connections while their servers no longer exist.
    """

    def postponed(change: Change[Any, Any]) -> bool:
        return SETTLING in change.added and bool(addresses.observe())

    return postponed


def observed_once(resources: IpvsResources) -> IpvsResources:
    """Return resources that are observed only once, for one plan in which several stages use them."""
    return resources._replace(
        servers=ObservedOnce(resources.servers),
        real_servers=ObservedOnce(resources.real_servers),
        addresses=ObservedOnce(resources.addresses),
    )


def unloaded_ipvs_resources(handles: KernelHandles, family: str) -> IpvsResources:
    """Return stand-ins that only describe entries, for a check while IPVS is not loaded."""
    return IpvsResources(
        servers=UnloadedResource(VirtualServersResource.kind, family, VirtualServersResource.describe),
        real_servers=UnloadedResource(RealServersResource.kind, family, RealServersResource.describe),
        addresses=AddressesResource(handles.route, family),
        connections=dict,
        used=dict,
    )


def timeouts_stage(handles: KernelHandles, timeouts: Mapping[str, int], loaded: bool) -> Stage:
    """Return the stage of IPVS timeouts: seconds by name (tcp, tcp_fin, udp), only those to be set.

    With ``loaded`` False IPVS counts as empty and nothing is opened that would load it. Raises KernelError.
    """
    if loaded:
        return Stage(TimeoutsResource(handles.ipvs, timeouts), timeouts)
    return Stage(UnloadedResource(TimeoutsResource.kind, "", TimeoutsResource.describe), timeouts)


class ServerTables(NamedTuple):
    """Tables of one family that are desired, whether or not they have connections.

    ``real_servers`` returns the desired real servers for those that are observed.
    """

    sets: Table
    elements: Table
    servers: Table
    real_servers: Callable[[Table], Table]
    addresses: Table


_NO_TABLES = ServerTables({}, {}, {}, lambda _observed: {}, {})


class KeptStages(NamedTuple):
    """The stages of ipvs mode in one family that keep what has connections.

    ``sets``: ipsets and their elements. ``table``: the table beside IPVS. Both are empty where the kernel has none.
    ``servers``: virtual and real servers and addresses.
    """

    kept: StillConnected
    sets: list[Stage]
    table: list[Stage]
    servers: list[Stage]


def kept_stages(
    resources: IpvsResources,
    filter_backend: FilterBackendResources,
    family: str,
    *,
    draining: bool,
    desired: ServerTables = _NO_TABLES,
    others: Container[ipvs.VirtualServerKey] = (),
) -> KeptStages:
    """Return the stages that remove from a family everything of ipvs mode that is not desired.

    With ``draining``, what has active connections is kept until these end. ``others``: see :class:`OnlyOurServers`;
    their connections keep neither set elements nor addresses.
    """
    record = filter_backend.record(family)
    ours = OnlyOurServers(resources.real_servers, resources.addresses, record)
    kept = StillConnected(ours, record, functools.partial(used_connections, family), resources.used, draining)

    def limited(resource: Resource[Any, Any]) -> Resource[Any, Any]:
        return OnlyOurServers(resource, resources.addresses, record, others)

    def with_kept(table: Table, kept_of: Callable[[Table], Table]) -> Callable[[Table], Table]:
        return lambda observed: {**kept_of(observed), **table}

    def real_servers(observed: Table) -> Table:
        return {**kept.real_servers(observed), **desired.real_servers(observed)}

    sets = []
    if filter_backend.sets is not None:
        sets = [
            Stage(filter_backend.sets.sets, with_kept(desired.sets, kept.sets)),
            Stage(filter_backend.sets.elements, with_kept(desired.elements, kept.elements)),
        ]
    table = [Stage(filter_backend.table, kept.table)] if filter_backend.table is not None else []
    servers = [
        Stage(limited(resources.servers), with_kept(desired.servers, kept.servers)),
        Stage(limited(resources.real_servers), real_servers),
        Stage(resources.addresses, with_kept(desired.addresses, kept.addresses)),
    ]
    return KeptStages(kept, sets, table, servers)


def _leftovers(handles: KernelHandles, draining: bool) -> list[KeptStages]:
    return [
        kept_stages(
            observed_once(ipvs_resources(handles, family)),
            filter_backend_resources(handles, family),
            family,
            draining=draining,
        )
        for family in FAMILIES
    ]


def loaded_server_removal_stages(handles: KernelHandles) -> list[Stage]:
    """Return stages that remove virtual servers and their addresses while IPVS is loaded. Raises KernelError."""
    return [stage for item in _leftovers(handles, False) for stage in item.servers]


def loaded_ipvs_removal_stages(handles: KernelHandles, draining: bool) -> list[Stage]:
    """Return stages that remove everything of ipvs mode except chains, in both families, while IPVS is loaded.

    With ``draining``, servers with active connections are kept until these end. Raises KernelError.
    """
    families = _leftovers(handles, draining)
    stages = [stage for item in families for stage in (*item.sets, *item.table, *item.servers)]

    def devices(observed: Mapping[str, str]) -> Mapping[str, str]:
        return observed if any(item.kept.has_connections() for item in families) else {}

    return device_removal_stages(handles, stages, devices)
