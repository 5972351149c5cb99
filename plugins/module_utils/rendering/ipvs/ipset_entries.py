# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The elements of ipsets that one ServicePort contributes, as kube-proxy 1.36 adds them."""

from __future__ import annotations

from typing import Sequence

from ...base.addresses import address_and_port
from ...serviceports.info import Endpoint, ServicePortInfo
from ..merged import Entry
from . import sets
from .entries import INSIDE, Contribution, IpvsFacts
from .model import FIREWALLED, REDIRECTED, SET_ELEMENTS, FirewalledPort, Redirect, SetElementKey, VirtualServerKey


def service_port_entries(info: ServicePortInfo, facts: IpvsFacts) -> list[Entry]:
    """Return the entries of the ServicePort: (table, key, value) triples. A key may occur more than once."""
    return IpsetContribution(info, facts).add_all()


class IpsetContribution(Contribution):
    """See the base class."""

    def __init__(self, info: ServicePortInfo, facts: IpvsFacts) -> None:
        super().__init__(info, facts)
        self._names = sets.NAMES[info.family]

    def _element(self, name: str, element: str) -> None:
        self.entries.append((SET_ELEMENTS, SetElementKey(self._names[name], element), True))

    def add_hairpin(self, endpoint: Endpoint) -> None:
        """See the base class."""
        self._element(sets.LOOP_BACK, f"{endpoint.ip},{self.info.protocol}:{endpoint.port},{endpoint.ip}")

    def add_to_set(self, name: str, address: str, number: int) -> None:
        """See the base class."""
        self._element(name, f"{address},{self.info.protocol}:{number}")

    def add_own_address(self, address: str) -> None:
        """See the base class."""
        self._element(sets.IPVS_IPS, address)

    def add_node_port(self) -> None:
        """See the base class."""
        info = self.info
        for name in sets.NODE_PORT_SETS[info.protocol][: 2 if info.external_local else 1]:
            if info.protocol == "sctp":
                for address in self.facts.node_ips:
                    self._element(name, f"{address},sctp:{info.node_port}")
            else:
                self._element(name, str(info.node_port))

    def add_health_check(self, number: int) -> None:
        """See the base class."""
        self._element(sets.HEALTH_CHECK_NODE_PORT, str(number))

    def redirect(self, address: str, number: int) -> None:
        """See the base class."""
        info = self.info
        redirect = Redirect(address_and_port(info.cluster_ip, info.port), self.lists.redirected == INSIDE)
        self.add(REDIRECTED, VirtualServerKey(info.protocol, address, number), redirect)

    def restrict(self, address: str, number: int, sources: Sequence[str]) -> None:
        """See the base class."""
        element = f"{address},{self.info.protocol}:{number}"
        self._element(sets.LOAD_BALANCER_FW, element)
        for text in sources:
            self._element(sets.LOAD_BALANCER_SOURCE_CIDR, f"{element},{_element_network(text)}")
        if self.allows_node(sources):
            self._element(sets.LOAD_BALANCER_SOURCE_IP, f"{element},{address}")
        elif not self.behaviour.ranges_hold_for_node:
            self.add(FIREWALLED, FirewalledPort(address, self.info.protocol, number), True)


def _element_network(network: str) -> str:
    """Return a range as ipset prints it: a single address without its prefix length."""
    address, _slash, length = network.partition("/")
    return address if length == ("128" if ":" in address else "32") else network
