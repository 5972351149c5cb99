# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
r"""The laboratory's network on paper: addresses, nodes, and the pods that a cluster snapshot places on them.

    client 203.0.113.0/24 --- fabric 172.30.0.0/24 --- lab-iptables --- its pods 10.244.1.0/24
                                                   \-- lab-ipvs     --- its pods 10.244.2.0/24

The fabric sends virtual addresses to the node to which the client's address belongs, so that a test chooses the node
by its source.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import NamedTuple, Sequence

SERVICE_RANGES = ("10.96.0.0/16", "198.51.100.0/24")
SERVICE_RANGES6 = ("fd00:10:96::/112",)
FABRIC, FABRIC6 = "172.30.0.1", "fd00:172:30::1"
NODE_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/forwarding": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv6/conf/all/accept_dad": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/ipv4/icmp_ratemask": "0",
    "net/ipv6/icmp/ratelimit": "0",
}


class LabNode(NamedTuple):
    """A node: its place in the address plan, and whether it has its own kernel (user-mode Linux)."""

    name: str
    number: int
    own_kernel: bool

    @property
    def mode(self) -> str:
        """The mode in the node's name."""
        return self.name.split("-", 1)[1]

    @property
    def address(self) -> str:
        """The node's address on the fabric."""
        return f"172.30.0.{10 + self.number}"

    @property
    def address6(self) -> str:
        """The node's IPv6 address on the fabric."""
        return f"fd00:172:30::{10 + self.number}"

    @property
    def pods(self) -> str:
        """The node's range of pod addresses."""
        return f"10.244.{self.number}.0/24"

    @property
    def pods6(self) -> str:
        """The node's range of IPv6 pod addresses."""
        return f"fd00:10:244:{self.number}::/64"

    @property
    def client(self) -> str:
        """The client address whose requests to virtual addresses are sent to this node."""
        return f"203.0.113.{16 * (self.number - 1) + 10}"

    @property
    def stranger(self) -> str:
        """A second such address, outside of the source ranges of the demo's LoadBalancer."""
        return f"203.0.113.{16 * (self.number - 1) + 2}"

    @property
    def client6(self) -> str:
        """The IPv6 counterpart of ``client``."""
        return f"2001:db8:113::{self.number}:10"

    @property
    def device(self) -> str:
        """The fabric's port for this node."""
        return f"port{self.number}"


def guests_are_possible() -> bool:
    """Return whether user-mode Linux, which Debian has for x86 only, runs on this machine."""
    return platform.machine() == "x86_64"


#: The nodes of tests.
NODES = (LabNode("lab-iptables", 1, False), LabNode("lab-ipvs", 2, True))


def demonstration_nodes(host_has_ipvs: bool) -> tuple[LabNode, ...]:
    """Return the nodes of the demonstration, one for each mode that this machine can show.

    The IPVS node is a network namespace where the host's kernel has ip_vs, else a guest with its own kernel. There is
    none where neither is possible.
    """
    nodes = (LabNode("lab-iptables", 1, False), LabNode("lab-nftables", 2, False))
    if host_has_ipvs or guests_are_possible():
        return (*nodes, LabNode("lab-ipvs", 3, not host_has_ipvs))
    return nodes


class Pod(NamedTuple):
    """A pod: its name, its last address byte within the node's range, and what it listens on."""

    name: str
    address: str
    address6: str
    ports: tuple[tuple[str, int], ...]


def pods_of(snapshot: Path, node: LabNode) -> list[Pod]:
    """Return the pods that the snapshot's EndpointSlices place on a node, each with the union of its ports."""
    document = json.loads(snapshot.read_text(encoding="utf-8"))
    names: dict[str, str] = {}
    ports: dict[str, set[tuple[str, int]]] = {}
    for item in document["items"]:
        if item["kind"] != "EndpointSlice" or item["addressType"] != "IPv4":
            continue
        for endpoint in item["endpoints"]:
            if endpoint.get("nodeName") != node.name:
                continue
            for address in endpoint["addresses"]:
                names[address] = endpoint["targetRef"]["name"]
                chosen = ports.setdefault(address, set())
                chosen.update((port["protocol"], port["port"]) for port in item["ports"] or [])
    return [
        Pod(name, address, f"fd00:10:244:{node.number}::{address.rsplit('.', 1)[1]}", tuple(sorted(ports[address])))
        for address, name in sorted(names.items())
    ]


def node_network(node: LabNode, device: str, nodes: Sequence[LabNode] = NODES) -> list[str]:
    """Return the lines of ip(8) that bring a node up on the fabric through ``device``."""
    lines = [] if device == "eth0" else [f"link set {device} name eth0"]
    lines += [
        "link set eth0 up",
        f"addr add {node.address}/24 dev eth0",
        f"route add default via {FABRIC}",
        f"addr add {node.address6}/64 dev eth0 nodad",
        f"route add default via {FABRIC6}",
    ]
    for other in nodes:
        if other != node:
            lines.append(f"route add {other.pods} via {other.address}")
            lines.append(f"route add {other.pods6} via {other.address6}")
    return lines


def fabric_network(nodes: Sequence[LabNode]) -> list[str]:
    """Return the lines of ip(8) for the fabric, whose ports to nodes and client exist already."""
    lines = ["link set lo up", "link add br0 type bridge", "link set br0 up", f"addr add {FABRIC}/24 dev br0"]
    lines += [f"addr add {FABRIC6}/64 dev br0 nodad", "link set client up", "addr add 203.0.113.1/24 dev client"]
    lines.append("addr add 2001:db8:113::1/64 dev client nodad")
    for node in nodes:
        table = 100 + node.number
        lines += [f"link set {node.device} master br0", f"link set {node.device} up"]
        lines.append(f"route add {node.pods} via {node.address}")
        lines.append(f"route add {node.pods6} via {node.address6}")
        lines.append(f"rule add pref {table} from 203.0.113.{16 * (node.number - 1)}/28 lookup {table}")
        lines.append(f"-6 rule add pref {table} from 2001:db8:113::{node.number}:0/112 lookup {table}")
        lines += [f"route add {destination} via {node.address} table {table}" for destination in SERVICE_RANGES]
        lines += [f"route add {destination} via {node.address6} table {table}" for destination in SERVICE_RANGES6]
    return lines


def client_network(nodes: Sequence[LabNode] = NODES) -> list[str]:
    """Return the lines of ip(8) for the client's namespace."""
    lines = ["link set lo up", "link set eth0 up"]
    for node in nodes:
        lines += [f"addr add {node.client}/24 dev eth0", f"addr add {node.stranger}/24 dev eth0"]
        lines.append(f"addr add {node.client6}/64 dev eth0 nodad")
    return [*lines, "route add default via 203.0.113.1", "route add default via 2001:db8:113::1"]
