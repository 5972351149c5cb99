# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the traffic counters of the kernel, one function for each kind of objects that have them."""

from __future__ import annotations

from typing import Dict, Iterator, List, Optional

from ...addresses import address_and_port, family_of, unpacked
from ...kernel.ipvs.statistics import real_server_statistics, virtual_server_statistics
from ...kernel.netlink.protocol import NETLINK_NETFILTER
from ...kernel.netlink.socket import NetlinkSocket
from ...kernel.nftables.traffic.element_counters import CountedElement, counted_elements
from ...kernel.xtables.counters import chain_counters
from ...kernel.xtables.variant import XtablesVariant
from ...rendering.iptables.names import CLUSTER_PREFIX, LOCAL_PREFIX, hash16
from ...rendering.ipvs.model import VirtualServerKey
from ...rendering.nftables import layout
from ...rendering.nftables.keys import address_key, transport_key
from ...rendering.nftables.objects import TABLE_NAME
from ...rendering.userspace.entries import owner_name
from ...serviceports.frontends import Frontends
from ...serviceports.info import ServicePortName
from ..handles import KernelHandles
from .account import UNCOUNTED, Sample, connections_only

_FRONTENDS = (layout.FRONTENDS, layout.NODE_PORT_FRONTENDS)
_ENDPOINTS = (
    layout.ENDPOINTS,
    layout.LOCAL_ENDPOINTS,
    layout.NODE_PORT_ENDPOINTS,
    layout.NODE_PORT_LOCAL_ENDPOINTS,
)


def of_servers(frontends: Frontends, handles: KernelHandles) -> List[Sample]:
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


def of_chains(variant: XtablesVariant, frontends: Frontends, handles: KernelHandles) -> List[Sample]:
    """Return the counters of the chains of endpoints. Raises KernelError."""
    counters = chain_counters(variant, handles.progress)
    found: List[Sample] = []
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


def of_listeners(frontends: Frontends, handles: KernelHandles) -> List[Sample]:
    """Return what the agent has forwarded itself. Raises KernelError."""
    names = {owner_name(name): name for name in frontends.names}
    found: List[Sample] = []
    for item in handles.listeners.used():
        name, endpoint = names.get(item.owner), address_and_port(*item.endpoint)
        # A ServicePort of both families is one owner.
        if name is not None and family_of(item.endpoint[0]) == frontends.family:
            counters = connections_only(item.opened)
            found.append(Sample((item.owner, endpoint), name, endpoint, counters, active=item.open))
            found.append(Sample((item.owner, endpoint), name, "", counters, active=item.open))
    return found


def of_elements(frontends: Frontends) -> List[Sample]:
    """Return the counters of the elements that lead to endpoints. Raises KernelError."""
    owners: Dict[bytes, ServicePortName] = {
        address_key(address) + transport_key(protocol, port): name
        for (protocol, address, port), name in frontends.places()
    }
    for (protocol, port), name in frontends.node_ports():
        owners[transport_key(protocol, port)] = name
    found: List[Sample] = []
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        for table in _FRONTENDS:
            for element in _elements(sock, frontends.family, table):
                owner = owners.get(element.key)
                if owner is not None:
                    found.append(Sample((table, element.key), owner, "", connections_only(element.packets)))
        for table in _ENDPOINTS:
            for element in _elements(sock, frontends.family, table):
                # The key is the frontend and the index of the endpoint.
                owner = owners.get(element.key[:-4])
                if owner is not None:
                    endpoint = _endpoint(element.data)
                    numbers = connections_only(element.packets)
                    found.append(Sample((table, element.key), owner, endpoint, numbers))
    return found


def _elements(sock: NetlinkSocket, family: str, name: str) -> Iterator[CountedElement]:
    return counted_elements(sock, family, TABLE_NAME, name)


def _endpoint(data: bytes) -> str:
    """Return an element's data, an address and a port that is padded to a register, as ``ip:port``."""
    return address_and_port(unpacked(data[:-4]), int.from_bytes(data[-4:-2], "big"))
