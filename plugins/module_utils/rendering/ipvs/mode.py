# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render ipvs mode of one family: ServicePorts to addresses, virtual and real servers, and filter backend entries."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

from ...base.addresses import family_of
from ...base.ipvs_schedulers import scheduler_of
from ...serviceports.info import Endpoint, ServicePortInfo
from ...serviceports.weights import risen, shares
from ..iptables.tables import CHAINS
from ..merged import Entry
from ..rendering import Derivation, Rendering
from ..settings import Arrival, Client, DataplaneSettings, Masquerade, Shares, masquerade_external, masquerade_internal
from . import text
from .entries import INSIDE, OUTSIDE, IpvsFacts, endpoint_lists, ipvs_facts, is_node_address
from .filter_backend import FilterBackend
from .iptables_filter_backend import IPTABLES_FILTER_BACKEND
from .model import ADDRESSES, DEVICE, DEVICES, REAL_SERVERS, VIRTUAL_SERVERS, RealServerKey, VirtualServerKey
from .nftables_filter_backend import NFTABLES_FILTER_BACKEND
from .scheduling import hashed_by, requested_schedulers, schedule


def _is_redirected(info: ServicePortInfo, client: Client, settings: DataplaneSettings) -> bool:
    """Return whether external connections of a client are sent to the cluster IP."""
    redirected = endpoint_lists(info, settings.behaviour).redirected
    return bool(redirected) and (redirected == INSIDE) == client.is_inside


class IpvsRendering(Rendering[IpvsFacts]):
    """The tables of ipvs mode.

    devices: name to kind; addresses: address to True; virtual_servers: VirtualServerKey to VirtualServer; real_servers:
    RealServerKey to RealServer; and between them the tables of the filter backend. Addresses come last among the tables
    that packets traverse, see ``convergence.modes.ipvs``.
    """

    name = "ipvs"
    entries_have_addresses = True
    source_without_detector = "kept, except for connections of the node itself"

    def __init__(self, filter_backend: FilterBackend) -> None:
        self.filter_backend = filter_backend
        self.tables = (DEVICES, ADDRESSES, *filter_backend.tables, VIRTUAL_SERVERS, REAL_SERVERS)
        self.parts = filter_backend.parts

    def settings_in_use(self, settings: DataplaneSettings) -> DataplaneSettings:
        """See the base class. Node ports have a virtual server on each address, except link-local ones."""
        owned = {address for _interface, address in settings.node_addresses if is_node_address(address)}
        addresses = tuple(("", address) for address in sorted(owned))
        return super().settings_in_use(settings)._replace(node_addresses=addresses)

    def context(self, settings: DataplaneSettings) -> IpvsFacts:
        """See the base class."""
        return ipvs_facts(settings)

    def static_entries(self, context: IpvsFacts) -> list[Entry]:
        """Return the dummy device, and the entries of the filter backend that exist without any Service."""
        return [(DEVICES, DEVICE, "dummy"), *self.filter_backend.static_entries(context.settings)]

    def entries(self, service_port: ServicePortInfo, context: IpvsFacts) -> list[Entry]:
        """See the base class."""
        return self.filter_backend.contribution(service_port, context).add_all()

    def endpoints(
        self, service_port: ServicePortInfo, external: bool, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """See the base class; kube-proxy uses all endpoints if none is local, whatever the traffic policy is."""
        lists = endpoint_lists(service_port, settings.behaviour)
        return lists.external if external and lists.redirected != OUTSIDE else lists.internal

    def endpoints_for(
        self, service_port: ServicePortInfo, external: bool, client: Client, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """See the base class; only with corrected behaviour does the inside of the node reach all endpoints."""
        lists = endpoint_lists(service_port, settings.behaviour)
        if external and not _is_redirected(service_port, client, settings):
            return lists.external
        return lists.internal

    def shares_of(
        self, service_port: ServicePortInfo, endpoints: Sequence[Endpoint], settings: DataplaneSettings
    ) -> Shares:
        """See the base class; some schedulers count open connections."""
        server = schedule(service_port, settings.scheduler, settings.schedulers).server
        if not scheduler_of(server.scheduler).proportional:
            return ()
        shared = risen(endpoints) if hashed_by(server) else endpoints
        return shares(shared) if service_port.weighted else (1,) * len(endpoints)

    def selection_text(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """See the base class."""
        server = schedule(service_port, settings.scheduler, settings.schedulers).server
        by = hashed_by(server)
        return f"by scheduler {server.scheduler}" + (f", by the client's {by}" if by else "")

    def masquerade(
        self, service_port: ServicePortInfo, external: bool, client: Client, settings: DataplaneSettings
    ) -> Masquerade:
        """See the base class."""
        if external:
            return masquerade_external(service_port.external_local, client, settings.behaviour.inside_reaches_all)
        return masquerade_internal(settings.masquerade_all, settings.local_traffic is not None, client, True)

    def places(
        self, service_port: ServicePortInfo, place: Arrival, client: Client, settings: DataplaneSettings
    ) -> Sequence[Arrival]:
        """See the base class; the other one is the cluster IP, see ``policies``."""
        cluster_ip = Arrival(place.protocol, service_port.cluster_ip, service_port.port)
        if (place.address, place.port) == (cluster_ip.address, cluster_ip.port):
            return (place,)
        return (place, cluster_ip) if _is_redirected(service_port, client, settings) else (place,)

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> list[str]:
        """See the base class."""
        server = VirtualServerKey(place.protocol, place.address, place.port)
        found = self.filter_backend.rows(family, tables, place)
        found += [text.address_line(key) for key in tables.get(ADDRESSES, {}) if key == place.address]
        servers = tables.get(VIRTUAL_SERVERS, {})
        found += [text.virtual_server_line(server, servers[server])] if server in servers else []
        real_servers = tables.get(REAL_SERVERS, {})
        own = sorted(key for key in real_servers if key.server == server)
        return found + [text.real_server_line(key, real_servers[key]) for key in own]

    def common_keys(self, static: Sequence[Entry], tables: Mapping[str, Mapping[Any, Any]]) -> list[tuple[str, Any]]:
        """See the base class; chains are derived, and there are few."""
        derived = [(CHAINS, key) for key in tables.get(CHAINS, {})]
        return [*super().common_keys(static, tables), *derived]

    def ignored_annotation(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> Sequence[str]:
        """See the base class."""
        return schedule(service_port, settings.scheduler, settings.schedulers).ignored

    def hash_input(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """See the base class."""
        return hashed_by(schedule(service_port, settings.scheduler, settings.schedulers).server)

    def requested_schedulers(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> frozenset[str]:
        """See the base class."""
        return requested_schedulers(service_port, settings.scheduler)

    def drops_without_local(self, settings: DataplaneSettings) -> bool:
        """See the base class."""
        return settings.behaviour.local_means_local

    def derivation(self, context: IpvsFacts) -> Derivation:
        """See the base class."""
        return self.filter_backend.derivation(context.settings)

    def lines(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """Return an entry as ``ipvsadm -Sn`` or the tools of the filter backend write it, or as arguments of ``ip``."""
        if table in _LINES:
            return _LINES[table](family, key, value)
        return self.filter_backend.lines(family, table, key, value)

    def serves(self, entry: Entry, address: str, port: int) -> bool:
        """See the base class. Virtual and real servers affect their own address and port, other entries any."""
        key = entry[1]
        server = key.server if isinstance(key, RealServerKey) else key
        return not isinstance(server, VirtualServerKey) or (server.address, server.port) == (address, port)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """See the base class."""
        addresses = [address for address in tables[ADDRESSES] if family_of(address) == family]
        return {
            f"ip {family}": text.ip_batch_text(addresses),
            **self.filter_backend.texts(family, tables),
            f"ipvsadm {family}": text.ipvsadm_text(tables[VIRTUAL_SERVERS], tables[REAL_SERVERS]),
        }


_LINES: Mapping[str, Callable[[str, Any, Any], list[str]]] = {
    DEVICES: lambda _family, key, _value: [text.device_line(key)],
    ADDRESSES: lambda _family, key, _value: [text.address_line(key)],
    VIRTUAL_SERVERS: lambda _family, key, value: [text.virtual_server_line(key, value)],
    REAL_SERVERS: lambda _family, key, value: [text.real_server_line(key, value)],
}

RENDERING = IpvsRendering(IPTABLES_FILTER_BACKEND)
OVER_NFTABLES = IpvsRendering(NFTABLES_FILTER_BACKEND)
