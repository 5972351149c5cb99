# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The address plan of the lab, for both IP families.

The last part of an IPv4 address and of its IPv6 counterpart read the same: 203.0.113.10 and
2001:db8:113::10, 10.244.1.11 and fd00:10:244:1::11.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

PODS = ("pod1", "pod2", "pod3")
POD_PREFIX = {4: "10.244.1.", 6: "fd00:10:244:1::"}
POD_GATEWAY = {4: "10.244.1.1", 6: "fd00:10:244:1::1"}
FIRST_POD = 11

NODE = {4: "172.18.0.2", 6: "fd00:172:18::2"}
NODE_SECOND = {4: "172.19.0.2", 6: "fd00:172:19::2"}
FABRIC = {4: "172.18.0.1", 6: "fd00:172:18::1"}
FABRIC_SECOND = {4: "172.19.0.1", 6: "fd00:172:19::1"}
FABRIC_CLIENT = {4: "203.0.113.1", 6: "2001:db8:113::1"}
CLIENT_PREFIX = {4: "203.0.113.", 6: "2001:db8:113::"}
CLIENT_HOSTS = (10, 20, 30, 200)

CLUSTER_CIDR = {4: "10.244.0.0/16", 6: "fd00:10:244::/48"}
SERVICE_CIDR = {4: "10.96.0.0/12", 6: "fd00:10:96::/112"}
# Networks that the fabric routes to the node under test: cluster IPs, load balancer addresses, external IPs
# and the pods of the node.
ROUTED_TO_NODE = {
    4: (SERVICE_CIDR[4], "198.51.100.0/24", "192.0.2.0/24", "10.244.1.0/24"),
    6: (SERVICE_CIDR[6], "2001:db8:51::/64", "2001:db8:2::/64", "fd00:10:244:1::/64"),
}
# Destinations of traffic from the node that the fabric forwards; it answers everything else itself.
FORWARDED_FROM_NODE = {
    4: ("172.18.0.0/24", "172.19.0.0/24", "203.0.113.0/24", CLUSTER_CIDR[4]),
    6: ("fd00:172:18::/64", "fd00:172:19::/64", "2001:db8:113::/64", CLUSTER_CIDR[6], "fe80::/10", "ff00::/8"),
}
HOST_BITS = {4: 32, 6: 128}
SUBNET_BITS = {4: 24, 6: 64}


class PeerNode(NamedTuple):
    """Another node, which holds the addresses of all its pods itself."""

    address: dict[int, str]
    pod_network: dict[int, str]


PEERS = {
    "peer": PeerNode({4: "172.18.0.3", 6: "fd00:172:18::3"}, {4: "10.244.2.0/24", 6: "fd00:10:244:2::/64"}),
    "peer3": PeerNode({4: "172.18.0.4", 6: "fd00:172:18::4"}, {4: "10.244.3.0/24", 6: "fd00:10:244:3::/64"}),
}


def pod_address(pod: str, version: int) -> str:
    """Return the address of pod1, pod2 or pod3."""
    return POD_PREFIX[version] + str(FIRST_POD + PODS.index(pod))


def default_source(host: str, version: int) -> str | None:
    """Return the address that a host of the lab sends from unless a flow names another; None: the kernel chooses."""
    if host in PODS:
        return pod_address(host, version)
    if host == "client":
        return CLIENT_PREFIX[version] + str(CLIENT_HOSTS[0])
    if host in PEERS:
        return PEERS[host].address[version]
    return None


def holder(address: str) -> str | None:
    """Return the namespace that answers for an endpoint address; None if none does."""
    wanted = ipaddress.ip_address(address)
    version = wanted.version
    for pod in PODS:
        if wanted == ipaddress.ip_address(pod_address(pod, version)):
            return pod
    if str(wanted) in (NODE[version], NODE_SECOND[version]):
        return "node"
    for name, peer in PEERS.items():
        if str(wanted) == peer.address[version] or wanted in ipaddress.ip_network(peer.pod_network[version]):
            return name
    return None


def join_host_port(host: str, port: int) -> str:
    """Return ``1.2.3.4:80`` or ``[fd00::1]:80``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
