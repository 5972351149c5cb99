# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The entries that one ServicePort contributes to the tables of userspace mode.

Traffic policies and endpoints are those of every mode. A listener exists at each address and port of the ServicePort,
even without endpoints: ``explain`` shows it, and the loss of all endpoints is a replaced value like any other change.
"""

from __future__ import annotations

from typing import FrozenSet, List, NamedTuple, Sequence, Tuple

from ...base.addresses import LOOPBACK, address_bits, family_of, is_link_local, is_loopback, networks_of, packed
from ...serviceports.info import Endpoint, ServicePortInfo, ServicePortName, Sources
from ...serviceports.weights import slots
from ..ipvs.entries import is_bindable, is_real_server
from ..merged import Entry
from ..settings import DataplaneSettings
from .model import ADDRESSES, DEVICE, LISTENERS, TCP, UDP, Listener, ListenerKey


class ListenerAddresses(NamedTuple):
    """The addresses that ServicePorts need from the settings, computed once.

    ``owned``: addresses that other interfaces of the node have; they are not bound to the device. ``node_port_ips``:
    the addresses on which node ports answer. ``node_ip``: the node's own address. ``localhost``: the loopback address
    at which the agent listens for node ports beside nftables mode, empty if it does not.
    """

    owned: FrozenSet[str]
    node_port_ips: Tuple[str, ...]
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


def service_port_entries(info: ServicePortInfo, addresses: ListenerAddresses) -> List[Entry]:
    """Return the ServicePort's entries as (table, key, value) triples. A key may occur more than once."""
    if refusal(info):
        return []
    entries: List[Entry] = []

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


def localhost_entries(info: ServicePortInfo, addresses: ListenerAddresses) -> List[Entry]:
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
