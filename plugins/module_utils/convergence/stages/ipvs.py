# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Virtual and real servers of ipvs mode, its addresses and timeouts, and their removal.

Removals are planned and applied after the resources of the mode in effect: the new entries exist first, and
connections that began meanwhile are not interrupted.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Container, Dict, List, Mapping, NamedTuple, cast

from ...addresses import FAMILIES
from ...kernel.ipvs.connections import used_connections
from ...kernel.ipvs.servers import RealServersResource, TimeoutsResource, VirtualServersResource
from ...kernel.rtnetlink.links import AddressesResource
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.nftables_layout import SETTLING
from ...resources import Change, NotThereYet, ObservedOnce, Resource, Stage
from ..handles import KernelHandles
from .ipvs_glue import device_removal_stages, glue_resources
from .still_connected import StillConnected, node_ports


class OnlyOurServers(Resource[Any, Any]):
    """Virtual or real servers that belong to Services, identified without a record of them, for removal.

    IPVS does not mark ownership. A server is ours if its address is on the dummy device, or if its protocol and port
    are a node port in our sets, on any address, since the node may have lost the address meanwhile. All others are
    kept, except ``others``: virtual servers that are known to be ours.
    """

    def __init__(
        self,
        resource: Resource[Any, Any],
        addresses: Resource[str, bool],
        elements: Resource[Any, Any],
        others: Container[ipvs.VirtualServerKey] = (),
    ) -> None:
        self.kind, self.family = resource.kind, resource.family
        self._resource = resource
        self._addresses = addresses
        self._elements = elements
        self._others = others

    def observe(self) -> Dict[Any, Any]:
        """Return the servers that are ours. Raises KernelError."""
        addresses = self._addresses.observe()
        known_ports = node_ports(self._elements.observe())

        def is_ours(server: ipvs.VirtualServerKey) -> bool:
            if server.address in addresses or (server.protocol, server.port) in known_ports:
                return True
            return server in self._others

        return {key: value for key, value in self._resource.observe().items() if is_ours(ipvs.server_of(key))}

    def apply(self, change: Change[Any, Any]) -> None:
        """Apply the change. Raises KernelError."""
        self._resource.apply(change)

    def describe(self, key: Any, value: Any) -> List[str]:
        """Describe an entry as the wrapped resource does."""
        return self._resource.describe(key, value)


class IpvsResources(NamedTuple):
    """The resources of ipvs mode for one family, whatever its glue is.

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
    mode returns, some may still be there, because connections through them have not ended, but not all their servers.
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
    """Return resources without a socket, for descriptions only, for a check while IPVS is not loaded."""
    nowhere = cast(Any, None)
    return IpvsResources(
        servers=NotThereYet(VirtualServersResource(nowhere, family)),
        real_servers=NotThereYet(RealServersResource(nowhere, family)),
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
    return Stage(NotThereYet(TimeoutsResource(cast(Any, None), timeouts)), timeouts)


def loaded_ipvs_removal_stages(handles: KernelHandles, draining: bool) -> List[Stage]:
    """Return stages that remove everything of ipvs mode except chains, in both families, while IPVS is loaded.

    With ``draining``, servers with active connections are kept until these end. Raises KernelError.
    """
    found: List[StillConnected] = []
    stages: List[Stage] = []
    for family in FAMILIES:
        glue = glue_resources(handles, family)
        resources = observed_once(ipvs_resources(handles, family))
        record = glue.record(family)
        servers = OnlyOurServers(resources.servers, resources.addresses, record)
        real_servers = OnlyOurServers(resources.real_servers, resources.addresses, record)
        listed = functools.partial(used_connections, family)
        kept = StillConnected(real_servers, record, listed, resources.used, draining)
        found.append(kept)
        if glue.sets is not None:
            stages += [Stage(glue.sets.sets, kept.sets), Stage(glue.sets.elements, kept.elements)]
        if glue.table is not None:
            stages.append(Stage(glue.table, kept.table))
        stages += [
            Stage(servers, kept.servers),
            Stage(real_servers, kept.real_servers),
            Stage(resources.addresses, kept.addresses),
        ]

    def devices(observed: Mapping[str, str]) -> Mapping[str, str]:
        return observed if any(kept.any() for kept in found) else {}

    return device_removal_stages(handles, stages, devices)
