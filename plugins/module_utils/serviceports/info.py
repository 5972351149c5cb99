# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ServicePorts as this node serves them, for one IP family: where the traffic of each one is sent.

Values do not depend on the mode: a mode turns them into chains, virtual servers or map elements.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..base.addresses import address_and_port
from ..cluster.account import EIGHTHS
from ..cluster.model import NO_POLICY, NamespacedName, ServicePolicy

Sources = Optional[tuple[str, ...]]
"""The CIDRs whose sources are allowed, possibly none; None if every source is."""


class ServicePortName(NamedTuple):
    """Identity of a ServicePort: namespace, name, port name (may be empty) and protocol (TCP, UDP or SCTP)."""

    namespace: str
    name: str
    port_name: str
    protocol: str

    def __str__(self) -> str:
        """Return ``namespace/name:port``, or ``namespace/name`` for an unnamed port; the protocol is not included."""
        base = f"{self.namespace}/{self.name}"
        return f"{base}:{self.port_name}" if self.port_name else base

    @property
    def service(self) -> NamespacedName:
        """Return the Service that the port belongs to."""
        return NamespacedName(self.namespace, self.name)


class Endpoint(NamedTuple):
    """One endpoint of a ServicePort. ``is_local``: it runs on this node. Hints come from the EndpointSlice.

    ``failed``: why its health check from this node fails; it is then neither ready nor serving, unless too few
    endpoints of the ServicePort pass. ``weight``: relative to that of other endpoints; with 0 it gets no new
    connections and keeps its open ones. ``rising``: the eighths of its weight that it has reached in slow start; 8
    without.
    """

    ip: str
    port: int
    is_local: bool = False
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zone_hints: tuple[str, ...] = ()
    node_hints: tuple[str, ...] = ()
    failed: str = ""
    weight: int = 1
    rising: int = EIGHTHS

    @property
    def text(self) -> str:
        """Return ``1.2.3.4:80`` or ``[fd00::1]:80``."""
        return address_and_port(self.ip, self.port)


class ServicePortInfo(NamedTuple):
    """One ServicePort as this node should serve it, for one family. Lists of endpoints are sorted by the text
    ``ip:port``.
    """

    key: ServicePortName
    family: str
    cluster_ip: str
    port: int
    node_port: int
    external_ips: tuple[str, ...]
    load_balancer_ips: tuple[str, ...]
    #: Allowed sources of load balancer addresses.
    source_ranges: Sources
    #: 0 without ClientIP affinity.
    affinity_seconds: int
    #: The traffic policies in effect. External Local applies only to LoadBalancer, NodePort, and ClusterIP with
    #: external IPs.
    internal_local: bool
    external_local: bool
    externally_accessible: bool
    uses_cluster_endpoints: bool
    uses_local_endpoints: bool
    #: 0 when unused.
    health_check_node_port: int
    #: All known endpoints, whatever their conditions.
    endpoints: tuple[Endpoint, ...]
    #: The endpoints selected under the traffic policy Cluster, and under Local.
    cluster: tuple[Endpoint, ...]
    local: tuple[Endpoint, ...]
    #: The union of all endpoints that may be used.
    reachable: tuple[Endpoint, ...]
    #: At least one endpoint on any node is usable.
    has_any: bool
    #: Allowed sources of external IPs, and of the node port.
    external_ip_sources: Sources = None
    node_port_sources: Sources = None
    #: The requests of annotations; a mode follows those that it supports.
    policy: ServicePolicy = NO_POLICY
    #: The weights of ``reachable`` differ.
    weighted: bool = False
    #: When the Service was created, as in ``cluster.model.Service``.
    created: str = ""
    #: External addresses that no interface of the node may get for this Service: they are those of API servers.
    unbound: tuple[str, ...] = ()

    @property
    def protocol(self) -> str:
        """Return the protocol in lower case: tcp, udp or sctp."""
        return self.key.protocol.lower()

    def sources_at(self, address: str) -> Sources:
        """Return the allowed sources of an external address; one that is of both kinds is a load balancer address."""
        return self.source_ranges if address in self.load_balancer_ips else self.external_ip_sources

    @property
    def is_restricted(self) -> bool:
        """Return whether some external traffic is limited to allowed sources."""
        return not (self.source_ranges is None and self.external_ip_sources is None and self.node_port_sources is None)
