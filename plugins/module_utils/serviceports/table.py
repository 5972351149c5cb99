# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ServicePorts of a Service, and of all Services, on this node, with the endpoints that its EndpointSlices have."""

from __future__ import annotations

from typing import Collection, Iterable, Mapping, NamedTuple, Optional

from ..base.addresses import IPV6
from ..cluster.account import EIGHTHS
from ..cluster.claims import Claim, LostClaims
from ..cluster.model import EndpointSlice, Failing, NamespacedName, Service, ServicePort
from ..cluster.state import ClusterState
from ..configuration.behaviour import KUBE_PROXY, Behaviour
from ..configuration.node_proxy import OutsideHost, ServicePolicySettings
from .info import Endpoint, ServicePortInfo, ServicePortName
from .policy import is_node_local
from .selection import Selection, select
from .service_ports import DEFAULT_POLICY, PortPolicy, ServiceAttributes, cluster_ip_of, port_policy, service_attributes
from .weights import EQUAL, Weights, differ, weights_of, with_rise

PortKey = tuple[str, str]
"""Name and protocol of a port: endpoints belong to a ServicePort by these, never by the port number."""

_new = tuple.__new__


def expand(
    slices: Iterable[EndpointSlice],
    family: str,
    node_name: str,
    weights: Weights = EQUAL,
    served: Optional[Collection[PortKey]] = None,
) -> dict[PortKey, tuple[Endpoint, ...]]:
    """Return the endpoints of one Service by port name and protocol, each list sorted by the text ``ip:port``.

    Slices of the other family are ignored. Of several endpoints with one ``ip:port`` the last one that is not
    terminating wins, so that a running pod takes precedence over a terminating one that had its address. ``node_name``
    decides which endpoints are local; with an empty name none is. ``weights`` are those of the Service. ``served``: the
    only ports of interest, None for all.
    """
    tables: dict[PortKey, dict[str, Endpoint]] = {}
    for item in slices:
        if item.family != family:
            continue
        for port in item.ports:
            key = port.name, port.protocol
            if served is not None and key not in served:
                continue
            table = tables.setdefault(key, {})
            _add(table, item, port.port, node_name, weights)
    return {key: tuple([table[text] for text in sorted(table)]) for key, table in tables.items() if table}


def endpoint_counts(
    slices: Iterable[EndpointSlice], family: str, served: Optional[Collection[PortKey]] = None
) -> dict[PortKey, int]:
    """Return how many endpoints :func:`expand` returns for each port name and protocol."""
    found: dict[PortKey, set[tuple[str, int]]] = {}
    for item in slices:
        if item.family == family and item.endpoints:
            for port in item.ports:
                key = port.name, port.protocol
                if served is None or key in served:
                    places = found.setdefault(key, set())
                    places.update([(endpoint[0], port.port) for endpoint in item.endpoints])
    return {key: len(places) for key, places in found.items()}


def _add(table: dict[str, Endpoint], item: EndpointSlice, port: int, node_name: str, weights: Weights) -> None:
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


def mark_failing(endpoints: tuple[Endpoint, ...], failing: Failing) -> tuple[Endpoint, ...]:
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


def slices_in_order(slices: Mapping[str, EndpointSlice], behaviour: Behaviour = KUBE_PROXY) -> list[EndpointSlice]:
    """Return slices in the order in which one prevails over those before it: by name, or first by time if corrected."""
    if len(slices) == 1:
        return list(slices.values())
    if behaviour.later_slice_decides:
        # The Z at the end is later than the point of a fraction.
        return sorted(slices.values(), key=lambda item: (item.trigger_time.rstrip("Z"), item.name))
    return [slices[name] for name in sorted(slices)]


INSIDE = OutsideHost()


class NodeContext(NamedTuple):
    """The node for which ServicePorts are computed.

    ``family``: IPv4 or IPv6. ``node_name``: as in Node objects (see ``node.node_name``). ``zone``: the node's zone or
    empty. ``allow_external_ips``: the feature gate AllowServiceExternalIPs. ``behaviour``: which of kube-proxy's
    defects are corrected. ``policy``: whose annotations apply, and which sources may use node ports. ``outside``:
    whether the host is outside the cluster.
    """

    family: str
    node_name: str
    zone: str = ""
    allow_external_ips: bool = True
    behaviour: Behaviour = KUBE_PROXY
    policy: ServicePolicySettings = DEFAULT_POLICY
    outside: OutsideHost = INSIDE


def is_served(service: Service, context: NodeContext) -> bool:
    """Return whether the node serves a Service: neither left to a program nor excluded by outsideHost."""
    if is_node_local(service, context.policy):
        return False
    return not context.outside.enabled or context.outside.serves(service)


def service_ports_of(
    state: ClusterState, service_key: NamespacedName, context: NodeContext
) -> tuple[ServicePortInfo, ...]:
    """Return the ServicePorts of one Service, sorted by key; empty if there is no such Service in the family.

    It is also empty for a Service that is left to a program on the node.

    An address or node port that another Service has claimed (see ``cluster.claims``) is omitted; so is a port whose
    cluster IP another Service has claimed.
    """
    service = state.services.get(service_key)
    if service is None or not service.ports or not cluster_ip_of(service, context.family):
        return ()
    if not is_served(service, context):
        return ()
    if context.outside.enabled:
        service = _cluster_ip_only(service)
    attributes = service_attributes(
        service, context.family, context.allow_external_ips, context.behaviour, context.policy
    )
    node_name, zone = context.node_name, context.zone
    slices = slices_in_order(state.slices_of(service_key), context.behaviour)
    weights = weights_of(slices, service.namespace, state.node_weights, context.policy)
    by_port = expand(slices, context.family, node_name, weights, _served_ports(service, slices))
    lost, failing = state.lost_claims(service_key), state.failing(service_key)
    rising, reserved = state.rising(service_key), state.reserved_addresses(service)
    has_weights = weights is not EQUAL or bool(rising)
    service_ports: list[ServicePortInfo] = []
    for port in service.ports:
        claimed = _without_lost(attributes, port, context.family, lost) if lost else (attributes, port)
        if claimed is None:
            continue
        endpoints = by_port.get((port.name, port.protocol), ())
        if failing is not None and endpoints:
            endpoints = mark_failing(endpoints, failing)
        if rising:
            endpoints = with_rise(endpoints, rising)
        policy = port_policy(attributes, port)
        chosen = select(endpoints, policy.uses_cluster_endpoints, policy.uses_local_endpoints, node_name, zone)
        info = _info(
            service,
            *claimed,
            policy,
            family=context.family,
            endpoints=endpoints,
            chosen=chosen,
            weighted=has_weights and differ(chosen.reachable),
            reserved=reserved,
        )
        service_ports.append(info)
    if len(service_ports) > 1:
        service_ports.sort(key=lambda info: info.key)
    return tuple(service_ports)


def _info(
    service: Service,
    attributes: ServiceAttributes,
    port: ServicePort,
    policy: PortPolicy,
    *,
    family: str,
    endpoints: tuple[Endpoint, ...],
    chosen: Selection,
    weighted: bool,
    reserved: frozenset[str],
) -> ServicePortInfo:
    external = (*attributes.external_ips, *attributes.load_balancer_ips)
    return ServicePortInfo(
        key=ServicePortName(service.namespace, service.name, port.name, port.protocol),
        family=family,
        cluster_ip=attributes.cluster_ip,
        port=port.port,
        node_port=port.node_port,
        external_ips=attributes.external_ips,
        load_balancer_ips=attributes.load_balancer_ips,
        source_ranges=attributes.source_ranges,
        affinity_seconds=service.affinity_seconds,
        internal_local=attributes.internal_local,
        external_local=attributes.external_local,
        externally_accessible=policy.externally_accessible,
        uses_cluster_endpoints=policy.uses_cluster_endpoints,
        uses_local_endpoints=policy.uses_local_endpoints,
        health_check_node_port=attributes.health_check_node_port,
        endpoints=endpoints,
        cluster=chosen.cluster,
        local=chosen.local,
        reachable=chosen.reachable,
        has_any=chosen.has_any,
        external_ip_sources=attributes.external_ip_sources,
        node_port_sources=attributes.node_port_sources,
        policy=attributes.policy,
        weighted=weighted,
        created=service.created,
        unbound=tuple([address for address in external if address in reserved]),
    )


def _served_ports(service: Service, slices: Iterable[EndpointSlice]) -> Optional[set[PortKey]]:
    """Return the ports of a Service if an EndpointSlice has more, so that only these are expanded; otherwise None."""
    ports = len(service.ports)
    for item in slices:
        if len(item.ports) > ports:
            return {(port.name, port.protocol) for port in service.ports}
    return None


def _cluster_ip_only(service: Service) -> Service:
    """Return a Service without node ports, external addresses and health checks, which serve clients elsewhere."""
    return service._replace(
        type="ClusterIP",
        ports=tuple([port._replace(node_port=0) for port in service.ports]),
        external_ips=(),
        has_external_ips=False,
        load_balancer_ips=(),
        external_traffic_policy_local=False,
        health_check_node_port=0,
    )


def _without_lost(
    attributes: ServiceAttributes, port: ServicePort, family: str, lost: LostClaims
) -> Optional[tuple[ServiceAttributes, ServicePort]]:
    """Return the attributes and the port without the addresses and the node port that other Services have claimed.

    None if the cluster IP is one of them.
    """
    number, protocol = port.port, port.protocol
    if Claim(attributes.cluster_ip, number, protocol) in lost:
        return None

    def kept(addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([address for address in addresses if Claim(address, number, protocol) not in lost])

    attributes = attributes._replace(
        external_ips=kept(attributes.external_ips), load_balancer_ips=kept(attributes.load_balancer_ips)
    )
    return attributes, port._replace(node_port=0) if Claim(family, port.node_port, protocol) in lost else port


def count_endpoints(
    state: ClusterState,
    service_key: NamespacedName,
    family: str,
    outside: OutsideHost = INSIDE,
    policy: ServicePolicySettings = DEFAULT_POLICY,
) -> int:
    """Return the number of endpoints of all ports of a Service, whatever their conditions.

    It is the sum over the result of :func:`service_ports_of`, at a fraction of the cost.
    """
    service = state.services.get(service_key)
    cluster_ip = cluster_ip_of(service, family) if service is not None else ""
    if service is None or not cluster_ip or not outside.serves(service) or is_node_local(service, policy):
        return 0
    slices = state.slices_of(service_key).values()
    counts = endpoint_counts(slices, family, _served_ports(service, slices))
    lost = state.lost_claims(service_key)
    return sum(
        counts.get((port.name, port.protocol), 0)
        for port in service.ports
        if not lost or Claim(cluster_ip, port.port, port.protocol) not in lost
    )


def all_service_ports(state: ClusterState, context: NodeContext) -> dict[ServicePortName, ServicePortInfo]:
    """Return the ServicePorts of all Services, sorted by key."""
    return {info.key: info for key in sorted(state.services) for info in service_ports_of(state, key, context)}
