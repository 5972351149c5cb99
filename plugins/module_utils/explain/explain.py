# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Explain why a destination or a Service is served as it is: its entries, its endpoints, and why these were selected.

The entries are those that the desired table has for the ServicePort, never a second rendering. A running agent answers
from its own tables.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Sequence

from ..base.addresses import family_of
from ..base.errors import KernelError, PreflightError
from ..cluster.model import NamespacedName, Service
from ..cluster.state import ClusterState
from ..configuration.model import KubeProxyConfiguration
from ..convergence.family import FamilyContext
from ..convergence.modes.mode import Mode
from ..convergence.node import NodeView, family_context
from ..convergence.schedulers import with_schedulers
from ..rendering.desired import DesiredTables
from ..rendering.rendering import Rendering
from ..rendering.settings import Arrival, Client, DataplaneSettings
from ..rendering.slot_limit import SlotLimit
from ..resources import Stage
from ..serviceports.info import Endpoint, ServicePortInfo, Sources
from ..serviceports.policy import is_node_local
from ..serviceports.service_ports import cluster_ip_of
from ..serviceports.table import all_service_ports, service_ports_of
from ..serviceports.weights import risen
from .endpoints import reason_of, topology_of
from .frontends import EXTERNAL, INTERNAL, Frontend, answering, frontends_of, sources_by_kind
from .held import OTHER_ENTRIES, Held, Row, why_not_forwarded
from .target import Destination, Target

#: How many of the addresses that a Service loses to others are named.
_MOST_LOST = 20


class ExplainedFamily(NamedTuple):
    """One family: the node's context, the tables that are programmed, and which Services are hashed."""

    context: FamilyContext
    tables: DesiredTables
    slot_limit: SlotLimit


#: The kernel's resources of a family, with their desired tables.
Stages = Callable[[ExplainedFamily], Sequence[Stage]]


def desired_family(state: ClusterState, rendering: Rendering[Any], context: FamilyContext) -> ExplainedFamily:
    """Return a family with the tables that a mode renders from the cluster state, for use without an agent."""
    ports = {service: service_ports_of(state, service, context.node) for service in state.services}
    context = with_schedulers(context, rendering, (info for found in ports.values() for info in found), load=False)
    limit = SlotLimit(rendering)
    limit.count(ports)
    applied = {service: tuple(map(limit.applied, found)) for service, found in ports.items()}
    tables = DesiredTables(rendering, context.settings)
    tables.apply(applied, lambda service: applied[service])
    tables.pop_changes()
    return ExplainedFamily(context, tables, limit)


def explained_families(
    state: ClusterState, configuration: KubeProxyConfiguration, view: NodeView, mode: Mode
) -> list[ExplainedFamily]:
    """Return the families that the node serves, for use without an agent.

    Where another program serves the Services, these are all families of the node: Services are known, but nothing is
    programmed for them. Raises ConfigurationError.
    """
    names = view.families if mode.serves else view.facts.families
    contexts = [family_context(state, configuration, view, name) for name in names]
    return [desired_family(state, mode.rendering, context) for context in contexts]


class EndpointVerdict(NamedTuple):
    """An endpoint, whether it receives traffic to the destination, and why or why not."""

    endpoint: str
    chosen: bool
    reason: str


class Explanation(NamedTuple):
    """One ServicePort and the traffic of one kind to it.

    ``via``: the kinds of addresses the traffic is sent to. ``frontends``: these addresses and ports. ``traffic``:
    internal or external. ``outcome``: what happens to a new connection, by the kernel where that was read.
    ``client_endpoint``: the endpoint that the client reaches, empty if its address does not determine it.
    ``programmed``: its entries in the desired table, in native syntax. ``differences``: how the kernel differs.
    """

    service: str
    port: str
    protocol: str
    family: str
    via: str
    frontends: tuple[str, ...]
    traffic: str
    traffic_policy: str
    topology: str
    outcome: str
    source: str
    affinity_seconds: int
    source_ranges: tuple[str, ...]
    endpoints: tuple[EndpointVerdict, ...]
    client_endpoint: str
    programmed: tuple[str, ...]
    differences: tuple[str, ...]


class Explained(NamedTuple):
    """All ServicePorts that match a destination on a node, in a mode. ``client``: the address of a client, or empty.

    ``left_to_programs``: the Services that match, but are left to programs on the node. ``refused``: what Services that
    match do not get, and why. ``kernel_read``: whether the kernel was compared; if not, ``problem`` may say why.
    """

    destination: str
    node: str
    zone: str
    mode: str
    behaviour: str
    client: str
    left_to_programs: tuple[str, ...]
    refused: tuple[str, ...]
    found: tuple[Explanation, ...]
    kernel_read: bool
    problem: str


def _found(
    state: ClusterState, family: FamilyContext, target: Target
) -> Iterator[tuple[ServicePortInfo, tuple[Frontend, ...]]]:
    """Yield the ServicePorts that match a target, each with frontends for one kind of traffic."""
    settings, node = family.settings, family.node
    if isinstance(target, Destination):
        for port in all_service_ports(state, node).values():
            frontends = answering(port, settings, target)
            if frontends:
                yield port, frontends
        return
    for port in service_ports_of(state, NamespacedName(target.namespace, target.name), node):
        if target.port in ("", port.key.port_name, str(port.port)) and target.protocol in ("", port.protocol):
            every = tuple(frontends_of(port, settings))
            for traffic in (INTERNAL, EXTERNAL):
                frontends = tuple(item for item in every if item.traffic == traffic)
                if frontends:
                    yield port, frontends


def _has_port(service: Service, target: Destination) -> bool:
    """Return whether a Service has the port of a destination."""
    return any(port.port == target.port and target.protocol in ("", port.protocol.lower()) for port in service.ports)


def left_services(state: ClusterState, families: Sequence[ExplainedFamily], target: Target) -> Iterator[str]:
    """Yield the Services of a target that are left to programs on the node."""
    for context, _tables, _limit in families:
        for key, service in state.services.items():
            if isinstance(target, Destination):
                matches = cluster_ip_of(service, context.family) == target.address and _has_port(service, target)
            else:
                matches = key == (target.namespace, target.name)
            if matches and is_node_local(service, context.node.policy):
                yield str(key)


def refused_parts(state: ClusterState, target: Target) -> Iterator[str]:
    """Yield what a Service is refused, or why none is served at a destination that is an address of one."""
    if isinstance(target, Destination):
        for item in state.confined.values():
            if target.address in item.refused and _has_port(item.whole, target):
                yield item.reason_at(target.address)
        return
    key = NamespacedName(target.namespace, target.name)
    yield from (str(part) for part in state.skipped if (part.kind, part.namespace, part.name) == ("Service", *key))
    service = state.services.get(key)
    names = {(port.name, port.protocol) for port in service.ports} if service is not None else set()
    for part in state.slices_of(key).values() if names else ():
        if part.endpoints and names.isdisjoint((port.name, port.protocol) for port in part.ports):
            named = f"EndpointSlice {part.namespace}/{part.name}"
            yield f"{named}: not used, since no port of it has name and protocol of one of its Service"
    if state.lost_claims(key):
        yield from islice((str(conflict) for conflict in state.conflicts if conflict.loser == key), _MOST_LOST)


def _outcome(
    port: ServicePortInfo, chosen: Sequence[Endpoint], rendering: Rendering[Any], settings: DataplaneSettings
) -> str:
    unserved = rendering.refusal(port)
    if unserved:
        return f"not served: {unserved}"
    if chosen:
        if len(chosen) == 1:
            return "sent to its only endpoint"
        by = rendering.hash_input(port, settings)
        return f"sent to one of {len(chosen)} endpoints" + (f", by the client's {by}" if by else "")
    if not port.has_any or not rendering.drops_without_local(settings):
        return f"refused ({rendering.refused_with}): there is no endpoint"
    return "dropped: there is no endpoint on this node, and the traffic policy is Local"


def _source(port: ServicePortInfo, traffic: str, settings: DataplaneSettings, rendering: Rendering[Any]) -> str:
    if rendering.replaces_source:
        return "replaced by the node's (the agent forwards the connection)"
    if traffic == EXTERNAL:
        return "kept" if port.external_local else "replaced by the node's (masqueraded)"
    if settings.masquerade_all:
        return "replaced by the node's (masqueradeAll)"
    if settings.local_traffic is None:
        return rendering.source_without_detector
    return "kept for pods, replaced by the node's for others"


def _source_ranges(port: ServicePortInfo, kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the allowed sources, ``none`` if none is; each after its kind of address if the kinds differ."""
    known = sources_by_kind(port)
    found = {kind: known[kind] for kind in kinds if kind in known}
    if len(set(found.values())) == 1:
        return _shown(next(iter(found.values())))
    return tuple(f"{kind}: {text}" for kind, sources in found.items() for text in _shown(sources))


def _shown(sources: Sources) -> tuple[str, ...]:
    return () if sources is None else sources or ("none",)


def explain(
    state: ClusterState,
    families: Sequence[ExplainedFamily],
    mode: str,
    target: Target,
    *,
    client: str = "",
    stages: Optional[Stages] = None,
) -> Explained:
    """Explain how this node serves a target; ``client``: also which endpoint a client of this address reaches.

    ``stages``: None to show only what is desired, without reading the kernel.
    """
    found: list[Explanation] = []
    node, zone, behaviour, problem = "", "", "", ""
    for family in families:
        context, held = family.context, None
        node, zone, behaviour = context.node.node_name, context.node.zone, context.node.behaviour.name
        for port, frontends in _found(state, context, target):
            if stages is not None and held is None:
                try:
                    held = Held(family.tables, stages(family))
                except (KernelError, PreflightError) as error:
                    stages, problem = None, str(error)
            found.append(_explanation(family.slot_limit.applied(port), frontends, family, client, held))
    return Explained(
        destination=str(target),
        node=node,
        zone=zone,
        mode=mode,
        behaviour=behaviour,
        client=client,
        left_to_programs=tuple(dict.fromkeys(left_services(state, families, target))),
        refused=tuple(refused_parts(state, target)),
        found=tuple(found),
        kernel_read=stages is not None,
        problem=problem,
    )


def _explanation(
    port: ServicePortInfo, frontends: tuple[Frontend, ...], family: ExplainedFamily, client: str, held: Optional[Held]
) -> Explanation:
    context, tables = family.context, family.tables
    rendering, traffic = tables.rendering.serving(port), frontends[0].traffic
    local_only = port.internal_local if traffic == INTERNAL else port.external_local
    chosen = rendering.endpoints(port, traffic == EXTERNAL, context.settings)
    topology = topology_of(port, context.node)
    chosen_texts = {endpoint.text for endpoint in chosen}
    verdicts = tuple(
        EndpointVerdict(
            endpoint.text,
            endpoint.text in chosen_texts,
            reason_of(endpoint, local_only, endpoint.text in chosen_texts, topology),
        )
        for endpoint in (risen(port.endpoints) if rendering.hash_input(port, context.settings) else port.endpoints)
    )
    kinds = dict.fromkeys(frontend.via for frontend in frontends)
    reached = None
    if client and family_of(client) == port.family:
        reached = rendering.endpoint_of(port, chosen, Client(client), context.settings)
    outcome = _outcome(port, chosen, rendering, context.settings)
    rows: list[Row] = []
    if held is not None:
        places = [Arrival(port.protocol.lower(), item.address, item.port) for item in frontends]
        rows = held.rows(port.family, places)
    differences = held.differences(port.family, rows) if held is not None else []
    if differences:
        reason = why_not_forwarded(rows, list(chosen_texts), rendering) if chosen else ""
        outcome = f"{'not forwarded' if reason else 'uncertain'}: {reason or OTHER_ENTRIES} (desired: {outcome})"
    return Explanation(
        service=str(port.key.service),
        port=f"{port.key.port_name or port.port} ({port.port}/{port.protocol})",
        protocol=port.protocol,
        family=port.family,
        via=", ".join(kinds),
        frontends=tuple(map(str, frontends)),
        traffic=traffic,
        traffic_policy="Local" if local_only else "Cluster",
        topology=topology,
        outcome=outcome,
        source=_source(port, traffic, context.settings, rendering),
        affinity_seconds=port.affinity_seconds,
        source_ranges=_source_ranges(port, kinds),
        endpoints=verdicts,
        client_endpoint=reached.text if reached else "",
        programmed=tuple(_programmed(port, frontends, tables)),
        differences=tuple(differences),
    )


def _programmed(port: ServicePortInfo, frontends: tuple[Frontend, ...], tables: DesiredTables) -> Iterator[str]:
    """Yield the lines in the desired table for the frontends of a ServicePort."""
    rendering = tables.rendering
    places = [(frontend.address, frontend.port) for frontend in frontends]
    for entry in tables.programmed(port.key):
        if any(rendering.serves(entry, *place) for place in places):
            yield from rendering.summary(port.family, *entry)


def _values(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields as plain JSON values, with their names in camel case."""
    found = {}
    for name, value in fields.items():
        first, *others = name.split("_")
        found[first + "".join(map(str.capitalize, others))] = list(value) if isinstance(value, tuple) else value
    return found


def explanation_document(explained: Explained) -> dict[str, Any]:
    """Return an explanation as plain JSON values."""
    document = _values({**explained._asdict(), "found": [_values(item._asdict()) for item in explained.found]})
    for item in document["found"]:
        # It is part of the port.
        del item["protocol"]
        item["endpoints"] = [verdict._asdict() for verdict in item["endpoints"]]
    return document
