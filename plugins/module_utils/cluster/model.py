# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster objects from which a node is programmed, as immutable values.

They hold only the fields that kube-proxy 1.36 reads. All addresses and CIDRs are canonical (see ``addresses``). Parts
that kube-proxy skips silently (an external IP that is not an address, a hostname-only ingress, an ``ipMode: Proxy``
address) have been dropped by the parser.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional, Tuple


class NamespacedName(NamedTuple):
    """Identity of a Service: namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ServicePort(NamedTuple):
    """One element of spec.ports. ``protocol`` is TCP, UDP or SCTP; ``node_port`` is 0 when there is none."""

    name: str
    protocol: str
    port: int
    node_port: int = 0


class HealthCheck(NamedTuple):
    """How the endpoints of a Service are checked from the node.

    ``scheme``: tcp, http or https. ``port``: 0 for each endpoint's own port. ``statuses``: accepted ranges of HTTP
    statuses. ``server_name``: for TLS and the Host header. ``ca``: file of the certificates by which that of the server
    is verified; empty not to verify it. ``interval`` and ``timeout`` are seconds. ``fall``: failed checks in a row
    after which an endpoint fails; ``rise``: passed checks after which it no longer does. ``fast_interval``: seconds to
    the next check after one that counts towards ``fall`` or ``rise``, like haproxy's fastinter; 0 for ``interval``.
    """

    scheme: str = "tcp"
    port: int = 0
    path: str = "/"
    statuses: Tuple[Tuple[int, int], ...] = ((200, 399),)
    server_name: str = ""
    ca: str = ""
    interval: float = 1.0
    timeout: float = 1.0
    fall: int = 2
    rise: int = 2
    fast_interval: float = 0.0


class Failing(NamedTuple):
    """The endpoints of a Service that fail their checks.

    ``reasons``: why, by address and port; port 0 means all ports of the address. ``panic_threshold``: if at most
    this percentage of the ready endpoints passes, all are served.
    """

    reasons: Mapping[Tuple[str, int], str] = {}
    panic_threshold: float = 0.0


class ServicePolicy(NamedTuple):
    """What annotations of a Service request beyond its spec.

    ``allowed_sources``: CIDRs of both families whose sources may use external addresses and node ports, possibly none;
    None without a restriction. ``scheduler``: the kernel's name of an IPVS scheduler, or ``random``; empty for the
    node's. ``scheduler_flags``: as ipvsadm names them (``sh-port``, ``mh-fallback``), or ``flag-1`` to ``flag-3``.
    ``persistence_v4`` and ``persistence_v6``: prefix lengths by which clients with affinity are grouped, 0 to
    distinguish every client. ``slow_start``: seconds over which the share of an endpoint that has become ready rises; 0
    for none. ``userspace``: the agent forwards the connections of the Service itself, whatever the node's mode is.
    ``problems``: invalid values of annotations whose validity matters only where they apply.
    """

    allowed_sources: Optional[Tuple[str, ...]] = None
    scheduler: str = ""
    scheduler_flags: Tuple[str, ...] = ()
    persistence_v4: int = 0
    persistence_v6: int = 0
    slow_start: float = 0.0
    userspace: bool = False
    problems: Tuple[str, ...] = ()


NO_POLICY = ServicePolicy()


class Service(NamedTuple):
    """A Service that is not headless and not ExternalName.

    ``cluster_ip_v4`` and ``cluster_ip_v6`` are empty if the Service has none of that family. ``external_ips``,
    ``load_balancer_ips`` (of ipMode VIP) and ``source_ranges`` (CIDRs, blanks trimmed) hold both families.
    ``affinity_seconds`` is 0 without ClientIP affinity. ``external_traffic_policy_local`` and
    ``internal_traffic_policy_local`` are the fields of the spec, uninterpreted. ``has_external_ips``: whether
    spec.externalIPs has any element, valid or not. ``created`` is metadata.creationTimestamp (UTC, RFC 3339, whole
    seconds), empty if the object has none. ``static`` is the file that defines a static Service (see ``static``), empty
    for a Service of the cluster. ``check`` is the health check that its annotations request, None without one.
    ``policy`` is what annotations of this project request, ``aliases`` what those of other proxies request.
    ``for_outside_hosts``: whether the label kubenode.proxy/outside-hosts is "true"; ``node_local``: the label
    kubenode.proxy/node-local.
    """

    namespace: str
    name: str
    type: str
    cluster_ip_v4: str
    cluster_ip_v6: str
    ports: Tuple[ServicePort, ...]
    external_ips: Tuple[str, ...] = ()
    has_external_ips: bool = False
    load_balancer_ips: Tuple[str, ...] = ()
    source_ranges: Tuple[str, ...] = ()
    affinity_seconds: int = 0
    external_traffic_policy_local: bool = False
    internal_traffic_policy_local: bool = False
    health_check_node_port: int = 0
    created: str = ""
    static: str = ""
    check: Optional[HealthCheck] = None
    policy: ServicePolicy = NO_POLICY
    aliases: ServicePolicy = NO_POLICY
    for_outside_hosts: bool = False
    node_local: bool = False

    @property
    def key(self) -> NamespacedName:
        """Namespace and name."""
        return NamespacedName(self.namespace, self.name)


class SlicePort(NamedTuple):
    """One element of an EndpointSlice's ports that has a number. ``name`` is empty for an unnamed port."""

    name: str
    protocol: str
    port: int


class SliceEndpoint(NamedTuple):
    """One element of an EndpointSlice's endpoints: its first address, and conditions with their defaults filled in."""

    address: str
    node_name: str
    ready: bool
    serving: bool
    terminating: bool
    zone_hints: Tuple[str, ...] = ()
    node_hints: Tuple[str, ...] = ()


class EndpointSlice(NamedTuple):
    """An EndpointSlice of addressType IPv4 or IPv6 (``family``) that belongs to the Service ``service_name``.

    ``trigger_time`` is the text of the annotation endpoints.kubernetes.io/last-change-trigger-time, or empty: only so
    that a slice with another one compares as changed.
    ``weight`` of its endpoints by the annotation of this project, ``alias_weight`` by that of Cilium; None without it.
    """

    namespace: str
    name: str
    service_name: str
    family: str
    ports: Tuple[SlicePort, ...]
    endpoints: Tuple[SliceEndpoint, ...]
    trigger_time: str = ""
    weight: Optional[int] = None
    alias_weight: Optional[int] = None

    @property
    def service_key(self) -> NamespacedName:
        """Namespace and name of the Service it belongs to."""
        return NamespacedName(self.namespace, self.service_name)


class Node(NamedTuple):
    """The fields of a Node that the proxy uses.

    ``internal_ips`` and ``external_ips`` keep the order of status.addresses; ``zone`` is empty without the label.
    ``taint_keys`` are the keys of spec.taints; ``deleting``: it has a metadata.deletionTimestamp.
    ``hostname`` is the label kubernetes.io/hostname, empty without it. ``weight``: of the endpoints on it.
    """

    name: str
    internal_ips: Tuple[str, ...] = ()
    external_ips: Tuple[str, ...] = ()
    pod_cidrs: Tuple[str, ...] = ()
    zone: str = ""
    taint_keys: Tuple[str, ...] = ()
    deleting: bool = False
    hostname: str = ""
    weight: int = 1


class ServiceCIDR(NamedTuple):
    """A ServiceCIDR: its name and its CIDRs, one or one of each family."""

    name: str
    cidrs: Tuple[str, ...]
