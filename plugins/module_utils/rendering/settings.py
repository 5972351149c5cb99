# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inputs of a mode other than ServicePorts: settings of the node and facts about it, per family.

Both are plain values, so that rendering remains a pure function; the convergence layer fills them from the
KubeProxyConfiguration, the Node and the kernel.
"""

from __future__ import annotations

from typing import FrozenSet, NamedTuple, Optional, Tuple

from ..configuration.behaviour import KUBE_PROXY, Behaviour


class LocalTraffic(NamedTuple):
    """How local pod traffic is detected (detectLocalMode).

    ``kind``: ``cidr`` (value: the pods' CIDR), ``bridge`` (value: interface name) or ``prefix`` (value: start of
    interface names).
    """

    kind: str
    value: str


class DataplaneSettings(NamedTuple):
    """Settings and node facts for one family.

    ``node_ip``: this node's address of the family. ``masquerade_mark``: the mark as a number (bit 14: 0x4000).
    ``local_traffic``: None without a detector for the family.
    ``node_port_cidrs``: empty when node ports answer on all addresses; otherwise the CIDRs of the family.
    ``node_port_addresses``: local addresses of the node that lie in node_port_cidrs, or, when those are empty, all of
    them (loopback included, in the order of the interfaces; see ``node_addresses``).
    ``node_addresses``: (interface, address) of all addresses of the family on the node.
    ``localhost_node_ports``: IPv4 iptables mode only, already False where node_port_cidrs exclude loopback.
    ``conntrack_liberal``: nf_conntrack_tcp_be_liberal is set, or will be with the other kernel parameters.
    ``random_fully``: MASQUERADE knows --random-fully.
    ``nfacct_counters``: names of the nfacct counters that exist.
    ``scheduler``, ``exclude_cidrs``: ipvs mode. ``schedulers``: others that ServicePorts request and the kernel
    has. ``service_cidrs``: nftables mode.
    ``behaviour``: which of kube-proxy's defects are corrected. ``masquerade_ports``: first and last source port for
    masquerading, (0, 0) if the kernel chooses.
    ``count_connections``: nftables mode counts the connections of each frontend and endpoint. ``count_bytes``: it
    counts the packets and bytes of each frontend.
    ``large_cluster_endpoints``: above this number of endpoints iptables mode omits per-endpoint comments.
    """

    family: str
    node_name: str = ""
    node_ip: str = ""
    masquerade_mark: int = 0x4000
    masquerade_all: bool = False
    local_traffic: Optional[LocalTraffic] = None
    node_port_cidrs: Tuple[str, ...] = ()
    node_port_addresses: Tuple[str, ...] = ()
    node_addresses: Tuple[Tuple[str, str], ...] = ()
    localhost_node_ports: bool = True
    conntrack_liberal: bool = False
    random_fully: bool = True
    nfacct_counters: Tuple[str, ...] = ()
    scheduler: str = "rr"
    schedulers: FrozenSet[str] = frozenset()
    exclude_cidrs: Tuple[str, ...] = ()
    service_cidrs: Tuple[str, ...] = ()
    large_cluster_endpoints: int = 1000
    behaviour: Behaviour = KUBE_PROXY
    masquerade_ports: Tuple[int, int] = (0, 0)
    count_connections: bool = False
    count_bytes: bool = False
