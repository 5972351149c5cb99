# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Merge the EndpointSlices of one Service into the endpoints of each of its ports."""

from __future__ import annotations

from typing import Collection, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from ..base.addresses import IPV6
from ..cluster.account import EIGHTHS
from ..cluster.model import EndpointSlice, Failing
from .info import Endpoint
from .weights import EQUAL, Weights

PortKey = Tuple[str, str]
"""Name and protocol of a port: endpoints belong to a ServicePort by these, never by the port number."""

_new = tuple.__new__


def expand(
    slices: Iterable[EndpointSlice],
    family: str,
    node_name: str,
    weights: Weights = EQUAL,
    served: Optional[Collection[PortKey]] = None,
) -> Dict[PortKey, Tuple[Endpoint, ...]]:
    """Return the endpoints of one Service by port name and protocol, each list sorted by the text ``ip:port``.

    Slices of the other family are ignored. Of several endpoints with one ``ip:port`` the last one that is not
    terminating wins, so that a running pod takes precedence over a terminating one that had its address. ``node_name``
    decides which endpoints are local; with an empty name none is. ``weights`` are those of the Service. ``served``: the
    only ports of interest, None for all.
    """
    tables: Dict[PortKey, Dict[str, Endpoint]] = {}
    for item in slices:
        if item.family != family:
            continue
        for port in item.ports:
            key = port.name, port.protocol
            if served is not None and key not in served:
                continue
            table = tables.setdefault(key, {})
            _add(table, item, port.port, node_name, weights)
    return {key: _sorted(table) for key, table in tables.items() if table}


def endpoint_counts(
    slices: Iterable[EndpointSlice], family: str, served: Optional[Collection[PortKey]] = None
) -> Dict[PortKey, int]:
    """Return how many endpoints :func:`expand` returns for each port name and protocol."""
    found: Dict[PortKey, Set[Tuple[str, int]]] = {}
    for item in slices:
        if item.family == family and item.endpoints:
            for port in item.ports:
                key = port.name, port.protocol
                if served is None or key in served:
                    places = found.setdefault(key, set())
                    places.update([(endpoint[0], port.port) for endpoint in item.endpoints])
    return {key: len(places) for key, places in found.items()}


def _add(table: Dict[str, Endpoint], item: EndpointSlice, port: int, node_name: str, weights: Weights) -> None:
    before, after = ("[", f"]:{port}") if item.family == IPV6 else ("", f":{port}")
    of_nodes, weight = weights.of_nodes, weights.of_slices.get(item.name, 1)
    for address, on_node, ready, serving, terminating, zone_hints, node_hints in item.endpoints:
        text = before + address + after
        if terminating and text in table:
            continue
        is_local = on_node == node_name and node_name != ""
        share = 1 if weights is EQUAL else weight * of_nodes.get(on_node, 1)
        # All fields in their order; Endpoint() takes twice as long.
        fields = (address, port, is_local, ready, serving, terminating, zone_hints, node_hints, "", share, EIGHTHS)
        table[text] = _new(Endpoint, fields)


def mark_failing(endpoints: Tuple[Endpoint, ...], failing: Failing) -> Tuple[Endpoint, ...]:
    """Return the endpoints of a ServicePort with those marked that fail their health checks.

    They are neither ready nor serving, so that no traffic is sent to them. If at most ``panic_threshold`` of the ready
    endpoints pass, none is marked: then the checks are more likely to be wrong than that many endpoints, and an
    endpoint that may fail is better than none. Those of weight 0, which get no traffic anyway, do not count.
    """
    reasons = failing.reasons
    failed = {
        endpoint: reasons.get((endpoint.ip, endpoint.port)) or reasons.get((endpoint.ip, 0), "")
        for endpoint in endpoints
    }
    ready = [endpoint for endpoint in endpoints if endpoint.ready and endpoint.weight]
    passing = sum(not failed[endpoint] for endpoint in ready)
    panic = passing * 100 <= len(ready) * failing.panic_threshold
    return tuple(
        endpoint
        if not failed[endpoint]
        else endpoint._replace(failed=failed[endpoint])
        if panic
        else endpoint._replace(ready=False, serving=False, failed=failed[endpoint])
        for endpoint in endpoints
    )


def _sorted(table: Dict[str, Endpoint]) -> Tuple[Endpoint, ...]:
    if len(table) == 1:
        return tuple(table.values())
    return tuple([table[text] for text in sorted(table)])


def slices_in_order(slices: Mapping[str, EndpointSlice]) -> List[EndpointSlice]:
    """Return slices sorted by name, which makes the outcome of address conflicts between them deterministic."""
    if len(slices) == 1:
        return list(slices.values())
    return [slices[name] for name in sorted(slices)]
