# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The addresses of the API servers, which no external address of a Service of the cluster may replace.

A node that sends its own connections to the API servers elsewhere never learns that the Service which caused this was
deleted.
"""

from __future__ import annotations

from typing import Iterable, Optional

from ..base.addresses import canonical_address
from .claims import Claim
from .model import EndpointSlice, NamespacedName, Service, ServicePort
from .owned_slices import Slices

#: The Service whose EndpointSlice with the same name holds the API servers, which write it themselves.
KUBERNETES = NamespacedName("default", "kubernetes")
_TCP = "TCP"

NO_CLAIMS: frozenset[Claim] = frozenset()


def claims_at(servers: Iterable[tuple[str, int]]) -> frozenset[Claim]:
    """Return the claims of API servers, given by host and port; a host that is a name makes none."""
    found = ((canonical_address(host), port) for host, port in servers)
    return frozenset(Claim(address, port, _TCP) for address, port in found if address is not None)


def named_claims(found: Optional[EndpointSlice]) -> frozenset[Claim]:
    """Return the claims of the API servers that the EndpointSlice ``default/kubernetes`` names."""
    if found is None:
        return NO_CLAIMS
    ports = [port.port for port in found.ports if port.protocol == _TCP and port.port]
    return frozenset(Claim(endpoint.address, port, _TCP) for endpoint in found.endpoints for port in ports)


def leading_there(service: Service, slices: Slices, servers: frozenset[Claim]) -> frozenset[Claim]:
    """Return the claims of API servers that a Service makes as their load balancer: its endpoints are API servers.

    Only addresses in the status count: controllers write it, while tenants write external IPs.
    """
    if not servers or not service.load_balancer_ips:
        return NO_CLAIMS
    claimed = [claim for claim in servers if claim.address in service.load_balancer_ips]
    return frozenset(
        claim
        for port in service.ports
        for claim in claimed
        if (claim.port, claim.protocol) == (port.port, port.protocol) and _leads_there(port, slices, servers)
    )


def _leads_there(port: ServicePort, slices: Slices, servers: frozenset[Claim]) -> bool:
    """Return whether a port has endpoints, and all of them are API servers."""
    are_servers = (
        Claim(endpoint.address, target.port or 0, target.protocol) in servers
        for item in slices.values()
        for target in item.ports
        if (target.name, target.protocol) == (port.name, port.protocol)
        for endpoint in item.endpoints
    )
    # The first one that is none ends the search, which is repeated for each change of thousands of EndpointSlices.
    return next(are_servers, False) and all(are_servers)
