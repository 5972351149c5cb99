# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The NodeProxyConfiguration (kubenode.proxy/v1alpha1): settings that kube-proxy does not have, as an immutable value.

It is the second document of the configuration file, so that the first one remains a KubeProxyConfiguration that
kube-proxy loads. Addresses and CIDRs are canonical, and times are seconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..cluster.api import resource_types
from ..cluster.model import Service
from .behaviour import BEHAVIOURS, KUBE_PROXY, NODE_PORTS, Behaviour

API_VERSION = "kubenode.proxy/v1alpha1"
KIND = "NodeProxyConfiguration"

AUTO = "auto"
KEEP, CUT = "keep", "cut"
ALLOW, DENY = "allow", "deny"
STATIC_SERVICES = "/etc/kubenode-proxy/services.d"
MOST_CHECKS = 200


class ApiServerSettings(NamedTuple):
    """``alternatives``: host and port of further servers. ``discover``: whether to use those that the cluster names."""

    alternatives: tuple[tuple[str, int], ...] = ()
    discover: bool = True


class BehaviourSettings(NamedTuple):
    """The corrections. ``name``: of a Behaviour. ``node_ports``: first and last of the range of node ports."""

    name: str = KUBE_PROXY.name
    node_ports: tuple[int, int] = NODE_PORTS
    end_deleted: bool = False

    @property
    def behaviour(self) -> Behaviour:
        """Which of kube-proxy's defects are corrected."""
        return BEHAVIOURS[self.name]


class HealthChecks(NamedTuple):
    """``namespaces``: those whose Services may request checks. ``most_endpoints``: how many endpoints are checked.

    ``panic_percent``: if at most this percentage of the ready endpoints of a port passes, all are served.
    """

    namespaces: tuple[str, ...] = ()
    most_endpoints: int = MOST_CHECKS
    panic_percent: int = 0


class NetworkPolicySettings(NamedTuple):
    """How network policies are enforced.

    ``standalone``: the node serves no Services, because kube-proxy or another program does.
    ``established_connections``: ``keep`` or ``cut`` connections that a change no longer allows. ``log_group``: NFLOG
    group of denied packets, if ``log_denied``; not 100, the default of other implementations. ``unknown_pods``:
    ``allow`` or ``deny`` traffic of addresses in ``pod_cidrs`` (if empty those of the Node) that belong to no known
    pod. ``egress_exempt_cidrs``: to these, no egress rule is applied. ``check_sources``: drop packets with a forged
    source. ``exempt_sources``: pods of ``exempt_source_namespaces`` (if empty, of all) may send from these although
    they are not theirs.
    """

    enabled: bool = False
    standalone: bool = False
    cluster_policies: bool = False
    established_connections: str = KEEP
    log_denied: bool = False
    log_group: int = 4114
    unknown_pods: str = ALLOW
    pod_cidrs: tuple[str, ...] = ()
    egress_exempt_cidrs: tuple[str, ...] = ()
    check_sources: bool = True
    exempt_sources: tuple[str, ...] = ()
    exempt_source_namespaces: tuple[str, ...] = ()

    @property
    def resources(self) -> tuple[resource_types.ResourceType, ...]:
        """The collections that policies depend on; none if they are not enforced."""
        if not self.enabled:
            return ()
        found = (resource_types.PODS, resource_types.NAMESPACES, resource_types.NETWORK_POLICIES)
        return (*found, resource_types.CLUSTER_NETWORK_POLICIES) if self.cluster_policies else found

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that must be completely known before policies are enforced; none if they are not."""
        found = {resource.kind for resource in self.resources}
        if self.enabled and self.unknown_pods == DENY and not self.pod_cidrs:
            found.add(resource_types.NODES.kind)
        return frozenset(found)


class OutsideHost(NamedTuple):
    """``enabled``: the host is outside the cluster. ``namespaces``, ``labelled``: limit the Services that it serves."""

    enabled: bool = False
    namespaces: tuple[str, ...] = ()
    labelled: bool = False

    def serves(self, service: Service) -> bool:
        """Return whether the host serves a Service: one of its namespaces, or one with the label; else all.

        Static Services are always served.
        """
        if not self.enabled or service.static or not (self.namespaces or self.labelled):
            return True
        return service.namespace in self.namespaces or (self.labelled and service.for_outside_hosts)


class ServicePolicySettings(NamedTuple):
    """Settings of the policies of Services.

    ``annotations_enabled``: whether annotations of Services apply. ``annotated_namespaces``: only those in these
    namespaces do; all if it is empty. ``aliases``: equivalent annotations of kube-router and Cilium apply, too.
    ``node_weights``: annotations of Nodes apply. ``node_port_sources``: CIDRs whose sources may use node ports, empty
    for all. ``local_services``: Services that programs on the node serve, as ``namespace/name``. ``external_ranges``:
    CIDRs of the external IPs and load balancer addresses that Services of the cluster may have, empty for any.
    ``removed_endpoints``: as ``reset_after`` of a ServicePolicy, for Services without the annotation.
    """

    annotations_enabled: bool = True
    annotated_namespaces: tuple[str, ...] = ()
    node_port_sources: tuple[str, ...] = ()
    aliases: bool = False
    node_weights: bool = False
    local_services: tuple[str, ...] = ()
    external_ranges: tuple[str, ...] = ()
    removed_endpoints: float = math.inf


class StaticServices(NamedTuple):
    """``directory``: of Service and EndpointSlice manifests."""

    directory: str = STATIC_SERVICES


class TrafficSettings(NamedTuple):
    """``count_connections``, ``count_bytes``: nftables mode counts these, the latter with packets.

    ``metrics_ports``: the most ServicePorts that have metrics. ``metrics_namespaces``: only Services in these have
    metrics; all if it is empty.
    """

    count_connections: bool = False
    count_bytes: bool = False
    metrics_ports: int = 0
    metrics_namespaces: tuple[str, ...] = ()


class UserspaceSection(NamedTuple):
    """``max_connections``, ``max_sessions``: TCP connections and UDP sessions at a time."""

    max_connections: int = 16384
    max_sessions: int = 8192
    connect_timeout: float = 1.0
    drain_timeout: float = 5.0


class NodeProxyConfiguration(NamedTuple):
    """All sections. ``NodeProxyConfiguration()`` is what a file without this document configures."""

    behaviour: BehaviourSettings = BehaviourSettings()
    service_policy: ServicePolicySettings = ServicePolicySettings()
    static_services: StaticServices = StaticServices()
    health_checks: HealthChecks = HealthChecks()
    api_servers: ApiServerSettings = ApiServerSettings()
    outside_host: OutsideHost = OutsideHost()
    userspace: UserspaceSection = UserspaceSection()
    network_policy: NetworkPolicySettings = NetworkPolicySettings()
    ipvs_filter_backend: str = AUTO
    traffic: TrafficSettings = TrafficSettings()
