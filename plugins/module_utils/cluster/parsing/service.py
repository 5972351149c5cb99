# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of raw Services (core/v1) and EndpointSlices (discovery.k8s.io/v1)."""

from __future__ import annotations

import re
from typing import Any, Optional

from ...base.addresses import IPV4, IPV6, canonical_address, canonical_network, family_of
from ..fields import (
    LINK_LOCAL,
    LOOPBACK,
    Invalid,
    address,
    dns_label,
    dns_subdomain,
    elements,
    flag,
    integer,
    interned,
    ip_family,
    leniently,
    mapping,
    optional_dns_label,
    protocol,
    sequence,
    sharing,
    shown,
    special_use,
    text,
)
from ..model import NO_POLICY, EndpointSlice, Service, ServicePort, SliceEndpoint, SlicePort
from .health_check import parse_check
from .service_policy import parse_aliases, parse_service_policy
from .weight import CILIUM_MOST, CILIUM_WEIGHT, WEIGHT, parse_weight

SERVICE_PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
OUTSIDE_HOSTS_LABEL = "kubenode.proxy/outside-hosts"
NODE_LOCAL_LABEL = "kubenode.proxy/node-local"
#: Labels defined by the collection.
LABELS = (OUTSIDE_HOSTS_LABEL, NODE_LOCAL_LABEL)
DEFAULT_AFFINITY_SECONDS = 10800
MAXIMUM_AFFINITY_SECONDS = 86400
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
SERVICE_NAME_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"
TRIGGER_TIME_ANNOTATION = "endpoints.kubernetes.io/last-change-trigger-time"
_NO_CONDITIONS: dict[str, Any] = {}
_new = tuple.__new__


def parse_endpoint_slice(raw: dict[str, Any], skipped: list[Invalid]) -> Optional[EndpointSlice]:
    """Return the EndpointSlice that a raw object describes, or None for one that no Service can use.

    No Service can use slices labelled headless, slices without an owning Service, and slices of addressType FQDN.
    Endpoints without an address and ports without a number are dropped; invalid endpoints are skipped and appended to
    ``skipped``. Raises Invalid.
    """
    metadata = mapping(raw.get("metadata"), "metadata")
    namespace = dns_label(metadata.get("namespace"), "metadata.namespace")
    name = dns_subdomain(metadata.get("name"), "metadata.name")
    labels = mapping(metadata.get("labels"), "metadata.labels")
    owner = labels.get(SERVICE_NAME_LABEL)
    family = raw.get("addressType")
    if labels.get(HEADLESS_LABEL) is not None or owner is None or owner == "" or family == "FQDN":
        return None
    owner = dns_label(owner, f"metadata.labels[{SERVICE_NAME_LABEL}]")
    if family not in (IPV4, IPV6):
        raise Invalid("addressType", f"{shown(family)} is not IPv4, IPv6 or FQDN")
    annotations = mapping(metadata.get("annotations"), "metadata.annotations")
    return EndpointSlice(
        namespace=namespace,
        name=name,
        service_name=owner,
        family=interned(family),
        ports=_slice_ports(sequence(raw.get("ports"), "ports")),
        endpoints=_endpoints(sequence(raw.get("endpoints"), "endpoints"), family, skipped),
        trigger_time=interned(
            text(annotations.get(TRIGGER_TIME_ANNOTATION), f"metadata.annotations[{TRIGGER_TIME_ANNOTATION}]")
        ),
        weight=parse_weight(annotations, WEIGHT, skipped),
        alias_weight=parse_weight(annotations, CILIUM_WEIGHT, skipped, CILIUM_MOST),
    )


#: Most slices of a cluster have the same few ports.
_shared_of_slices = sharing(SlicePort)


def _slice_ports(raw_ports: list[Any]) -> tuple[SlicePort, ...]:
    ports: list[SlicePort] = []
    for index, raw in enumerate(raw_ports):
        try:
            port = _slice_port(raw)
        except Invalid as error:
            raise error.under(f"ports[{index}]") from None
        if port.port:
            ports.append(port)
    return _shared_of_slices(tuple(ports))


def _slice_port(raw: object) -> SlicePort:
    if not isinstance(raw, dict):
        raise Invalid("", f"{shown(raw)} is not an object")
    name = optional_dns_label(raw.get("name"), "name")
    return SlicePort(name, protocol(raw.get("protocol"), "protocol"), integer(raw.get("port"), "port", 0, 65535, 0))


def _endpoints(raw_endpoints: list[Any], family: str, skipped: list[Invalid]) -> tuple[SliceEndpoint, ...]:
    endpoints: list[SliceEndpoint] = []
    for index, raw in enumerate(raw_endpoints):
        try:
            endpoint = _endpoint(raw, family)
        except Invalid as error:
            skipped.append(error.under(f"endpoints[{index}]"))
            continue
        if endpoint is not None:
            endpoints.append(endpoint)
    return tuple(endpoints)


def _endpoint(raw: object, family: str) -> Optional[SliceEndpoint]:
    if not isinstance(raw, dict):
        raise Invalid("", f"{shown(raw)} is not an object")
    # With 100,000 endpoints each call counts, so type checks of valid values are inlined.
    addresses = raw.get("addresses")
    if addresses.__class__ is not list:
        addresses = sequence(addresses, "addresses")
    if not addresses:
        return None
    # Like kube-proxy, read the first address only (the API defines no meaning for the others).
    first = addresses[0]
    if first.__class__ is not str:
        first = text(first, "addresses[0]")
    address = canonical_address(first)
    if address is None:
        raise Invalid("addresses[0]", f"{shown(first)} is not an IP address")
    if family_of(address) != family:
        raise Invalid("addresses[0]", f"{address} is not of the addressType {family}")
    special = special_use(address)
    if special:
        raise Invalid("addresses[0]", f"{address} is {special}")
    conditions = raw.get("conditions")
    if conditions is None:
        conditions = _NO_CONDITIONS
    elif not isinstance(conditions, dict):
        raise Invalid("conditions", f"{shown(conditions)} is not an object")
    zone_hints: tuple[str, ...] = ()
    node_hints: tuple[str, ...] = ()
    if raw.get("hints"):
        hints = mapping(raw["hints"], "hints")
        zone_hints = _hint_names(hints.get("forZones"), "hints.forZones")
        node_hints = _hint_names(hints.get("forNodes"), "hints.forNodes")
    ready, serving, terminating = conditions.get("ready"), conditions.get("serving"), conditions.get("terminating")
    if ready is not True or serving is not True or terminating is not False:
        ready = flag(ready, "conditions.ready", True)
        serving = flag(serving, "conditions.serving", True)
        terminating = flag(terminating, "conditions.terminating", False)
    node = raw.get("nodeName")
    node = interned(node if node.__class__ is str else text(node, "nodeName"))
    # SliceEndpoint(...) takes twice as long.
    return _new(SliceEndpoint, (address, node, ready, serving, terminating, zone_hints, node_hints))


def _hint_names(raw: object, field: str) -> tuple[str, ...]:
    names = (text(mapping(value, where).get("name"), f"{where}.name") for value, where in elements(raw, field))
    return tuple(dict.fromkeys(names))


def parse_service(raw: dict[str, Any], skipped: list[Invalid]) -> Optional[Service]:
    """Return the Service that a raw object describes, or None for one that the proxy does not serve.

    Not served are the Services that kube-proxy 1.36 excludes with its selectors (labelled for another proxy, headless),
    those without a cluster IP, and ExternalName. Defaults of the API server are filled in. External IPs and load
    balancer addresses that cannot be served are skipped and appended to ``skipped``. Raises Invalid.
    """
    metadata = mapping(raw.get("metadata"), "metadata")
    namespace = dns_label(metadata.get("namespace"), "metadata.namespace")
    name = dns_label(metadata.get("name"), "metadata.name")
    labels = mapping(metadata.get("labels"), "metadata.labels")
    if labels.get(SERVICE_PROXY_NAME_LABEL) is not None:
        return None
    spec = mapping(raw.get("spec"), "spec")
    cluster_ip = text(spec.get("clusterIP"), "spec.clusterIP")
    service_type = text(spec.get("type"), "spec.type") or "ClusterIP"
    if service_type not in _TYPES:
        raise Invalid("spec.type", f"{shown(service_type)} is not one of {', '.join(_TYPES)}")
    if cluster_ip in ("", "None") or service_type == "ExternalName":
        return None
    cluster_ip_v4, cluster_ip_v6 = _cluster_ips(spec, cluster_ip)
    raw_external_ips = sequence(spec.get("externalIPs"), "spec.externalIPs")
    return Service(
        namespace=namespace,
        name=name,
        for_outside_hosts=labels.get(OUTSIDE_HOSTS_LABEL) == "true",
        node_local=labels.get(NODE_LOCAL_LABEL) == "true",
        type=interned(service_type),
        cluster_ip_v4=cluster_ip_v4,
        cluster_ip_v6=cluster_ip_v6,
        ports=_ports(sequence(spec.get("ports"), "spec.ports")),
        external_ips=_external_ips(raw_external_ips, skipped) if raw_external_ips else (),
        has_external_ips=bool(raw_external_ips),
        load_balancer_ips=_load_balancer_ips(raw.get("status"), skipped),
        source_ranges=_source_ranges(spec.get("loadBalancerSourceRanges")),
        affinity_seconds=_affinity_seconds(spec),
        external_traffic_policy_local=text(spec.get("externalTrafficPolicy"), "spec.externalTrafficPolicy") == "Local",
        internal_traffic_policy_local=text(spec.get("internalTrafficPolicy"), "spec.internalTrafficPolicy") == "Local",
        health_check_node_port=integer(spec.get("healthCheckNodePort"), "spec.healthCheckNodePort", 0, 65535, 0),
        created=_created(metadata.get("creationTimestamp"), skipped),
        check=parse_check(metadata, skipped) if metadata.get("annotations") else None,
        policy=parse_service_policy(metadata, skipped) if metadata.get("annotations") else NO_POLICY,
        aliases=parse_aliases(metadata) if metadata.get("annotations") else NO_POLICY,
    )


def _created(raw: object, skipped: list[Invalid]) -> str:
    """Return the creation time, empty if there is none. Times in this format sort chronologically as text."""
    if raw is None or (isinstance(raw, str) and _TIME.fullmatch(raw)):
        return interned(raw) if raw else ""
    skipped.append(Invalid("metadata.creationTimestamp", f"{shown(raw)} is not a time like 2026-01-31T12:00:00Z"))
    return ""


def _cluster_ips(spec: dict[str, Any], cluster_ip: str) -> tuple[str, str]:
    """Return the cluster IPs of IPv4 and IPv6, each empty if there is none. Raises Invalid.

    Those of 169.254.0.0/16 are served in every mode, as by kube-proxy. IPv6 link-local ones belong to one interface, so
    the address that ipvs mode binds to its device would not receive packets of others.
    """
    first = address(cluster_ip, "spec.clusterIP")
    given = enumerate(sequence(spec.get("clusterIPs"), "spec.clusterIPs"))
    addresses = [address(value, f"spec.clusterIPs[{index}]") for index, value in given]
    if not addresses:
        addresses = [first]
    elif addresses[0] != first:
        raise Invalid("spec.clusterIPs[0]", f"{addresses[0]} differs from spec.clusterIP {first}")
    named = enumerate(sequence(spec.get("ipFamilies"), "spec.ipFamilies"))
    families = [ip_family(value, f"spec.ipFamilies[{index}]") for index, value in named]
    families = families or [family_of(item) for item in addresses]
    if len(set(families)) != len(families):
        raise Invalid("spec.ipFamilies" if spec.get("ipFamilies") else "spec.clusterIPs", "names one IP family twice")
    chosen = {IPV4: "", IPV6: ""}
    for index, (family, item) in enumerate(zip(families, addresses)):
        if family_of(item) != family:
            reason = f"{item} is not of the family {family} of spec.ipFamilies[{index}]"
            raise Invalid(f"spec.clusterIPs[{index}]", reason)
        special = special_use(item)
        if special and (special, family) != (LINK_LOCAL, IPV4):
            raise Invalid(f"spec.clusterIPs[{index}]", f"{item} is {special}")
        chosen[family] = item
    return chosen[IPV4], chosen[IPV6]


#: Most Services of a cluster have the same few ports.
_shared = sharing(ServicePort)


def _ports(raw_ports: list[Any]) -> tuple[ServicePort, ...]:
    ports: list[ServicePort] = []
    for index, raw in enumerate(raw_ports):
        try:
            ports.append(_port(raw))
        except Invalid as error:
            raise error.under(f"spec.ports[{index}]") from None
    if len(ports) > 1:
        _refuse_duplicates(ports)
    return _shared(tuple(ports))


def _port(raw: object) -> ServicePort:
    if not isinstance(raw, dict):
        raise Invalid("", f"{shown(raw)} is not an object")
    name = optional_dns_label(raw.get("name"), "name")
    return ServicePort(
        name,
        protocol(raw.get("protocol"), "protocol"),
        integer(raw.get("port"), "port", 1, 65535),
        integer(raw.get("nodePort"), "nodePort", 0, 65535, 0),
    )


def _refuse_duplicates(ports: list[ServicePort]) -> None:
    names: set[str] = set()
    numbers: set[tuple[int, str]] = set()
    node_ports: set[tuple[int, str]] = set()
    for index, port in enumerate(ports):
        where = f"spec.ports[{index}]"
        if port.name in names:
            if not port.name:
                raise Invalid(f"{where}.name", "is missing; several ports need names")
            raise Invalid(f"{where}.name", f"{shown(port.name)} is the name of an earlier port")
        if (port.port, port.protocol) in numbers:
            raise Invalid(f"{where}.port", f"{port.port}/{port.protocol} is already used by an earlier port")
        if port.node_port and (port.node_port, port.protocol) in node_ports:
            raise Invalid(f"{where}.nodePort", f"{port.node_port}/{port.protocol} is the node port of an earlier port")
        names.add(port.name)
        numbers.add((port.port, port.protocol))
        node_ports.add((port.node_port, port.protocol))


def _external_ips(raw: list[Any], skipped: list[Invalid]) -> tuple[str, ...]:
    found = [leniently(_external_ip, *item, skipped, "") for item in elements(raw, "spec.externalIPs")]
    return tuple(dict.fromkeys(filter(None, found)))


def _external_ip(value: object, field: str) -> str:
    """Return one external IP, empty for one that is not an address. Raises Invalid."""
    item = canonical_address(text(value, field)) or ""
    special = special_use(item)
    if special:
        raise Invalid(field, f"{item} is {special}")
    return item


def _load_balancer_ips(raw_status: object, skipped: list[Invalid]) -> tuple[str, ...]:
    """Return the addresses of ipMode VIP (the default).

    The API server accepts any address in a status. Loopback and link-local ones are served, since load balancers for
    single machines report them.
    """
    if not raw_status:
        return ()
    balancer = mapping(mapping(raw_status, "status").get("loadBalancer"), "status.loadBalancer")
    if balancer.get("ingress") is None:
        return ()
    ingress = elements(balancer["ingress"], "status.loadBalancer.ingress")
    return tuple(dict.fromkeys(filter(None, [leniently(_ingress_address, *item, skipped, "") for item in ingress])))


def _ingress_address(raw: object, field: str) -> str:
    """Return the address of one ingress, empty for one without an address or of ipMode Proxy. Raises Invalid."""
    ingress = mapping(raw, field)
    item = canonical_address(text(ingress.get("ip"), f"{field}.ip"))
    mode = text(ingress.get("ipMode"), f"{field}.ipMode")
    if item is None or mode not in ("", "VIP"):
        return ""
    special = special_use(item)
    if special and special not in (LOOPBACK, LINK_LOCAL):
        raise Invalid(f"{field}.ip", f"{item} is {special}")
    return item


def _source_ranges(raw: object) -> tuple[str, ...]:
    chosen: dict[str, None] = {}
    for index, value in enumerate(sequence(raw, "spec.loadBalancerSourceRanges")):
        item = canonical_network(text(value, f"spec.loadBalancerSourceRanges[{index}]").strip())
        if item is not None:
            chosen[item] = None
    return tuple(chosen)


def _affinity_seconds(spec: dict[str, Any]) -> int:
    if text(spec.get("sessionAffinity"), "spec.sessionAffinity") != "ClientIP":
        return 0
    settings = mapping(spec.get("sessionAffinityConfig"), "spec.sessionAffinityConfig")
    client_ip = mapping(settings.get("clientIP"), "spec.sessionAffinityConfig.clientIP")
    field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
    return integer(client_ip.get("timeoutSeconds"), field, 1, MAXIMUM_AFFINITY_SECONDS, DEFAULT_AFFINITY_SECONDS)
