# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ipvs mode: virtual servers, addresses on the dummy device, and a packet filter beside IPVS, the filter backend.

The filter backend comes before the virtual servers whose connections it masquerades, and the addresses that make a
Service reachable come last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Container, Iterable, Mapping, Sequence

from ...base.addresses import address_and_port, networks_of, parse_network
from ...configuration.model import KubeProxyConfiguration
from ...event_reasons import Reason
from ...kernel.ipvs.connections import open_connections
from ...kernel.ipvs.servers import RealServersResource
from ...rendering.desired import Changes
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.draining import drain_change, draining_servers, ended, leaving, with_draining, with_excluded
from ...rendering.ipvs.own_servers import OwnServers
from ...resources import NO_CHANGE, Change, Stage
from ...serviceports.info import Endpoint, ServicePortInfo
from ..family import FamilyContext, FamilyTables
from ..handles import KernelHandles
from ..live import Flow, LiveConnection, Remembered
from .mode import Adjustments, Deprecation, Mode
from .stages.ipvs import IpvsResources, ipvs_resources, timeouts_stage, unloaded_ipvs_resources
from .stages.ipvs_filter_backend import device_stage, filter_backend_resources

if TYPE_CHECKING:
    from ...serviceports.frontends import Frontends
    from ..traffic.account import Sample


class IpvsMode(Mode):
    """See the base class. Each filter backend is a subclass with the resources of the packet filter beside IPVS."""

    measures_kinds = False
    counts_ports = False
    deprecation = Deprecation(
        Reason.IPVS_DEPRECATED, "The ipvs proxier is now deprecated and may be removed in a future release."
    )

    def is_loaded(self, handles: KernelHandles) -> bool:
        """Return whether every subsystem of the mode can be opened without loading a module."""
        raise NotImplementedError(self.filter_backend)

    def filter_backend_stages(self, family: FamilyTables, handles: KernelHandles, loaded: bool) -> list[Stage]:
        """Return the resources of the filter backend for a family, in order of dependence. Raises KernelError."""
        raise NotImplementedError(self.filter_backend)

    def stages(
        self, configuration: KubeProxyConfiguration, families: Sequence[FamilyTables], handles: KernelHandles
    ) -> list[Stage]:
        """Return the dummy device, the timeouts that are set, and the tables of each family."""
        settings = configuration.ipvs
        timeouts = {"tcp": settings.tcp_timeout, "tcp_fin": settings.tcp_fin_timeout, "udp": settings.udp_timeout}
        wanted = {name: int(seconds) for name, seconds in timeouts.items() if seconds >= 1}
        loaded = handles.loads or self.is_loaded(handles)
        stages = [device_stage(handles)]
        if wanted:
            stages.append(timeouts_stage(handles, wanted, loaded))
        find = ipvs_resources if loaded else unloaded_ipvs_resources
        for family in families:
            stages += self.filter_backend_stages(family, handles, loaded)
            stages += _server_stages(family, find(handles, family.context.family), handles)
        return stages

    def adjustments(self, context: FamilyContext, stages: Sequence[Stage], handles: KernelHandles) -> Adjustments:
        """See the base class."""
        resource = next(item.resource for item in stages if isinstance(item.resource, RealServersResource))
        return ServersInUse(resource, handles)

    def live_connections(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> list[LiveConnection]:
        """See the base class; IPVS has its own table."""
        client, arrival = flow.client, flow.arrival
        found = super().live_connections(flow, port, handles)
        server = ipvs.VirtualServerKey(arrival.protocol, arrival.address, arrival.port)
        for item in open_connections(flow.family, server):
            if item.client[0] == client.address and client.port in (0, item.client[1]) and not item.is_affinity:
                live = LiveConnection(
                    by="ipvs",
                    source=address_and_port(*item.client),
                    destination=address_and_port(arrival.address, arrival.port),
                    endpoint=address_and_port(item.real_server.ip, item.real_server.port),
                    seen_as="",
                    state=item.state,
                    seconds=item.seconds,
                )
                found.append(live)
        return found

    def remembered(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> list[Remembered]:
        """See the base class; IPVS keeps affinity for each virtual server, by client or by prefix of clients."""
        server = ipvs.VirtualServerKey(*flow.arrival[:3])
        bits = ipvs.host_prefix(flow.family)
        netmask = (port.policy.persistence_v6 if bits > 32 else port.policy.persistence_v4) or bits
        group = parse_network(f"{flow.client.address}/{netmask}")
        return [
            Remembered(str(group), address_and_port(item.real_server.ip, item.real_server.port), item.seconds)
            for item in (open_connections(flow.family, server) if port.affinity_seconds else ())
            if item.is_affinity and group is not None and parse_network(f"{item.client[0]}/{netmask}") == group
        ]

    def traffic(self, context: FamilyContext, frontends: Frontends, handles: KernelHandles) -> list[Sample]:
        """See the base class; IPVS counts everything by itself."""
        from ..traffic.samples import of_servers

        return of_servers(frontends, handles)


def _server_stages(family: FamilyTables, resources: IpvsResources, handles: KernelHandles) -> list[Stage]:
    context, tables = family
    excluded = networks_of(context.settings.exclude_cidrs)
    addresses = [address for _interface, address in context.settings.node_addresses]
    servers, real_servers = tables[ipvs.VIRTUAL_SERVERS], tables[ipvs.REAL_SERVERS]

    def own() -> Container[ipvs.VirtualServerKey]:
        # The record is still that of the last sync: all of a plan is observed before anything is applied.
        record = filter_backend_resources(handles, context.family).record(context.family) if excluded else None
        return OwnServers(record.observe() if record is not None else (), (), addresses)

    def all_servers(observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return with_excluded(servers, observed, servers, excluded, own())

    def all_real_servers(observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        kept = with_excluded(real_servers, observed, servers, excluded, own())
        return with_draining(kept, observed, resources.connections(), servers)

    return [
        Stage(resources.servers, all_servers),
        Stage(resources.real_servers, all_real_servers),
        Stage(resources.addresses, tables[ipvs.ADDRESSES]),
    ]


class ServersInUse(Adjustments):
    """Keeps draining real servers in partial syncs of one family."""

    def __init__(self, resource: RealServersResource, handles: KernelHandles) -> None:
        self._resource = resource
        self._handles = handles
        self._draining: dict[ipvs.RealServerKey, ipvs.RealServer] = {}

    @property
    def draining(self) -> int:
        """The number of real servers that are kept at weight 0 until their last connection has ended."""
        return len(self._draining)

    def adjust(self, changes: Changes) -> None:
        """See the base class."""
        servers = changes.get(ipvs.VIRTUAL_SERVERS, NO_CHANGE)
        real_servers = changes.get(ipvs.REAL_SERVERS, NO_CHANGE)
        if real_servers:
            connections = self._connections(leaving(real_servers, servers.removed))
            drain_change(real_servers, self._draining, connections, servers.removed)

    def observed(self, desired: Mapping[str, Mapping[Any, Any]]) -> None:
        """See the base class."""
        servers = draining_servers(
            desired[ipvs.REAL_SERVERS], self._resource.connections, desired[ipvs.VIRTUAL_SERVERS]
        )
        self._draining = dict.fromkeys(servers, ipvs.RealServer(0))

    def drain(self) -> int:
        """See the base class."""
        return self._remove(ended(self._draining, self._connections(self._draining)))

    def drop(self, port: ServicePortInfo, endpoint: Endpoint) -> int:
        """Remove the real servers of an endpoint that are kept at weight 0.

        With net.ipv4.vs.expire_nodest_conn their connections end at the next packet.
        """
        addresses = (port.cluster_ip, *port.external_ips, *port.load_balancer_ips)
        gone = {
            key: value
            for key, value in self._draining.items()
            if (key.ip, key.port, key.server.protocol) == (endpoint.ip, endpoint.port, port.protocol)
            and (
                (key.server.port == port.port and key.server.address in addresses) or key.server.port == port.node_port
            )
        }
        self._remove(gone)
        return 0

    def _remove(self, gone: Mapping[ipvs.RealServerKey, ipvs.RealServer]) -> int:
        """Remove draining real servers; return their number."""
        if gone:
            self._resource.apply(Change(removed=dict(gone)))
            for key in gone:
                del self._draining[key]
        return len(gone)

    def _connections(self, keys: Iterable[ipvs.RealServerKey]) -> Mapping[ipvs.RealServerKey, int]:
        """Return the connections of all real servers of the virtual servers that these keys belong to."""
        servers = {key.server for key in keys}
        return self._handles.ipvs.real_servers_of(servers).connections if servers else {}
