# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Render userspace mode: ServicePorts to listeners, and to the addresses at which clients reach them."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

from ...base.addresses import LOOPBACK, address_bits, family_of, is_link_local, is_loopback, networks_of, packed
from ...serviceports.info import Endpoint, ServicePortInfo, ServicePortName, Sources
from ...serviceports.weights import slots
from ..ipvs.entries import is_bindable, is_real_server
from ..ipvs.text import address_line, device_line, ip_batch_text
from ..merged import Entry
from ..rendering import Rendering
from ..settings import Arrival, Client, DataplaneSettings, Masquerade
from .model import ADDRESSES, DEVICE, DEVICES, LISTENERS, TCP, UDP, Listener, ListenerKey, listener_line


class ListenerAddresses(NamedTuple):
    """The addresses that ServicePorts need from the settings, computed once.

    ``owned``: addresses that other interfaces of the node have; they are not bound to the device. ``node_port_ips``:
    the addresses on which node ports answer. ``node_ip``: the node's own address. ``localhost``: the loopback address
    at which the agent listens for node ports beside nftables mode, empty if it does not.
    """

    owned: frozenset[str]
    node_port_ips: tuple[str, ...]
    node_ip: str
    localhost: str


def listener_addresses(settings: DataplaneSettings) -> ListenerAddresses:
    """Compute the addresses from the settings of a node; link-local ones need an interface, so they are omitted."""
    owned = frozenset(address for interface, address in settings.node_addresses if interface != DEVICE)
    chosen = [address for address in settings.node_port_addresses if address in owned and not is_link_local(address)]
    localhost = LOOPBACK[settings.family] if settings.localhost_listeners else ""
    return ListenerAddresses(owned, tuple(dict.fromkeys(chosen)), settings.node_ip, localhost)


def refusal(info: ServicePortInfo) -> str:
    """Return why userspace mode cannot serve a ServicePort; empty if it can."""
    if info.protocol in (TCP, UDP):
        return ""
    return f"userspace mode forwards TCP and UDP only, not {info.key.protocol}"


def usable(endpoint: Endpoint) -> bool:
    """Return whether the agent may connect to an endpoint.

    In the other modes the kernel refuses to forward to loopback and link-local addresses. The agent runs on the node
    and would reach the node's own services there, so it must refuse them, too.
    """
    address = endpoint.ip
    if address == "::" or address.startswith("169.254.") or is_loopback(address) or is_link_local(address):
        return False
    return is_real_server(address)


def chosen_endpoints(info: ServicePortInfo, only_local: bool) -> Sequence[Endpoint]:
    """Return the endpoints that receive traffic. ``only_local``: the traffic policy is Local."""
    return [endpoint for endpoint in (info.local if only_local else info.cluster) if usable(endpoint)]


def owner_of(info: ServicePortInfo) -> str:
    """Return the name of a ServicePort in its listeners."""
    return owner_name(info.key)


def owner_name(key: ServicePortName) -> str:
    """Return the name that listeners have for a ServicePort."""
    return f"{key}" if key.protocol == "TCP" else f"{key}/{key.protocol}"


def service_port_entries(info: ServicePortInfo, addresses: ListenerAddresses) -> list[Entry]:
    """Return the ServicePort's entries as (table, key, value) triples. A key may occur more than once."""
    if refusal(info):
        return []
    entries: list[Entry] = []

    def serve(address: str, value: Listener) -> None:
        if is_link_local(address) or not is_bindable(address):
            return
        if address in info.unbound and address not in addresses.owned:
            return
        # A cluster IP is never the node's own, so it does not depend on which addresses other interfaces have.
        if address == info.cluster_ip or address not in addresses.owned:
            entries.append((ADDRESSES, address, True))
        entries.append((LISTENERS, ListenerKey(info.protocol, address, info.port), value))

    serve(info.cluster_ip, _listener(info, info.internal_local))
    external = _listener(info, info.external_local)
    for address in dict.fromkeys((*info.external_ips, *info.load_balancer_ips)):
        serve(address, _restricted(external, info.sources_at(address), address, addresses))
    if info.node_port:
        for address in addresses.node_port_ips:
            value = _restricted(external, info.node_port_sources, address, addresses)
            entries.append((LISTENERS, ListenerKey(info.protocol, address, info.node_port), value))
    return entries


def localhost_entries(info: ServicePortInfo, addresses: ListenerAddresses) -> list[Entry]:
    """Return the listener of a ServicePort's node port at the loopback address, for TCP only (KEP-6032)."""
    if not addresses.localhost or not info.node_port or info.protocol != TCP:
        return []
    key = ListenerKey(TCP, addresses.localhost, info.node_port)
    value = _listener(info, info.external_local)
    return [(LISTENERS, key, _restricted(value, info.node_port_sources, key.address, addresses))]


def _listener(info: ServicePortInfo, only_local: bool) -> Listener:
    chosen = chosen_endpoints(info, only_local)
    turns = slots(chosen) if info.weighted else chosen
    return Listener(owner_of(info), tuple((item.ip, item.port) for item in turns), info.affinity_seconds)


def _restricted(value: Listener, sources: Sources, address: str, addresses: ListenerAddresses) -> Listener:
    """Return a listener at an external address for allowed sources only; without any, it refuses all clients.

    The node's own connections to an address that it holds come from that same address, so it is allowed if a range
    contains the node.
    """
    if sources is None:
        return value
    if not sources:
        return value._replace(endpoints=())
    networks = networks_of(sources)
    if packed(addresses.node_ip) is not None and any(network.contains(addresses.node_ip) for network in networks):
        return value._replace(sources=(*sources, f"{address}/{address_bits(family_of(address))}"))
    return value._replace(sources=sources)


class UserspaceRendering(Rendering[ListenerAddresses]):
    """Tables: the device, its addresses, and the listeners. The agent itself forwards connections."""

    name = "userspace"
    tables = (DEVICES, ADDRESSES, LISTENERS)
    entries_have_addresses = True
    replaces_source = True
    forwards = True
    scheduler = "rr"
    refused_with = "TCP reset, or for UDP ICMP port unreachable"

    def settings_in_use(self, settings: DataplaneSettings) -> DataplaneSettings:
        """See the base class. The node's own addresses decide which addresses are bound to the device."""
        chosen = tuple(sorted(set(settings.node_port_addresses)))
        owned = tuple(("", address) for address in sorted(listener_addresses(settings).owned))
        return settings._replace(node_addresses=owned, node_port_addresses=chosen)

    def context(self, settings: DataplaneSettings) -> ListenerAddresses:
        """See the base class."""
        return listener_addresses(settings)

    def static_entries(self, context: ListenerAddresses) -> list[Entry]:
        """Return the device."""
        return [(DEVICES, DEVICE, "dummy")]

    def entries(self, service_port: ServicePortInfo, context: ListenerAddresses) -> list[Entry]:
        """See the base class."""
        return service_port_entries(service_port, context)

    def endpoints(
        self, service_port: ServicePortInfo, external: bool, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """See the base class; addresses that the agent must not connect to are omitted."""
        only_local = service_port.external_local if external else service_port.internal_local
        return () if refusal(service_port) else chosen_endpoints(service_port, only_local)

    def endpoints_for(
        self, service_port: ServicePortInfo, external: bool, client: Client, settings: DataplaneSettings
    ) -> Sequence[Endpoint]:
        """See the base class; a listener has one list of endpoints for all clients."""
        return self.endpoints(service_port, external, settings)

    def selection_text(self, service_port: ServicePortInfo, settings: DataplaneSettings) -> str:
        """See the base class."""
        return "in turn"

    def masquerade(
        self, service_port: ServicePortInfo, external: bool, client: Client, settings: DataplaneSettings
    ) -> Masquerade:
        """See the base class."""
        return Masquerade(True, "the agent forwards the connection")

    def rows(self, family: str, tables: Mapping[str, Mapping[Any, Any]], place: Arrival) -> list[str]:
        """See the base class."""
        key = ListenerKey(place.protocol, place.address, place.port)
        found = [address_line(item, DEVICE) for item in tables.get(ADDRESSES, {}) if item == place.address]
        listeners = tables.get(LISTENERS, {})
        return found + ([listener_line(key, listeners[key])] if key in listeners else [])

    def drops_without_local(self, settings: DataplaneSettings) -> bool:
        """See the base class. The agent opens no socket then, so the kernel refuses."""
        return False

    def refusal(self, service_port: ServicePortInfo) -> str:
        """See the base class. SCTP is not forwarded."""
        return refusal(service_port)

    def lines(self, family: str, table: str, key: Any, value: Any) -> list[str]:
        """Return a listener in words, a device or an address as arguments of ``ip``."""
        if table == LISTENERS:
            return [listener_line(key, value)]
        return [device_line(key) if table == DEVICES else address_line(key, DEVICE)]

    def serves(self, entry: Entry, address: str, port: int) -> bool:
        """See the base class."""
        key = entry[1]
        return (key.address, key.port) == (address, port) if isinstance(key, ListenerKey) else key == address

    def texts(self, family: str, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, str]:
        """See the base class."""
        addresses = [address for address in tables[ADDRESSES] if family_of(address) == family]
        listeners = sorted(listener_line(key, value) for key, value in tables[LISTENERS].items())
        return {
            f"ip {family}": ip_batch_text(addresses, DEVICE),
            f"listeners {family}": "".join(f"{line}\n" for line in listeners),
        }


RENDERING = UserspaceRendering()
