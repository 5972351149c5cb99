# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the traffic counters of the kernel, one function for each kind of objects that have them."""

from __future__ import annotations

from typing import Hashable, Iterable, Iterator, Optional

from ...base.addresses import address_and_port, family_of, unpacked_place
from ...kernel.ipvs.statistics import real_server_statistics, virtual_server_statistics
from ...kernel.netlink.protocol import NETLINK_NETFILTER
from ...kernel.netlink.socket import NetlinkSocket
from ...kernel.nftables.traffic.element_counters import Counted, counted_elements
from ...kernel.xtables.counters import chain_counters
from ...kernel.xtables.variant import XtablesVariant
from ...rendering.iptables.names import CLUSTER_PREFIX, LOCAL_PREFIX, hash16
from ...rendering.ipvs.model import RealServerKey, VirtualServerKey
from ...rendering.nftables import layout, traffic
from ...rendering.nftables.keys import address_key, transport_key
from ...rendering.nftables.objects import ORIGINAL, TABLE_NAME
from ...rendering.userspace.mode import owner_name
from ...resources import Kind, PlannedChange
from ...serviceports.frontends import Frontends
from ...serviceports.info import ServicePortName
from ..handles import KernelHandles
from .account import UNCOUNTED, CountedElement, Numbers, Sample, TrafficAccount, connections_only

_FRONTENDS = (layout.FRONTENDS, layout.NODE_PORT_FRONTENDS)
_TRAFFIC = (traffic.SERVICE_TRAFFIC, traffic.NODE_PORT_TRAFFIC)
_ENDPOINTS = (layout.ENDPOINTS, layout.LOCAL_ENDPOINTS, layout.NODE_PORT_ENDPOINTS, layout.NODE_PORT_LOCAL_ENDPOINTS)


def of_servers(frontends: Frontends, handles: KernelHandles) -> list[Sample]:
    """Return the counters of virtual and real servers. Raises KernelError."""

    def owner(server: VirtualServerKey) -> Optional[ServicePortName]:
        place = frontends.at(server.protocol, server.address, server.port)
        return place or frontends.at_node_port(server.protocol, server.port)

    servers = virtual_server_statistics(handles.ipvs, frontends.family)
    owners = {server: name for server in servers for name in [owner(server)] if name is not None}
    real_servers = real_server_statistics(handles.ipvs, owners)
    found = [Sample(server, name, "", tuple(servers[server])) for server, name in owners.items()]
    for key, item in real_servers.items():
        name, endpoint = owners[key.server], address_and_port(key.ip, key.port)
        found.append(Sample(key, name, endpoint, tuple(item.counters), active=item.active, inactive=item.inactive))
        # The virtual server has counters, but no number of connections.
        found.append(Sample(key, name, "", UNCOUNTED, active=item.active, inactive=item.inactive))
    return found


def revived(planned: Iterable[PlannedChange], account: TrafficAccount, handles: KernelHandles) -> set[Hashable]:
    """Return the real servers that these changes added, and whose counters continue. Raises KernelError.

    IPVS keeps the record of a removed real server for two minutes, and longer while it has connections. If the real
    server is added to the same virtual server again, the record is used again, with its counters; a new one counts from
    zero. To be called at once after the changes, before a new counter can have passed the last reading of the old one.
    """
    last: dict[RealServerKey, Numbers] = {}
    for item in planned:
        if item.resource.kind == Kind.REAL_SERVERS:
            for key in item.change.added:
                known = account.last(key)
                if known is not None:
                    last[key] = known
    if not last:
        return set()
    found = real_server_statistics(handles.ipvs, {key.server for key in last})
    return {
        key
        for key, numbers in last.items()
        if key in found and all(now >= (before or 0) for now, before in zip(found[key].counters, numbers))
    }


def of_chains(variant: XtablesVariant, frontends: Frontends, handles: KernelHandles) -> list[Sample]:
    """Return the counters of the chains of endpoints. Raises KernelError."""
    counters = chain_counters(variant, handles.progress)
    found: list[Sample] = []
    for name in frontends.names:
        digest = hash16(str(name) + name.protocol.lower())
        chains = [*counters.reached.get(CLUSTER_PREFIX + digest, ()), *counters.reached.get(LOCAL_PREFIX + digest, ())]
        for chain in dict.fromkeys(chains):
            item = counters.endpoints.get(chain)
            if item is not None:
                numbers = connections_only(item.connections)
                found.append(Sample(chain, name, item.endpoint, numbers))
                found.append(Sample(chain, name, "", numbers))
    return found


def of_listeners(frontends: Frontends, handles: KernelHandles) -> list[Sample]:
    """Return what the agent has forwarded itself. Raises KernelError."""
    names = {owner_name(name): name for name in frontends.names}
    found: list[Sample] = []
    for item in handles.listeners.used():
        name, endpoint = names.get(item.owner), address_and_port(*item.endpoint)
        # A ServicePort of both families is one owner.
        if name is not None and family_of(item.endpoint[0]) == frontends.family:
            counters = connections_only(item.opened)
            found.append(Sample((item.owner, endpoint), name, endpoint, counters, active=item.open))
            found.append(Sample((item.owner, endpoint), name, "", counters, active=item.open))
    return found


def of_elements(frontends: Frontends, with_connections: bool, with_bytes: bool) -> list[Sample]:
    """Return the counters of elements: connections and bytes, or one of both. Raises KernelError."""
    owners: dict[bytes, ServicePortName] = {
        address_key(address) + transport_key(protocol, port): name
        for (protocol, address, port), name in frontends.places()
    }
    for (protocol, port), name in frontends.node_ports():
        owners[transport_key(protocol, port)] = name
    found: list[Sample] = []
    with NetlinkSocket(NETLINK_NETFILTER) as sock:

        def elements(names: Iterable[str]) -> Iterator[tuple[CountedElement, Counted]]:
            for name in names:
                for element in counted_elements(sock, frontends.family, TABLE_NAME, name):
                    yield CountedElement(name, element.key), element

        for place, element in elements(_FRONTENDS if with_connections else ()):
            owner = owners.get(element.key)
            if owner is not None:
                found.append(Sample(place, owner, "", connections_only(element.packets)))
        for place, element in elements(_ENDPOINTS if with_connections else ()):
            # The key is the frontend and the index of the endpoint.
            owner = owners.get(element.key[:-4])
            if owner is not None:
                # The data are an address and a port that is padded to a register.
                endpoint = address_and_port(*unpacked_place(element.data[:-2]))
                found.append(Sample(place, owner, endpoint, connections_only(element.packets)))
        for place, element in elements(_TRAFFIC if with_bytes else ()):
            # The key is the frontend and the direction.
            owner = owners.get(element.key[:-4])
            if owner is not None:
                found.append(Sample(place, owner, "", _in_direction(element)))
    return found


def _in_direction(element: Counted) -> Numbers:
    """Return the counters of an element for the packets of one direction."""
    packets, size = element.packets, element.bytes
    return (None, packets, None, size, None) if element.key[-4] == ORIGINAL else (None, None, packets, None, size)
