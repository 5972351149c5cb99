# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Weights of endpoints: which annotations apply, and the share of new connections that each endpoint gets.

The weight of an endpoint is that of its EndpointSlice times that of its Node. With 0 it gets no new connections. In
slow start an endpoint gets only a part of its share.
"""

from __future__ import annotations

from math import gcd
from typing import Mapping, NamedTuple, Sequence

from ..cluster.account import EIGHTHS, MOST_PLACES, PLACES_OF_ENDPOINT
from ..cluster.model import EndpointSlice
from ..cluster.owned_slices import CILIUM_DEFAULT
from ..cluster.state import Rising
from ..configuration.node_proxy import ServicePolicySettings
from .info import Endpoint
from .policy import has_policy


class Weights(NamedTuple):
    """The weights of one Service's EndpointSlices, by name, and of Nodes; 1 if missing."""

    of_slices: Mapping[str, int]
    of_nodes: Mapping[str, int]


EQUAL = Weights({}, {})


def weights_of(
    slices: Sequence[EndpointSlice], namespace: str, of_nodes: Mapping[str, int], settings: ServicePolicySettings
) -> Weights:
    """Return the weights of a Service's endpoints; EQUAL if no annotation that applies sets one.

    Weights of Cilium are relative to its default, so if one applies, the other EndpointSlices get that default.
    """
    of_nodes = of_nodes if settings.node_weights else EQUAL.of_nodes
    of_slices = EQUAL.of_slices
    if has_policy(settings, namespace):
        own = {item.name: item.weight for item in slices if item.weight is not None}
        aliases = {item.name: item.alias_weight for item in slices if item.alias_weight is not None}
        if settings.aliases and aliases.keys() - own.keys():
            of_slices = {item.name: CILIUM_DEFAULT for item in slices}
            of_slices.update(aliases)
            of_slices.update(own)
        else:
            of_slices = own
    return Weights(of_slices, of_nodes) if of_slices or of_nodes else EQUAL


def with_rise(endpoints: tuple[Endpoint, ...], rising: Rising) -> tuple[Endpoint, ...]:
    """Return the endpoints of a ServicePort with those marked whose share still rises."""
    return tuple([item._replace(rising=rising.get((item.ip, item.port), EIGHTHS)) for item in endpoints])


def risen(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Return the endpoints of a ServicePort without slow start: each has its whole share."""
    return tuple([item._replace(rising=EIGHTHS) for item in endpoints])


def differ(endpoints: Sequence[Endpoint]) -> bool:
    """Return whether endpoints have different shares."""
    return len({endpoint.weight * endpoint.rising for endpoint in endpoints}) > 1


def shares(endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
    """Return the shares of endpoints in new connections, as the smallest integers; none of the weights is 0."""
    weights = [endpoint.weight * endpoint.rising for endpoint in endpoints]
    divisor = gcd(*weights)
    return tuple([weight // divisor for weight in weights])


def slots(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Return a list in which each endpoint has places in proportion to its weight, spread evenly over the list.

    Each has at least one. Shares that need more than MOST_PLACES are rounded.
    """
    wanted = shares(endpoints)
    most = max(MOST_PLACES, PLACES_OF_ENDPOINT * len(endpoints))
    total = sum(wanted)
    if total > most:
        wanted = tuple([max(1, share * most // total) for share in wanted])
    places: list[tuple[float, int]] = []
    for index, share in enumerate(wanted):
        places += [((place + 0.5) / share, index) for place in range(share)]
    return tuple([endpoints[index] for _position, index in sorted(places)])
