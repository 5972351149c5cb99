# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render ipvs mode: ServicePorts to addresses, virtual and real servers, and the entries of the glue, of one family."""

from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Sequence

from ...addresses import family_of
from ...serviceports.info import Endpoint, ServicePortInfo
from ..merged import Entry
from ..rendering import Derivation, Options, Rendering
from ..settings import DataplaneSettings
from .entries import NodeFacts, is_node_address, node_facts
from .glue import Glue
from .iptables_glue import IPTABLES_GLUE
from .model import ADDRESSES, DEVICE, DEVICES, REAL_SERVERS, VIRTUAL_SERVERS, RealServerKey, VirtualServerKey
from .nftables_glue import NFTABLES_GLUE
from .policies import OUTSIDE, endpoint_lists
from .scheduling import hashed_by, requested_schedulers, schedule
from .text import (
    address_line,
    device_line,
    ip_batch_text,
    ipvsadm_text,
    real_server_line,
    virtual_server_line,
)


class IpvsContext(NamedTuple):
    """Settings of the family, and the facts that ServicePorts need from them."""

    settings: DataplaneSettings
    facts: NodeFacts


class IpvsRendering(Rendering[IpvsContext]):
    """The tables of ipvs mode.

    devices: name to kind; addresses: address to True; virtual_servers: VirtualServerKey to VirtualServer; real_servers:
    RealServerKey to RealServer; and between them the tables of the glue. Addresses come last among the tables that
    packets traverse, see ``convergence.modes.ipvs``.
    """

    name = "ipvs"
    entries_have_addresses = True
    source_without_detector = "kept, except for connections of the node itself"

    def __init__(self, glue: Glue) -> None:
        self.glue = glue
        self.tables = (DEVICES, ADDRESSES, *glue.tables, VIRTUAL_SERVERS, REAL_SERVERS)
        self.parts = glue.parts

    def settings_in_use(self, settings: DataplaneSettings) -> DataplaneSettings:
        """See the base class. Node ports have a virtual server on each address, except link-local ones."""
        owned = {address for _interface, address in settings.node_addresses if is_node_address(address)}
        addresses = tuple(("", address) for address in sorted(owned))
        return super().settings_in_use(settings)._replace(node_addresses=addresses)

    def context(self, settings: DataplaneSettings, options: Options) -> IpvsContext:
        """See the base class."""
        return IpvsContext(settings, node_facts(settings))

    def static_entries(self, context: IpvsContext) -> List[Entry]:
        """Return the dummy device, and what the glue has without any Service."""
        return [(DEVICES, DEVICE, "dummy"), *self.glue.static_entries(context.settings)]

    def entries(self, service_port: ServicePortInfo, context: IpvsContext) -> List[Entry]:
        """See the base class."""
        return self.glue.contribution(service_port, context.facts).add_all()

    def endpoints(
        self, service_port: ServicePortInfo, external: bool, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """See the base class; kube-proxy takes all endpoints where none is local, whatever the traffic policy is."""
        lists = endpoint_lists(service_port, settings.behaviour)
        return lists.external if external and lists.redirected != OUTSIDE else lists.internal

    def ignored_policy(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> Sequence[str]:
        """See the base class."""
        return schedule(service_port, settings.scheduler, settings.schedulers).ignored

    def chosen_by(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """See the base class."""
        return hashed_by(schedule(service_port, settings.scheduler, settings.schedulers).server)

    def requested_schedulers(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> FrozenSet[str]:
        """See the base class."""
        return requested_schedulers(service_port, settings.scheduler)

    def drops_without_local(self, settings: DataplaneSettings) -> bool:
        """See the base class."""
        return settings.behaviour.local_means_local

    def derivation(self, context: IpvsContext) -> Derivation:
        """See the base class."""
        return self.glue.derivation(context.settings)

    def lines(self, family: str, table: str, key: Any, value: Any) -> List[str]:
        """Return an entry as ``ipvsadm -Sn`` or the tools of the glue write it, or as arguments of ``ip``."""
        if table in _LINES:
            return _LINES[table](family, key, value)
        return self.glue.lines(family, table, key, value)

    def serves(self, entry: Entry, address: str, port: int) -> bool:
        """See the base class. Virtual and real servers affect their own address and port, other entries any."""
        key = entry[1]
        server = key.server if isinstance(key, RealServerKey) else key
        return not isinstance(server, VirtualServerKey) or (server.address, server.port) == (address, port)

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> Dict[str, str]:
        """See the base class."""
        addresses = [address for address in tables[ADDRESSES] if family_of(address) == family]
        return {
            f"ip {family}": ip_batch_text(addresses),
            **self.glue.texts(family, tables),
            f"ipvsadm {family}": ipvsadm_text(tables[VIRTUAL_SERVERS], tables[REAL_SERVERS]),
        }


_LINES: Mapping[str, Callable[[str, Any, Any], List[str]]] = {
    DEVICES: lambda _family, key, _value: [device_line(key)],
    ADDRESSES: lambda _family, key, _value: [address_line(key)],
    VIRTUAL_SERVERS: lambda _family, key, value: [virtual_server_line(key, value)],
    REAL_SERVERS: lambda _family, key, value: [real_server_line(key, value)],
}

RENDERING = IpvsRendering(IPTABLES_GLUE)
OVER_NFTABLES = IpvsRendering(NFTABLES_GLUE)
