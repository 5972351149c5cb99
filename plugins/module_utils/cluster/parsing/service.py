# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of a raw Service (core/v1)."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional, Set, Tuple

from ...base.addresses import IPV4, IPV6, canonical_address, canonical_network, family_of
from ..fields import (
    LINK_LOCAL,
    LOOPBACK,
    Invalid,
    address,
    dns_label,
    elements,
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
from ..model import NO_POLICY, Service, ServicePort
from .health_check import parse_check
from .service_policy import parse_aliases, parse_service_policy

SERVICE_PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"
OUTSIDE_HOSTS_LABEL = "kubenode.proxy/outside-hosts"
NODE_LOCAL_LABEL = "kubenode.proxy/node-local"
#: Labels defined by the collection.
LABELS = (OUTSIDE_HOSTS_LABEL, NODE_LOCAL_LABEL)
DEFAULT_AFFINITY_SECONDS = 10800
MAXIMUM_AFFINITY_SECONDS = 86400
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_TYPES = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")


def parse_service(raw: Dict[str, Any], skipped: List[Invalid]) -> Optional[Service]:
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


def _created(raw: object, skipped: List[Invalid]) -> str:
    """Return the creation time, empty if there is none. Times in this format sort chronologically as text."""
    if raw is None or (isinstance(raw, str) and _TIME.fullmatch(raw)):
        return interned(raw) if raw else ""
    skipped.append(Invalid("metadata.creationTimestamp", f"{shown(raw)} is not a time like 2026-01-31T12:00:00Z"))
    return ""


def _cluster_ips(spec: Dict[str, Any], cluster_ip: str) -> Tuple[str, str]:
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


def _ports(raw_ports: List[Any]) -> Tuple[ServicePort, ...]:
    ports: List[ServicePort] = []
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


def _refuse_duplicates(ports: List[ServicePort]) -> None:
    names: Set[str] = set()
    numbers: Set[Tuple[int, str]] = set()
    node_ports: Set[Tuple[int, str]] = set()
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


def _external_ips(raw: List[Any], skipped: List[Invalid]) -> Tuple[str, ...]:
    found = [leniently(_external_ip, *item, skipped, "") for item in elements(raw, "spec.externalIPs")]
    return tuple(dict.fromkeys(filter(None, found)))


def _external_ip(value: object, field: str) -> str:
    """Return one external IP, empty for one that is not an address. Raises Invalid."""
    item = canonical_address(text(value, field)) or ""
    special = special_use(item)
    if special:
        raise Invalid(field, f"{item} is {special}")
    return item


def _load_balancer_ips(raw_status: object, skipped: List[Invalid]) -> Tuple[str, ...]:
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


def _source_ranges(raw: object) -> Tuple[str, ...]:
    chosen: Dict[str, None] = {}
    for index, value in enumerate(sequence(raw, "spec.loadBalancerSourceRanges")):
        item = canonical_network(text(value, f"spec.loadBalancerSourceRanges[{index}]").strip())
        if item is not None:
            chosen[item] = None
    return tuple(chosen)


def _affinity_seconds(spec: Dict[str, Any]) -> int:
    if text(spec.get("sessionAffinity"), "spec.sessionAffinity") != "ClientIP":
        return 0
    settings = mapping(spec.get("sessionAffinityConfig"), "spec.sessionAffinityConfig")
    client_ip = mapping(settings.get("clientIP"), "spec.sessionAffinityConfig.clientIP")
    field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
    return integer(client_ip.get("timeoutSeconds"), field, 1, MAXIMUM_AFFINITY_SECONDS, DEFAULT_AFFINITY_SECONDS)
