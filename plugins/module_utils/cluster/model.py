# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster objects from which a node is programmed, as immutable values.

They hold only the fields that kube-proxy 1.36 reads. All addresses and CIDRs are canonical (see ``addresses``). Parts
that kube-proxy skips silently (an external IP that is not an address, a hostname-only ingress, an ``ipMode: Proxy``
address) have been dropped by the parser.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional

#: Sorts after the time at which any Service was created; of those without a time.
YOUNGEST = "~"


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
    """How the endpoints of a Service are checked from the node. Times are in seconds."""

    #: ``tcp``, ``http`` or ``https``.
    scheme: str = "tcp"
    #: 0 for each endpoint's own port.
    port: int = 0
    path: str = "/"
    #: Accepted ranges of HTTP statuses.
    statuses: tuple[tuple[int, int], ...] = ((200, 399),)
    #: For TLS and the Host header.
    server_name: str = ""
    #: File of the certificates that verify the server's; empty not to verify it.
    ca: str = ""
    interval: float = 1.0
    timeout: float = 1.0
    #: Failed checks in a row after which an endpoint fails.
    fall: int = 2
    #: Passed checks in a row after which it no longer fails.
    rise: int = 2
    #: Time to the next check after one that counts towards ``fall`` or ``rise``, like haproxy's fastinter; 0 for
    #: ``interval``.
    fast_interval: float = 0.0


class Failing(NamedTuple):
    """The endpoints of a Service that fail their checks.

    ``reasons``: why, by address and port; port 0 means all ports of the address. ``panic_threshold``: if at most
    this percentage of the ready endpoints passes, all are served.
    """

    reasons: Mapping[tuple[str, int], str] = {}
    panic_threshold: float = 0.0


class ServicePolicy(NamedTuple):
    """What annotations of a Service request beyond its spec."""

    #: CIDRs of both families whose sources may use external addresses and node ports, possibly none; None without a
    #: restriction.
    allowed_sources: Optional[tuple[str, ...]] = None
    #: The kernel's name of an IPVS scheduler, or ``random``; empty for the node's.
    scheduler: str = ""
    #: As ipvsadm names them (``sh-port``, ``mh-fallback``), or ``flag-1`` to ``flag-3``.
    scheduler_flags: tuple[str, ...] = ()
    #: Prefix lengths by which clients with affinity are grouped, by family; 0 to distinguish every client.
    persistence_v4: int = 0
    persistence_v6: int = 0
    #: Seconds over which the share of an endpoint that has become ready rises; 0 for none.
    slow_start: float = 0.0
    #: Seconds from the removal of an endpoint until its connections are reset, infinite to keep them; None for the
    #: node's.
    reset_after: Optional[float] = None
    #: The agent forwards the connections of the Service itself, whatever the node's mode is.
    userspace: bool = False
    #: Invalid values of annotations whose validity matters only where they apply.
    problems: tuple[str, ...] = ()


NO_POLICY = ServicePolicy()


class Service(NamedTuple):
    """A Service that is not headless and not ExternalName. Tuples of addresses and CIDRs hold both families."""

    namespace: str
    name: str
    type: str
    #: The cluster IP of each family, empty if the Service has none of that family.
    cluster_ip_v4: str
    cluster_ip_v6: str
    ports: tuple[ServicePort, ...]
    external_ips: tuple[str, ...] = ()
    #: Whether spec.externalIPs has any element, valid or not.
    has_external_ips: bool = False
    #: Those of ipMode VIP.
    load_balancer_ips: tuple[str, ...] = ()
    #: CIDRs, with blanks trimmed.
    source_ranges: tuple[str, ...] = ()
    #: 0 without ClientIP affinity.
    affinity_seconds: int = 0
    #: The traffic policies as in the spec, uninterpreted.
    external_traffic_policy_local: bool = False
    internal_traffic_policy_local: bool = False
    health_check_node_port: int = 0
    #: metadata.creationTimestamp (UTC, RFC 3339, whole seconds), empty if the object has none.
    created: str = ""
    #: The file that defines a static Service (see ``cluster.static``), empty for a Service of the cluster.
    static: str = ""
    #: The health check that its annotations request.
    check: Optional[HealthCheck] = None
    #: What annotations of this project request.
    policy: ServicePolicy = NO_POLICY
    #: What annotations of other proxies request.
    aliases: ServicePolicy = NO_POLICY
    #: Whether the label kubenode.proxy/outside-hosts is "true".
    for_outside_hosts: bool = False
    #: Whether the label kubenode.proxy/node-local is "true".
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
    zone_hints: tuple[str, ...] = ()
    node_hints: tuple[str, ...] = ()


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
    ports: tuple[SlicePort, ...]
    endpoints: tuple[SliceEndpoint, ...]
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
    ``hostname`` is the label kubernetes.io/hostname, empty without it. ``weight``: of the endpoints on it. ``labels``:
    those that were kept when the object was pruned.
    """

    name: str
    internal_ips: tuple[str, ...] = ()
    external_ips: tuple[str, ...] = ()
    pod_cidrs: tuple[str, ...] = ()
    zone: str = ""
    taint_keys: tuple[str, ...] = ()
    deleting: bool = False
    hostname: str = ""
    weight: int = 1
    labels: Mapping[str, str] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """The internal and external addresses."""
        return self.internal_ips + self.external_ips


class ServiceCIDR(NamedTuple):
    """A ServiceCIDR: its name and its CIDRs, one or one of each family."""

    name: str
    cidrs: tuple[str, ...]
