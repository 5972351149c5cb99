# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Resources and stages of ipvs mode except its chains, and their removal.

Removals are planned and applied after the resources of the mode in effect: the new entries exist first, and
connections that began meanwhile are not interrupted.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, cast

from ...addresses import FAMILIES
from ...kernel.ipset.sets import SetElementsResource, SetsResource
from ...kernel.ipvs.connections import used_connections
from ...kernel.ipvs.servers import RealServersResource, TimeoutsResource, VirtualServersResource
from ...kernel.links import AddressesResource, DummyDeviceResource, MonitoringDeviceResource
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.sets import known_definitions
from ...resources import Change, Kind, NotThereYet, ObservedOnce, Resource, Stage
from ..handles import KernelHandles
from .still_connected import StillConnected, node_port_record, node_ports


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


class SetResources(NamedTuple):
    """The ipsets of one family and their elements."""

    sets: Resource[Any, Any]
    elements: Resource[Any, Any]


class Together(Resource[Any, Any]):
    """The entries of several resources with distinct keys, for observing them only."""

    kind = Kind.SET_ELEMENTS

    def __init__(self, family: str, resources: Sequence[Resource[Any, Any]]) -> None:
        self.family = family
        self._resources = resources

    def observe(self) -> Dict[Any, Any]:
        """Return all entries. Raises KernelError."""
        return {key: value for resource in self._resources for key, value in resource.observe().items()}


class GlueResources(NamedTuple):
    """What the glues of ipvs mode have of one family on this node: None for what the kernel has not loaded."""

    sets: Optional[SetResources]
    table: Optional[Resource[Any, Any]]

    def record(self, family: str) -> Resource[Any, Any]:
        """Return the entries by which virtual servers of node ports are identified."""
        elements = [self.sets.elements] if self.sets is not None else []
        return Together(family, [*elements, *([self.table] if self.table is not None else [])])


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


def set_resources(handles: KernelHandles, family: str) -> SetResources:
    """Return the ipsets of a family. Raises KernelError."""
    known = known_definitions(family)
    return SetResources(SetsResource(handles.ipset, known, family), SetElementsResource(handles.ipset, known, family))


def glue_resources(handles: KernelHandles, family: str) -> GlueResources:
    """Return what the kernel has loaded of the glues, each observed only once. Loads nothing. Raises KernelError."""
    sets, table = None, None
    if handles.has_ipset():
        found = set_resources(handles, family)
        sets = found._replace(elements=ObservedOnce(found.elements))
    if handles.has_nftables():
        table = ObservedOnce(handles.ipvs_table(family))
    return GlueResources(sets, table)


def observed_once(resources: IpvsResources) -> IpvsResources:
    """Return resources that are observed only once, for one plan in which several stages use them."""
    return resources._replace(
        servers=ObservedOnce(resources.servers),
        real_servers=ObservedOnce(resources.real_servers),
        addresses=ObservedOnce(resources.addresses),
    )


def unloaded_ipvs_resources(handles: KernelHandles, family: str) -> IpvsResources:
    """Return resources without a socket, which can only describe, for a check while IPVS is not loaded."""
    nowhere = cast(Any, None)
    return IpvsResources(
        servers=NotThereYet(VirtualServersResource(nowhere, family)),
        real_servers=NotThereYet(RealServersResource(nowhere, family)),
        addresses=AddressesResource(handles.route, family),
        connections=dict,
        used=dict,
    )


def unloaded_set_resources(family: str) -> SetResources:
    """Return ipsets without a socket, which can only describe, for a check while ipset is not loaded."""
    known, nowhere = known_definitions(family), cast(Any, None)
    return SetResources(
        NotThereYet(SetsResource(nowhere, known, family)), NotThereYet(SetElementsResource(nowhere, known, family))
    )


def device_stage(handles: KernelHandles) -> Stage:
    """Return the stage of the dummy device. Raises KernelError."""
    return Stage(DummyDeviceResource(handles.route), {ipvs.DEVICE: "dummy"})


def timeouts_stage(handles: KernelHandles, timeouts: Mapping[str, int], loaded: bool) -> Stage:
    """Return the stage of IPVS timeouts: seconds by name (tcp, tcp_fin, udp), only those to be set.

    With ``loaded`` False IPVS counts as empty and nothing is opened that would load it. Raises KernelError.
    """
    if loaded:
        return Stage(TimeoutsResource(handles.ipvs, timeouts), timeouts)
    return Stage(NotThereYet(TimeoutsResource(cast(Any, None), timeouts)), timeouts)


def unused_glue_stages(handles: KernelHandles, uses_sets: bool, uses_table: bool) -> List[Stage]:
    """Return stages that remove the glue that ipvs mode does not use, in both families. Raises KernelError."""
    stages: List[Stage] = []
    for family in FAMILIES:
        found = glue_resources(handles, family)
        if found.sets is not None and not uses_sets:
            stages += [Stage(found.sets.sets, {}), Stage(found.sets.elements, {})]
        if found.table is not None and not uses_table:
            stages.append(Stage(found.table, {}))
    return stages


def retiring_stages(handles: KernelHandles) -> List[Stage]:
    """Return stages after which the table beside IPVS does nothing to packets any more. Raises KernelError.

    It keeps what identifies virtual servers. Until then new connections to service addresses go through IPVS, so which
    connections are still open is known only afterwards.
    """
    return [Stage(handles.ipvs_table(family), node_port_record) for family in FAMILIES if handles.has_nftables()]


def ipvs_removal_stages(handles: KernelHandles, draining: bool = False) -> List[Stage]:
    """Return stages that remove what ipvs mode made except chains, in both families; none if IPVS was never loaded.

    With ``draining``, servers with active connections are kept until these end. Raises KernelError.
    """
    device = DummyDeviceResource(handles.route)
    # An agent that was killed leaves it behind.
    monitoring = Stage(MonitoringDeviceResource(handles.route), {})
    if not handles.has_ipvs():
        return [Stage(device, {}), *unused_glue_stages(handles, False, False), monitoring]
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

    return [Stage(device, devices), *stages, monitoring]
