# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Attributes that follow from a Service alone, for one IP family: its addresses, sources and the policies in effect."""

from __future__ import annotations

from typing import Iterable, Iterator, NamedTuple, Optional

from ..base.addresses import IPV6, Network, address_bits, networks_of
from ..cluster.model import Service, ServicePolicy, ServicePort
from ..configuration.behaviour import KUBE_PROXY, Behaviour
from ..configuration.node_proxy import ServicePolicySettings
from .info import Sources
from .policy import policy_of


def sources_of_family(cidrs: Optional[tuple[str, ...]], family: str) -> Sources:
    """Return the CIDRs of a family; None if every source of it is allowed.

    ``cidrs`` are of both families, None without a restriction. If none is of the family, no source of it is allowed.
    """
    if cidrs is None:
        return None
    own = tuple(item for item in cidrs if (":" in item) == (family == "IPv6"))
    return None if any(item.endswith("/0") for item in own) else own


def both(first: Sources, second: Sources) -> Sources:
    """Return the sources that two restrictions both allow.

    The cost is linear in the number of CIDRs, of which the owner of a Service may give tens of thousands.
    """
    if first is None or second is None:
        return second if first is None else first
    one, other = networks_of(first), networks_of(second)
    # Two CIDRs are disjoint, or one contains the other: then both allow the smaller one.
    return tuple(dict.fromkeys(str(item) for item in (*_inside(one, other), *_inside(other, one))))


def _inside(networks: Iterable[Network], others: Iterable[Network]) -> Iterator[Network]:
    """Return the networks that one of the others contains or equals."""
    prefixes = {(_prefix(item, item.prefix_length), item.prefix_length) for item in others}
    lengths = {length for _prefix_bits, length in prefixes}
    for item in networks:
        if any(length <= item.prefix_length and (_prefix(item, length), length) in prefixes for length in lengths):
            yield item


def _prefix(network: Network, length: int) -> int:
    return network.first >> (address_bits(network.family) - length)


DEFAULT_POLICY = ServicePolicySettings()


class ServiceAttributes(NamedTuple):
    """The attributes that all ports of a Service share, for one family.

    ``cluster_ip`` is empty when the Service has none of the family, and then nothing is served. ``external_ips`` are
    those to be served; ``accessible_by_address`` is True if there is any external or load-balancer address, served or
    not. The cluster IP is neither an external nor a load balancer address, even if the Service names it as one.
    ``policy``: the requests of the annotations that apply.
    """

    cluster_ip: str
    external_ips: tuple[str, ...]
    load_balancer_ips: tuple[str, ...]
    source_ranges: Sources
    external_ip_sources: Sources
    node_port_sources: Sources
    accessible_by_address: bool
    internal_local: bool
    external_local: bool
    health_check_node_port: int
    policy: ServicePolicy


class PortPolicy(NamedTuple):
    """The endpoint lists that a ServicePort needs."""

    externally_accessible: bool
    uses_cluster_endpoints: bool
    uses_local_endpoints: bool


def cluster_ip_of(service: Service, family: str) -> str:
    """Return the cluster IP of the family, or an empty string."""
    return service.cluster_ip_v6 if family == IPV6 else service.cluster_ip_v4


def of_family(items: tuple[str, ...], family: str) -> tuple[str, ...]:
    """Return the canonical addresses or CIDRs that are of the family, in their order."""
    if not items:
        return items
    is_v6 = family == IPV6
    return tuple([item for item in items if (":" in item) == is_v6])


def _without(cluster_ip: str, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses other than the cluster IP, which has one traffic policy and no source ranges.

    kube-proxy 1.36 follows one of two contradictory rules then: the first in iptables mode, the last in nftables mode,
    and both in turn in ipvs mode.
    """
    return tuple([item for item in addresses if item != cluster_ip]) if cluster_ip in addresses else addresses


def effective_source_ranges(source_ranges: tuple[str, ...], family: str, behaviour: Behaviour) -> Sources:
    """Return the CIDRs of the family that restrict load balancer addresses; None if every source is allowed.

    A CIDR of prefix length 0 allows its whole family, and for kube-proxy 1.36 ranges of one family do not restrict the
    other.
    """
    ranges = of_family(source_ranges, family)
    if any(item.endswith("/0") for item in ranges):
        return None
    if not ranges and not (source_ranges and behaviour.ranges_hold_for_families):
        return None
    return ranges


def is_external_local(service: Service) -> bool:
    """Return whether externalTrafficPolicy Local is in effect: it only applies if traffic can come from outside."""
    if not service.external_traffic_policy_local:
        return False
    return service.type in ("LoadBalancer", "NodePort") or service.has_external_ips


def service_attributes(
    service: Service,
    family: str,
    allow_external_ips: bool = True,
    behaviour: Behaviour = KUBE_PROXY,
    settings: ServicePolicySettings = DEFAULT_POLICY,
) -> ServiceAttributes:
    """Return the attributes that the ports of ``service`` share for ``family``.

    ``allow_external_ips`` False (the feature gate AllowServiceExternalIPs off) removes the external IPs themselves, but
    they still count for whether the Service can be reached from outside.
    """
    cluster_ip = cluster_ip_of(service, family)
    external_ips = _without(cluster_ip, of_family(service.external_ips, family))
    load_balancer_ips = _without(cluster_ip, of_family(service.load_balancer_ips, family))
    external_local = is_external_local(service)
    ranges = effective_source_ranges(service.source_ranges, family, behaviour) if service.source_ranges else None
    policy = policy_of(service, settings)
    allowed = sources_of_family(policy.allowed_sources, family)
    node_wide = sources_of_family(settings.node_port_sources or None, family)
    return ServiceAttributes(
        cluster_ip=cluster_ip,
        external_ips=external_ips if allow_external_ips else (),
        load_balancer_ips=load_balancer_ips,
        source_ranges=both(ranges, allowed),
        external_ip_sources=allowed,
        node_port_sources=both(both(ranges if behaviour.ranges_hold_for_node_ports else None, allowed), node_wide),
        accessible_by_address=bool(external_ips or load_balancer_ips),
        internal_local=service.internal_traffic_policy_local,
        external_local=external_local,
        health_check_node_port=service.health_check_node_port
        if external_local and service.type == "LoadBalancer"
        else 0,
        policy=policy,
    )


def port_policy(attributes: ServiceAttributes, port: ServicePort) -> PortPolicy:
    """Return which endpoint lists one port of the Service needs."""
    accessible = port.node_port != 0 or attributes.accessible_by_address
    return PortPolicy(
        accessible,
        # Also with internalTrafficPolicy Local: traffic of pods and of the node itself to external destinations is
        # short-circuited.
        not attributes.internal_local or accessible,
        attributes.internal_local or (attributes.external_local and accessible),
    )
