# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The external connections of a node: those from outside the cluster that use its node ports or external addresses.

The agent knows the addresses, and the connections that it forwards itself; the command that waits for the end of the
others reads them from the kernel, so that the agent need not read large tables.
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Sequence

from ...base.addresses import (
    FAMILIES,
    Network,
    address_and_port,
    packed,
    packed_place,
    parse_network,
    unpacked,
    unpacked_place,
)
from ...cluster.model import Service
from ...kernel.client_flow import ClientFlow
from ...kernel.conntrack.client_flows import client_flows
from ...kernel.ipvs.connections import client_connections
from ...rendering.settings import DataplaneSettings
from ..runtime.agent_client import reading_answer

_CIDR = "cidr"


class Serving(NamedTuple):
    """The criteria of external connections: see :func:`serving_document`. Addresses and ports are in network order."""

    places: set[tuple[str, bytes]]
    node_ports: set[tuple[str, bytes]]
    node_port_addresses: set[bytes]
    node_addresses: set[bytes]
    inside: tuple[Network, ...]
    tracked: bool

    def includes(self, protocol: str, destination: bytes) -> bool:
        """Return whether a destination, address and port, is an external address or a node port of this node."""
        if (protocol, destination) in self.places:
            return True
        return (protocol, destination[-2:]) in self.node_ports and destination[:-2] in self.node_port_addresses

    def is_inside(self, source: bytes) -> bool:
        """Return whether a source, address and port, is this node or a pod."""
        address = source[:-2]
        if address in self.node_addresses:
            return True
        return any(network.contains(unpacked(address)) for network in self.inside)


class Connections(NamedTuple):
    """External connections: all that the kernel knows, those that have ended included, and those in use."""

    known: set[tuple[str, bytes, bytes]]
    used: set[tuple[str, bytes, bytes]]


def serving_document(
    services: Iterable[Service], settings: Sequence[DataplaneSettings], pods: Sequence[str], tracked: bool
) -> dict[str, Any]:
    """Return the criteria as plain JSON values, for :func:`parse_serving`.

    ``pods``: ranges of this node's pods. ``tracked``: whether connections pass connection tracking.
    """
    places: list[list[Any]] = []
    ports: list[list[Any]] = []
    for service in services:
        for port in service.ports:
            addresses = (*service.load_balancer_ips, *service.external_ips)
            places += [[port.protocol, address, port.port] for address in addresses]
            if port.node_port:
                ports.append([port.protocol, port.node_port])
    ranges = [item.local_traffic.value for item in settings if item.local_traffic and item.local_traffic.kind == _CIDR]
    return {
        "places": places,
        "nodePorts": ports,
        "nodePortAddresses": sorted({address for item in settings for address in item.node_port_addresses}),
        "nodeAddresses": sorted({address for item in settings for _interface, address in item.node_addresses}),
        "inside": sorted({*ranges, *pods}),
        "tracked": tracked,
    }


def parse_serving(document: Any) -> Serving:
    """Return the criteria in an answer of the agent. Raises ProxyError if it is not valid."""
    with reading_answer("its addresses"):
        networks = [parse_network(str(text)) for text in document["inside"]]
        return Serving(
            places={(str(protocol), _place(address, port)) for protocol, address, port in document["places"]},
            node_ports={(str(protocol), _place("", port)) for protocol, port in document["nodePorts"]},
            node_port_addresses={packed(address) or b"" for address in document["nodePortAddresses"]},
            node_addresses={packed(address) or b"" for address in document["nodeAddresses"]},
            inside=tuple(network for network in networks if network is not None),
            tracked=bool(document["tracked"]),
        )


def _place(address: Any, port: Any) -> bytes:
    return packed_place(str(address), int(port))


def external_connections(serving: Serving, forwarded: Any) -> Connections:
    """Read the external connections from connection tracking and IPVS, and add those that the agent forwards.

    ``forwarded``: lists of protocol, client, its port, address and port, as the agent answers. Raises KernelError if
    the kernel's cannot be read, ProxyError if the agent's are not valid.
    """
    found = Connections(set(), set())
    flows: list[ClientFlow] = []
    for family in FAMILIES:
        if serving.tracked:
            flows += client_flows(family, serving.includes)
        flows += client_connections(family, serving.includes)
    with reading_answer("its connections"):
        for protocol, client, source_port, address, port in forwarded:
            flows.append(ClientFlow(str(protocol), _place(client, source_port), _place(address, port), True))
    for flow in flows:
        if serving.includes(flow.protocol, flow.destination) and not serving.is_inside(flow.source):
            key = (flow.protocol, flow.source, flow.destination)
            found.known.add(key)
            if flow.used:
                found.used.add(key)
    return found


def describe(connection: tuple[str, bytes, bytes]) -> dict[str, str]:
    """Return a connection as text: protocol, client and destination."""
    protocol, source, destination = connection
    client, server = (address_and_port(*unpacked_place(place)) for place in (source, destination))
    return {"protocol": protocol, "client": client, "destination": server}
