# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The model's decision about one flow: whether it is forwarded, to which endpoints, and from which address.

A flow is a client and a destination. The rendering of the mode makes each decision; nothing is read from the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

from ..base.addresses import is_loopback, networks_of, parse_network
from ..cluster.state import ClusterState
from ..convergence.family import FamilyContext
from ..kernel.rtnetlink.routes import Way
from ..rendering.rendering import Rendering
from ..rendering.settings import Arrival, Client, DataplaneSettings, Masquerade
from ..serviceports.info import Endpoint, ServicePortInfo, Sources
from ..serviceports.service_ports import cluster_ip_of
from ..serviceports.table import all_service_ports
from .endpoints import reason_of, topology_of
from .explain import ExplainedFamily, left_services, refused_parts
from .frontends import EXTERNAL, NODE_PORT, Frontend, answering, refused_at_loopback, sources_by_kind
from .target import Destination

FORWARDED, REFUSED, DROPPED, UNSERVED, UNCHANGED, LEFT, UNCERTAIN = (
    "forwarded",
    "refused",
    "dropped",
    "not served",
    "unchanged",
    "left",
    "uncertain",
)

_UNKNOWN = "no Service has this destination; the packet is not changed"


class Origin(NamedTuple):
    """The client, and the reason for its classification."""

    client: Client
    reason: str


class Candidate(NamedTuple):
    """An endpoint of the ServicePort. ``probability``: of being chosen; None if the mode does not fix it."""

    endpoint: str
    chosen: bool
    probability: Optional[float]
    reason: str


class Decision(NamedTuple):
    """The decision about a flow; the fields about a ServicePort are empty if none has the destination.

    ``certain``: the only endpoint that can be reached, or empty; ``certain_by``: the reason.
    """

    verdict: str
    reason: str
    frontend: Optional[Frontend] = None
    port: Optional[ServicePortInfo] = None
    selection_text: str = ""
    masquerade: Masquerade = Masquerade(False, "")
    candidates: tuple[Candidate, ...] = ()
    sources: Sources = None
    certain: str = ""
    certain_by: str = ""

    @property
    def chosen(self) -> list[str]:
        """Return the endpoints that can be reached."""
        return [item.endpoint for item in self.candidates if item.chosen]


def origin_of(address: str, port: int, settings: DataplaneSettings, way: Optional[Way]) -> Origin:
    """Return how this node classifies a client. ``way``: to its address; None if it cannot be read."""
    own = {item for _interface, item in settings.node_addresses}
    of_node = address in own if way is None else way.local
    of_node = of_node or is_loopback(address)
    detector = settings.local_traffic
    if detector is None:
        reason = "this node itself" if of_node else "not this node; pods are unknown without a detectLocalMode"
        return Origin(Client(address, port, of_node), reason)
    network = parse_network(detector.value)
    if network is not None and detector.kind == "cidr":
        is_pod = network.contains(address)
        why = f"{'in' if is_pod else 'not in'} {network}"
    elif way is None or of_node:
        is_pod, why = False, f"does not arrive through {detector.value}"
    else:
        is_pod = way.interface == detector.value
        if detector.kind == "prefix":
            is_pod = way.interface.startswith(detector.value)
        why = f"its route leads through {way.interface or 'no interface'}, the detector is {detector.value}"
    what = "a pod" if is_pod else "this node itself" if of_node else "neither a pod nor this node"
    return Origin(Client(address, port, of_node, is_pod), f"{what} (detectLocalMode: {why})")


def decide(state: ClusterState, family: ExplainedFamily, client: Client, destination: Destination) -> Decision:
    """Return the decision about a flow to an address and port of a protocol."""
    context = family.context
    found = _frontend(state, context, destination)
    if found is None:
        return _without_service(state, family, destination)
    port, frontend = family.slot_limit.applied(found[0]), found[1]
    rendering, settings = family.tables.rendering.serving(port), context.settings
    external = frontend.traffic == EXTERNAL
    refused = refused_at_loopback(frontend, port, settings)
    chosen = () if rendering.refusal(port) or refused else rendering.endpoints_for(port, external, client, settings)
    sources = sources_by_kind(port).get(frontend.via)
    verdict, reason = _verdict(rendering, port, settings, chosen, (client, frontend, sources))
    if refused:
        verdict, reason = REFUSED, refused
    candidates = tuple(_candidates(port, chosen, context, rendering, external))
    certain, certain_by = "", ""
    if verdict == FORWARDED:
        certain, certain_by = _certain(rendering, port, chosen, client, settings)
    return Decision(
        verdict=verdict,
        reason=reason,
        frontend=frontend,
        port=port,
        selection_text=rendering.selection_text(port, settings) if len(chosen) > 1 else "",
        masquerade=rendering.masquerade(port, external, client, settings),
        candidates=candidates,
        sources=sources,
        certain=certain,
        certain_by=certain_by,
    )


def arrival_of(decision: Decision, destination: Destination) -> Arrival:
    """Return where packets of a flow arrive."""
    node_port = decision.frontend is not None and decision.frontend.via == NODE_PORT
    return Arrival(destination.protocol, destination.address, destination.port, node_port)


def _frontend(
    state: ClusterState, context: FamilyContext, destination: Destination
) -> Optional[tuple[ServicePortInfo, Frontend]]:
    ports = all_service_ports(state, context.node)
    for key in sorted(ports):
        for frontend in answering(ports[key], context.settings, destination):
            return ports[key], frontend
    return None


def _without_service(state: ClusterState, family: ExplainedFamily, destination: Destination) -> Decision:
    left = list(left_services(state, [family], destination))
    if left:
        return Decision(LEFT, f"left to a program on this node: Service {', '.join(left)}")
    if family.tables.rendering.closes_cluster_ips:
        for key, service in sorted(state.services.items()):
            if cluster_ip_of(service, family.context.family) == destination.address:
                return Decision(REFUSED, f"Service {key} has this cluster IP, but not this port")
    refused = next(refused_parts(state, destination), "")
    return Decision(UNCHANGED, f"{refused}; the packet is not changed" if refused else _UNKNOWN)


def _is_allowed(client: Client, frontend: Frontend, sources: Sources, settings: DataplaneSettings) -> bool:
    """Return whether a source is allowed. If the node is, so are its own external addresses and loopback."""
    networks = networks_of(sources or ())
    if sources is None or any(network.contains(client.address) for network in networks):
        return True
    own = client.address == frontend.address or is_loopback(client.address)
    return own and any(network.contains(settings.node_ip) for network in networks)


def _verdict(
    rendering: Rendering[Any],
    port: ServicePortInfo,
    settings: DataplaneSettings,
    chosen: Sequence[Endpoint],
    source: tuple[Client, Frontend, Sources],
) -> tuple[str, str]:
    client, frontend, sources = source
    unserved = rendering.refusal(port)
    if unserved:
        return UNSERVED, unserved
    allowed = _is_allowed(client, frontend, sources, settings)
    if not allowed and (chosen or rendering.checks_sources_first(settings)):
        return REFUSED if rendering.forwards else DROPPED, f"{client.address} is not among the allowed sources"
    if chosen:
        return FORWARDED, ""
    if not port.has_any or not rendering.drops_without_local(settings):
        return REFUSED, f"there is no endpoint ({rendering.refused_with})"
    return DROPPED, "there is no endpoint on this node, and the traffic policy is Local"


def _candidates(
    port: ServicePortInfo, chosen: Sequence[Endpoint], context: FamilyContext, rendering: Rendering[Any], external: bool
) -> list[Candidate]:
    topology = topology_of(port, context.node)
    # Where the inside of the node reaches all endpoints despite policy Local, the policy is never the reason.
    local_only = (port.external_local if external else port.internal_local) and tuple(chosen) != port.cluster
    shares = rendering.shares_of(port, chosen, context.settings) if chosen else ()
    total = sum(shares)
    share_of = {endpoint.text: share / total for endpoint, share in zip(chosen, shares)} if total else {}
    texts = {endpoint.text for endpoint in chosen}
    return [
        Candidate(
            endpoint.text,
            endpoint.text in texts,
            share_of.get(endpoint.text, 1.0 if len(texts) == 1 else None) if endpoint.text in texts else 0.0,
            reason_of(endpoint, local_only, endpoint.text in texts, topology),
        )
        for endpoint in port.endpoints
    ]


def _certain(
    rendering: Rendering[Any],
    port: ServicePortInfo,
    chosen: Sequence[Endpoint],
    client: Client,
    settings: DataplaneSettings,
) -> tuple[str, str]:
    if len(chosen) == 1:
        return chosen[0].text, "it is the only one"
    reached = rendering.endpoint_of(port, chosen, client, settings)
    if reached is None:
        return "", ""
    return reached.text, f"by the client's {rendering.hash_input(port, settings)}"
