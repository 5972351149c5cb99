# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The limit of one Service: what does not fit is refused, so that no Service affects others.

The API limits none of ports, external IPs, load balancer addresses and source ranges, and what a node programs are
products of their numbers, of the endpoints, and of what annotations multiply: an object of 100 KB may make millions of
entries. So the entries of a Service are limited, by its account and before anything is expanded. The limit is that of
the mode that makes most of them, so that all nodes, and a change of the mode, serve the same.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from .account import Parts, Products, Rates, Shape, most_entries
from .model import Service
from .owned_slices import EndpointCounts

#: The entries that are served of a Service in the mode that makes most of them.
MOST_ENTRIES = 100_000
#: The entries that are always served for each endpoint: objects that hold many endpoints are large themselves.
ENTRIES_OF_ENDPOINT = 40
#: The bytes of JSON, as an agent keeps it, of a Service with its EndpointSlices, and of each of their endpoints.
_OBJECT_BYTES, _ENDPOINT_BYTES = 1_000, 120


class Limited(NamedTuple):
    """A Service of more entries than the size of its objects suggests.

    ``whole``: as it was given; ``served``: without the parts that do not fit; ``entries``: of what is served, in the
    mode in effect; ``excess``: the bytes of memory that these take beyond what the objects suggest; ``refused``: field
    and reason of each kind of parts that do not fit.
    """

    whole: Service
    served: Service
    entries: int
    excess: int
    refused: tuple[tuple[str, str], ...] = ()


def is_small(service: Service) -> bool:
    """Return whether a Service never makes more entries than its objects suggest, if no endpoint has a weight."""
    return (
        len(service.ports) == 1
        and not service.ports[0].node_port
        and not (service.external_ips or service.load_balancer_ips or service.affinity_seconds)
        and not (service.external_traffic_policy_local or service.internal_traffic_policy_local)
        and not service.policy.slow_start
    )


def limited(service: Service, counts: EndpointCounts, rates: Rates, node_weight: int = 1) -> Optional[Limited]:
    """Return a Service within its limit, given its endpoints; None if it has no excess, as nearly all have none.

    Served are, up to the first part that does not fit, the cluster IPs of all ports, node ports, load balancer
    addresses, and external IPs, each in the order of the object. The first port is always served at the cluster IPs.
    ``rates``: of the mode in effect. ``node_weight``: the largest weight of a Node.
    """
    most = max(MOST_ENTRIES, ENTRIES_OF_ENDPOINT * counts.endpoints)
    products = Products(service, counts, node_weight)
    parts, served = Parts.of(service), service
    refused: tuple[tuple[str, str], ...] = ()
    shapes = products.shapes(parts)
    if sum(map(_bound, shapes)) > most:
        fitting = _fitting(products, parts, most)
        if fitting != parts:
            served, refused = _served(service, fitting), _refused(service, fitting, most_entries(shapes), most)
            shapes = products.shapes(fitting)
    suggested = (_OBJECT_BYTES + _ENDPOINT_BYTES * counts.endpoints) * rates.bytes_of_object
    excess = max(0, rates.bytes(shapes) - int(suggested))
    return Limited(service, served, rates.of(shapes).total, excess, refused) if excess or refused else None


def _bound(shape: Shape) -> int:
    """Return more entries than any mode makes, at a fraction of the cost."""
    frontends = shape.ports * (1 + shape.addresses) + shape.node_ports
    sources = 1 + max(shape.sources) + shape.addresses
    return 16 * (frontends * sources + shape.places * (2 + shape.addresses))


def _fitting(products: Products, given: Parts, most: int) -> Parts:
    """Return the parts that fit."""
    parts = Parts(min(1, given.ports), 0, 0, 0)
    for field in Parts._fields:
        low, high = getattr(parts, field), getattr(given, field)
        while low < high:
            middle = (low + high + 1) // 2
            if most_entries(products.shapes(parts._replace(**{field: middle}))) <= most:
                low = middle
            else:
                high = middle - 1
        parts = parts._replace(**{field: low})
        if low < getattr(given, field):
            break
    return parts


def _served(service: Service, parts: Parts) -> Service:
    with_node_port = min(parts.ports, parts.node_ports)
    return service._replace(
        ports=(
            *service.ports[:with_node_port],
            *(port._replace(node_port=0) for port in service.ports[with_node_port : parts.ports]),
        ),
        load_balancer_ips=service.load_balancer_ips[: parts.balancers],
        external_ips=service.external_ips[: parts.external],
    )


def _refused(service: Service, parts: Parts, total: int, most: int) -> tuple[tuple[str, str], ...]:
    """Return field and reason of each kind of parts that do not fit. ``total``: the entries of all parts."""

    def reason(first: str, count: int) -> str:
        others = f" and {count - 1} more are" if count > 1 else " is"
        return (
            f"{first}{others} not served: the ports of the Service, times addresses, endpoints and sources, make "
            f"{total} entries, more than {most}"
        )

    found: list[tuple[str, str]] = []
    ports = len(service.ports)
    if parts.ports < ports:
        found.append((f"spec.ports[{parts.ports}]", reason("this", ports - parts.ports)))
    without = [index for index in range(parts.node_ports, parts.ports) if service.ports[index].node_port]
    if without:
        found.append((f"spec.ports[{without[0]}].nodePort", reason("this", len(without))))
    for field, given, fitting in (
        ("status.loadBalancer.ingress", service.load_balancer_ips, parts.balancers),
        ("spec.externalIPs", service.external_ips, parts.external),
    ):
        if fitting < len(given):
            found.append((field, reason(given[fitting], len(given) - fitting)))
    return tuple(found)
