# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The addresses, ports and node ports of all ServicePorts of one IP family, without their endpoints."""

from __future__ import annotations

from typing import Iterator, Optional

from ..base.addresses import IPV4, family_of
from ..cluster.claims import Claim
from ..cluster.state import ClusterState
from .info import ServicePortName
from .table import NodeContext, is_served


class Frontends:
    """Which ServicePort an address and port, or a node port, belongs to; protocols are in lower case.

    A Service that lost an address to another one does not have it.
    """

    def __init__(self, state: ClusterState, context: NodeContext) -> None:
        family = self.family = context.family
        self.names: list[ServicePortName] = []
        self._places: dict[tuple[str, str, int], ServicePortName] = {}
        self._node_ports: dict[tuple[str, int], ServicePortName] = {}
        for key, service in state.services.items():
            own = service.cluster_ip_v4 if family == IPV4 else service.cluster_ip_v6
            if not own or not is_served(service, context):
                continue
            addresses = [own, *(ip for ip in service.external_ips if family_of(ip) == family)]
            addresses += [ip for ip in service.load_balancer_ips if family_of(ip) == family]
            lost = state.lost_claims(key)
            for port in service.ports:
                name = ServicePortName(key.namespace, key.name, port.name, port.protocol)
                protocol = port.protocol.lower()
                self.names.append(name)
                for address in addresses:
                    if Claim(address, port.port, port.protocol) not in lost:
                        self._places[protocol, address, port.port] = name
                if port.node_port and Claim(family, port.node_port, port.protocol) not in lost:
                    self._node_ports[protocol, port.node_port] = name

    def at(self, protocol: str, address: str, port: int) -> Optional[ServicePortName]:
        """Return the ServicePort at an address and port."""
        return self._places.get((protocol, address, port))

    def at_node_port(self, protocol: str, port: int) -> Optional[ServicePortName]:
        """Return the ServicePort of a node port."""
        return self._node_ports.get((protocol, port))

    def places(self) -> Iterator[tuple[tuple[str, str, int], ServicePortName]]:
        """Yield (protocol, address, port) with its ServicePort."""
        yield from self._places.items()

    def node_ports(self) -> Iterator[tuple[tuple[str, int], ServicePortName]]:
        """Yield (protocol, node port) with its ServicePort."""
        yield from self._node_ports.items()
