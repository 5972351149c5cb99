# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The limit of one Service: what does not fit is refused, so that no Service affects others.

The API limits none of ports, external IPs, load balancer addresses and source ranges, and what a node programs are
products of their numbers, and of the endpoints: an object of 100 KB may make millions of entries. So a Service has a
weight, computed from these numbers before anything is expanded. It does not depend on the mode, so that a change of the
mode serves the same.
"""

from __future__ import annotations

from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ..addresses import FAMILIES, IPV4, IPV6, family_of
from .model import Service, ServicePort
from .owned_slices import EndpointCounts

#: The weight that is served of a Service: 20,000 pairs of a port and an address.
MOST_WEIGHT = 200_000
#: The weight that is always served for each endpoint: objects that hold many endpoints are large themselves.
WEIGHT_OF_ENDPOINT = 60
#: A Service up to this weight, or up to this weight for each endpoint, takes the memory that its objects suggest.
LIGHT, LIGHT_OF_ENDPOINT = 1_000, 20

#: The weights of a port at one address; of a source that may use it; of an endpoint there, which each address lists in
#: nftables mode and each virtual server in ipvs mode; and of an endpoint of a port, which has a chain in iptables mode.
_PAIR, _SOURCE, _LISTED, _CHAIN = 10, 5, 3, 4


class Limited(NamedTuple):
    """A Service of more than a light weight.

    ``whole``: as it was given; ``served``: without the parts that do not fit; ``excess``: the weight of what is served
    beyond what its objects suggest; ``refused``: field and reason of each kind of parts that do not fit.
    """

    whole: Service
    served: Service
    excess: int
    refused: Tuple[Tuple[str, str], ...] = ()


def is_small(service: Service) -> bool:
    """Return whether a Service is light with any endpoints, as those with few ports and addresses are."""
    addresses = len(service.external_ips) + len(service.load_balancer_ips)
    products = len(service.ports) * ((2 + addresses) * _LISTED + _CHAIN)
    return products <= LIGHT_OF_ENDPOINT and not service.source_ranges and not service.policy.allowed_sources


def limited(service: Service, counts: EndpointCounts) -> Optional[Limited]:
    """Return a Service within its limit, given its endpoints; None if it is light, as nearly all are.

    Served are, up to the first part that does not fit, the cluster IPs of all ports, node ports, load balancer
    addresses, and external IPs, each in the order of the object. The first port is always served at the cluster IPs.
    """
    addresses = len(service.external_ips) + len(service.load_balancer_ips)
    sources = _sources(service)
    suggested = max(LIGHT, LIGHT_OF_ENDPOINT * counts.endpoints)
    # An upper bound: cluster IPs of two families with node ports, and each address with all endpoints.
    most = len(service.ports) * (4 + addresses) * (_PAIR + _SOURCE * (sources + addresses if sources else 0))
    if most + counts.listed * ((2 + addresses) * _LISTED + _CHAIN) <= suggested:
        return None
    return _Fitting(service, counts, max(MOST_WEIGHT, WEIGHT_OF_ENDPOINT * counts.endpoints)).fit(suggested)


def _sources(service: Service) -> int:
    """Return an upper bound of the CIDRs to which external traffic is restricted."""
    return len(service.source_ranges) + len(service.policy.allowed_sources or ())


class _Fitting:
    """Adds the weights of a Service's parts in the order in which they are served, until ``most`` is exceeded."""

    def __init__(self, service: Service, counts: EndpointCounts, most: int) -> None:
        self._service = service
        self._most = most
        self._total = self._served = 0
        self._is_full = False
        self._families = [
            family for family, ip in zip((IPV4, IPV6), (service.cluster_ip_v4, service.cluster_ip_v6)) if ip
        ]
        self._counts = counts

    def _of(self, port: ServicePort) -> int:
        return sum(self._counts.of_port(family, port.name, port.protocol) for family in self._families)

    def _fitting(self, weights: Iterable[int], at_least: int = 0) -> int:
        """Return how many of these parts fit, in their order."""
        fitting = 0
        for weight in weights:
            self._total += weight
            self._is_full = self._is_full or (fitting >= at_least and self._served + weight > self._most)
            if not self._is_full:
                self._served += weight
                fitting += 1
        return fitting

    def _at(self, addresses: Sequence[str], ports: Sequence[ServicePort], sources: int) -> List[int]:
        """Return the weight of each address, which all ports have; 0 in a family that is not served."""
        pair = _PAIR + _SOURCE * (sources + len(addresses) if sources else 0)
        weights = dict.fromkeys(FAMILIES, 0)
        for family in self._families:
            listed = sum(self._counts.of_port(family, port.name, port.protocol) for port in ports)
            weights[family] = len(ports) * pair + listed * _LISTED
        return [weights[family_of(address)] for address in addresses]

    def fit(self, suggested: int) -> Limited:
        """Return what fits. ``suggested``: the weight that the size of the objects suggests."""
        service, families, sources = self._service, len(self._families), _sources(self._service)
        by_address = [families * _PAIR + self._of(port) * (_LISTED + _CHAIN) for port in service.ports]
        ports = service.ports[: self._fitting(by_address, 1)]
        by_node_port = [
            families * (_PAIR + _SOURCE * sources) + self._of(port) * _LISTED if port.node_port else 0
            for port in service.ports
        ]
        node_ports = min(self._fitting(by_node_port), len(ports))
        balancers = self._fitting(self._at(service.load_balancer_ips, service.ports, sources))
        allowed = len(service.policy.allowed_sources or ())
        external = self._fitting(self._at(service.external_ips, service.ports, allowed))
        served = service._replace(
            ports=(*ports[:node_ports], *(port._replace(node_port=0) for port in ports[node_ports:])),
            load_balancer_ips=service.load_balancer_ips[:balancers],
            external_ips=service.external_ips[:external],
        )
        refused: List[Tuple[str, str]] = []
        if len(ports) < len(service.ports):
            refused.append((f"spec.ports[{len(ports)}]", self._reason("this", len(service.ports) - len(ports))))
        without = [index for index in range(node_ports, len(ports)) if service.ports[index].node_port]
        if without:
            refused.append((f"spec.ports[{without[0]}].nodePort", self._reason("this", len(without))))
        for field, given, fitting in (
            ("status.loadBalancer.ingress", service.load_balancer_ips, balancers),
            ("spec.externalIPs", service.external_ips, external),
        ):
            if fitting < len(given):
                refused.append((field, self._reason(given[fitting], len(given) - fitting)))
        return Limited(service, served if refused else service, max(0, self._served - suggested), tuple(refused))

    def _reason(self, first: str, count: int) -> str:
        others = f" and {count - 1} more are" if count > 1 else " is"
        return (
            f"{first}{others} not served: the ports of the Service, times addresses, endpoints and sources, have a "
            f"weight of {self._total}, more than {self._most}"
        )
