# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a destination is served the way it is: Service, rules or virtual server, endpoints, and why these."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from ..addresses import address_and_port, canonical_address, family_of
from ..cluster.state import ClusterState
from ..configuration.model import IPTABLES, IPVS
from ..errors import ConfigurationError
from ..rendering.iptables.services import entries_of as iptables_entries
from ..rendering.iptables.tables import ChainKey
from ..rendering.ipvs import model as ipvs
from ..rendering.ipvs.entries import entries_of as ipvs_entries
from ..rendering.ipvs.entries import node_facts
from ..rendering.ipvs.text import real_server_line, virtual_server_line
from ..rendering.nftables.tables import entries_of as nftables_entries
from ..rendering.nftables.text import describe as describe_nftables
from ..rendering.settings import DataplaneSettings
from ..serviceports.routes import Endpoint, ServicePortRoute
from ..serviceports.selection import NO_TOPOLOGY, SAME_NODE, topology_mode
from ..serviceports.table import RoutingContext, all_routes

PROTOCOLS = ("tcp", "udp", "sctp")
INTERNAL, EXTERNAL = "internal", "external"

FamilyContext = Tuple[DataplaneSettings, RoutingContext]


class Destination(NamedTuple):
    """An address, a port and a protocol (tcp, udp or sctp; empty for any)."""

    address: str
    port: int
    protocol: str

    def __str__(self) -> str:
        text = address_and_port(self.address, self.port)
        return f"{text}/{self.protocol}" if self.protocol else text


class EndpointVerdict(NamedTuple):
    """An endpoint, whether it receives traffic to the destination, and why or why not."""

    endpoint: str
    chosen: bool
    reason: str


class Explanation(NamedTuple):
    """One Service port that answers for the destination.

    ``via``: which of its addresses the destination is. ``traffic``: internal or external. ``policy``: the traffic
    policy in effect. ``outcome``: what happens to a new connection. ``programmed``: the mode's own lines.
    """

    service: str
    port: str
    protocol: str
    family: str
    via: str
    traffic: str
    policy: str
    topology: str
    outcome: str
    source: str
    affinity_seconds: int
    source_ranges: Tuple[str, ...]
    endpoints: Tuple[EndpointVerdict, ...]
    programmed: Tuple[str, ...]


class Explained(NamedTuple):
    """All that answers for a destination on a node, in a mode."""

    destination: Destination
    node: str
    zone: str
    mode: str
    found: Tuple[Explanation, ...]


def parse_destination(text: str) -> Destination:
    """``10.96.0.10:53/udp``, ``[fd00::1]:80``. Raises ConfigurationError."""
    place, _slash, protocol = text.strip().partition("/")
    host, _colon, port = place.rpartition(":")
    address = canonical_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    if address is None or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigurationError(f"{text!r} is not ADDRESS:PORT[/PROTOCOL], as in 10.96.0.10:53/udp or [fd00::1]:80")
    if protocol and protocol.lower() not in PROTOCOLS:
        raise ConfigurationError(f"{text!r}: the protocol must be one of {', '.join(PROTOCOLS)}")
    return Destination(address, int(port), protocol.lower())


def _via(route: ServicePortRoute, settings: DataplaneSettings, destination: Destination) -> str:
    if destination.protocol and destination.protocol != route.protocol:
        return ""
    address, port = destination.address, destination.port
    if port == route.port:
        if address == route.cluster_ip:
            return "cluster IP"
        if address in route.external_ips:
            return "external IP"
        if address in route.load_balancer_ips:
            return "load balancer IP"
    if port == route.node_port and port:
        if address in settings.node_port_addresses:
            return "node port"
        if settings.localhost_node_ports and address.startswith("127."):
            return "node port"
    return ""


def _topology(route: ServicePortRoute, context: RoutingContext) -> str:
    if not route.uses_cluster_endpoints:
        return NO_TOPOLOGY
    return topology_mode(route.endpoints, context.node_name, context.zone)


def _reason(
    route: ServicePortRoute, endpoint: Endpoint, local_only: bool, chosen: bool, topology: str
) -> str:
    state = _state(endpoint)
    if chosen:
        if not endpoint.ready:
            return f"{state}; taken because no endpoint is ready"
        if local_only:
            return f"{state}, on this node"
        if topology != NO_TOPOLOGY:
            return f"{state}, hinted for this {'node' if topology == SAME_NODE else 'zone'}"
        return state
    if not endpoint.ready and not (endpoint.serving and endpoint.terminating):
        return state
    if local_only and not endpoint.is_local:
        return f"{state}, but not on this node and the traffic policy is Local"
    if not endpoint.ready:
        return f"{state}; only taken when no endpoint is ready"
    if topology != NO_TOPOLOGY:
        hints = endpoint.node_hints if topology == SAME_NODE else endpoint.zone_hints
        return f"{state}, but hinted for {', '.join(hints)}"
    return state


def _state(endpoint: Endpoint) -> str:
    if endpoint.terminating:
        return "terminating, still serving" if endpoint.serving else "terminating"
    return "ready" if endpoint.ready else "not ready"


def _outcome(route: ServicePortRoute, chosen: Sequence[Endpoint], mode: str) -> str:
    if chosen:
        many = f"one of {len(chosen)} endpoints" if len(chosen) > 1 else "its only endpoint"
        return f"sent to {many}"
    if not route.has_any or mode == IPVS:
        return "refused (ICMP port unreachable): there is no endpoint"
    return "dropped: there is no endpoint on this node, and the traffic policy is Local"


def _source(route: ServicePortRoute, traffic: str, settings: DataplaneSettings, mode: str) -> str:
    if traffic == EXTERNAL:
        return "kept" if route.external_local else "replaced by the node's (masqueraded)"
    if settings.masquerade_all:
        return "replaced by the node's (masqueradeAll)"
    if settings.local_traffic is None and mode != IPVS:
        return "kept (it cannot be told which traffic is of this node's pods)"
    return "kept for pods, replaced by the node's for others"


def explain(
    state: ClusterState, families: Sequence[FamilyContext], mode: str, destination: Destination
) -> Explained:
    """What answers for the destination on this node. ``families``: settings and routing context of each."""
    family = family_of(destination.address)
    found: List[Explanation] = []
    node, zone = "", ""
    for settings, context in families:
        node, zone = context.node_name, context.zone
        if settings.family != family:
            continue
        for route in all_routes(state, context).values():
            via = _via(route, settings, destination)
            if via:
                found.append(_explanation(route, via, settings, context, mode, destination))
    return Explained(destination, node, zone, mode, tuple(found))


def _explanation(
    route: ServicePortRoute,
    via: str,
    settings: DataplaneSettings,
    context: RoutingContext,
    mode: str,
    destination: Destination,
) -> Explanation:
    traffic = INTERNAL if via == "cluster IP" else EXTERNAL
    local_only = route.internal_local if traffic == INTERNAL else route.external_local
    chosen: Sequence[Endpoint] = route.local if local_only else route.cluster
    if mode == IPVS and local_only and not route.local:
        # An IPVS virtual server takes all endpoints rather than none (kube-proxy 1.36).
        chosen = route.cluster
    topology = _topology(route, context)
    chosen_texts = {endpoint.text for endpoint in chosen}
    verdicts = tuple(
        EndpointVerdict(
            endpoint.text,
            endpoint.text in chosen_texts,
            _reason(route, endpoint, local_only, endpoint.text in chosen_texts, topology),
        )
        for endpoint in route.endpoints
    )
    return Explanation(
        service=str(route.key.service),
        port=f"{route.key.port_name or route.port} ({route.port}/{route.protocol})",
        protocol=route.protocol,
        family=route.family,
        via=via,
        traffic=traffic,
        policy="Local" if local_only else "Cluster",
        topology=topology,
        outcome=_outcome(route, chosen, mode),
        source=_source(route, traffic, settings, mode),
        affinity_seconds=route.affinity_seconds,
        source_ranges=route.source_ranges if via == "load balancer IP" else (),
        endpoints=verdicts,
        programmed=tuple(_programmed(route, settings, mode, destination)),
    )


def _programmed(
    route: ServicePortRoute, settings: DataplaneSettings, mode: str, destination: Destination
) -> List[str]:
    """The lines that the mode programs for the Service port: for ipvs those of the destination alone."""
    lines: List[str] = []
    if mode == IPTABLES:
        for entry in iptables_entries(route, settings):
            key = entry.key if isinstance(entry.key, ChainKey) else entry.key.chain
            lines += [f"-t {key.table} -A {key.chain} {rule}" for rule in entry.rules]
    elif mode == IPVS:
        server = ipvs.VirtualServerKey(route.protocol, destination.address, destination.port)
        for _table, row, value in ipvs_entries(route, node_facts(settings)):
            if row == server:
                lines.append(virtual_server_line(server, value))
            elif isinstance(row, ipvs.RealServerKey) and row.server == server:
                lines.append(real_server_line(row, value))
    else:
        for _table, row, value in nftables_entries(route, settings):
            if isinstance(row, tuple) and row[0] in ("element", "list"):
                lines += describe_nftables(settings.family, row, value)
    return lines


def explanation_document(explained: Explained) -> Dict[str, Any]:
    """An explanation as plain JSON values."""
    return {
        "destination": str(explained.destination),
        "node": explained.node,
        "zone": explained.zone,
        "mode": explained.mode,
        "found": [
            {
                "service": item.service,
                "port": item.port,
                "family": item.family,
                "via": item.via,
                "traffic": item.traffic,
                "trafficPolicy": item.policy,
                "topology": item.topology,
                "outcome": item.outcome,
                "source": item.source,
                "affinitySeconds": item.affinity_seconds,
                "sourceRanges": list(item.source_ranges),
                "endpoints": [verdict._asdict() for verdict in item.endpoints],
                "programmed": list(item.programmed),
            }
            for item in explained.found
        ],
    }
