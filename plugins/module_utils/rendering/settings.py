# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inputs of a mode other than ServicePorts: settings of the node and facts about it, per family, and one flow.

All are plain values, so that rendering remains a pure function; the convergence layer fills them from the
KubeProxyConfiguration, the Node and the kernel. A mode decides about a flow by its sender and its destination.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..configuration.behaviour import KUBE_PROXY, Behaviour


class LocalTraffic(NamedTuple):
    """How local pod traffic is detected (detectLocalMode).

    ``kind``: ``cidr`` (value: the pods' CIDR), ``bridge`` (value: interface name) or ``prefix`` (value: start of
    interface names).
    """

    kind: str
    value: str


class DataplaneSettings(NamedTuple):
    """Settings and node facts for one family."""

    family: str
    node_name: str = ""
    #: This node's address of the family.
    node_ip: str = ""
    #: The mark as a number (bit 14: 0x4000).
    masquerade_mark: int = 0x4000
    masquerade_all: bool = False
    #: How local pod traffic is detected; None without a detector for the family.
    local_traffic: Optional[LocalTraffic] = None
    #: The CIDRs of the family in which node ports answer; empty for all addresses.
    node_port_cidrs: tuple[str, ...] = ()
    #: Local addresses of the node that lie in node_port_cidrs, or, when those are empty, all of them (loopback
    #: included, in the order of the interfaces; see ``node_addresses``).
    node_port_addresses: tuple[str, ...] = ()
    #: (interface, address) of all addresses of the family on the node.
    node_addresses: tuple[tuple[str, str], ...] = ()
    #: IPv4 iptables mode only, already False where node_port_cidrs exclude loopback.
    localhost_node_ports: bool = True
    #: nftables mode: the protocols whose node ports are refused at loopback addresses. If TCP is not among others, the
    #: agent listens there instead, if one runs.
    localhost_rejected: tuple[str, ...] = ()
    #: nf_conntrack_tcp_be_liberal is set, or will be with the other kernel parameters.
    conntrack_liberal: bool = False
    #: MASQUERADE knows --random-fully.
    random_fully: bool = True
    #: Names of the nfacct counters that exist.
    nfacct_counters: tuple[str, ...] = ()
    #: The node's scheduler in ipvs mode.
    scheduler: str = "rr"
    #: Other schedulers that ServicePorts request and the kernel has.
    schedulers: frozenset[str] = frozenset()
    #: ipvs mode: virtual servers in these networks belong to other programs.
    exclude_cidrs: tuple[str, ...] = ()
    #: nftables mode: the networks of cluster IPs.
    service_cidrs: tuple[str, ...] = ()
    #: Above this number of endpoints iptables mode omits per-endpoint comments.
    large_cluster_endpoints: int = 1000
    #: Which of kube-proxy's defects are corrected.
    behaviour: Behaviour = KUBE_PROXY
    #: First and last source port for masquerading, (0, 0) if the kernel chooses.
    masquerade_ports: tuple[int, int] = (0, 0)
    #: nftables mode counts the connections of each frontend and endpoint.
    count_connections: bool = False
    #: nftables mode counts the packets and bytes of each frontend.
    count_bytes: bool = False
    #: iptables mode: rules for a single endpoint have a comment; see :meth:`.Rendering.at_size`.
    endpoint_comments: bool = True

    @property
    def localhost_listeners(self) -> bool:
        """Whether the agent, if one runs, listens at the loopback address for node ports of TCP."""
        return bool(self.localhost_rejected) and "tcp" not in self.localhost_rejected


class Client(NamedTuple):
    """The sender of a flow: a canonical address, and a port or 0 if any.

    ``of_node``: the address is one of this node's. ``is_pod``: the detector of local traffic classifies it as a pod.
    """

    address: str
    port: int = 0
    of_node: bool = False
    is_pod: bool = False

    @property
    def is_inside(self) -> bool:
        """Return whether traffic policies treat the client as this node or one of its pods."""
        return self.of_node or self.is_pod


class Arrival(NamedTuple):
    """Where packets arrive: protocol (tcp, udp, sctp), address and port. ``node_port``: the port is a node port."""

    protocol: str
    address: str
    port: int
    node_port: bool = False


class Masquerade(NamedTuple):
    """Whether the node's address replaces the source address, and why or why not."""

    applies: bool
    reason: str


_KEPT, _REPLACED = Masquerade(False, "policy Local"), Masquerade(True, "external traffic, policy Cluster")
_POD = Masquerade(False, "a pod, as detectLocalMode defines it")


def masquerade_external(local: bool, client: Client, for_node: bool) -> Masquerade:
    """Return how external traffic is masqueraded. ``local``: the policy; ``for_node``: then the node is masqueraded."""
    if not local:
        return _REPLACED
    if client.is_pod:
        return _POD
    if client.of_node and for_node:
        return Masquerade(True, "from this node itself")
    return _KEPT


def masquerade_internal(everything: bool, detector: bool, client: Client, for_node: bool) -> Masquerade:
    """Return how traffic to a cluster IP is masqueraded.

    ``everything``: masqueradeAll. ``detector``: there is one. ``for_node``: without one, the node is masqueraded.
    """
    if everything:
        return Masquerade(True, "masqueradeAll")
    if not detector:
        replaced = client.of_node and for_node
        return Masquerade(replaced, "from this node itself" if replaced else "no detectLocalMode")
    return _POD if client.is_pod else Masquerade(True, "not a pod, as detectLocalMode defines it")


Shares = tuple[int, ...]
