# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The network of the lab, built of network namespaces.

``node`` is the node under test, ``pod1`` .. ``pod3`` its pods; ``peer`` and ``peer3`` are two other nodes, each
together with its pods; ``fabric`` is the router between them; ``client`` holds hosts outside of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.lab.system import ip_batch

from .addressing import (
    CLIENT_HOSTS,
    CLIENT_PREFIX,
    FABRIC,
    FABRIC_CLIENT,
    FABRIC_SECOND,
    FORWARDED_FROM_NODE,
    HOST_BITS,
    NODE,
    NODE_SECOND,
    PEERS,
    POD_GATEWAY,
    PODS,
    ROUTED_TO_NODE,
    SUBNET_BITS,
    pod_address,
)
from .namespaces import NETNS_DIRECTORY, NamespaceSet, pod_links

VERSIONS = (4, 6)
ROUTERS = ("node", "fabric", "peer", "peer3")
# The fabric marks its answers from addresses that are not its own, and sends them back to the node.
OUTSIDE_MARK = 1
TABLE_ANSWER_ALL = 110
TABLE_BACK_TO_NODE = 120

_EVERYWHERE = {
    "ipv4/conf/all/rp_filter": 0,
    "ipv4/conf/default/rp_filter": 0,
    # The source ports that cases give to flows: a socket of the agent in userspace mode must not have one of them.
    "ipv4/ip_local_reserved_ports": "40001-44001",
    # Rejections are counted one by one, so rate limiting must not suppress any. An empty mask limits no type of ICMPv6;
    # the kernel accepts an empty line for it, but not an empty text.
    "ipv4/icmp_ratemask": 0,
    "ipv4/icmp_ratelimit": 0,
    "ipv6/icmp/ratelimit": 0,
    "ipv6/icmp/ratemask": "\n",
    # Addresses must be usable at once.
    "ipv6/conf/all/accept_dad": 0,
    "ipv6/conf/default/accept_dad": 0,
    "ipv6/conf/default/dad_transmits": 0,
    "ipv6/conf/default/accept_ra": 0,
    "ipv4/tcp_syn_retries": 2,
}
_ON_ROUTERS = {
    "ipv4/ip_forward": 1,
    "ipv6/conf/all/forwarding": 1,
    "ipv4/conf/all/send_redirects": 0,
    "ipv4/conf/default/send_redirects": 0,
}
_ON_OTHER_ROUTERS = {
    "ipv4/ip_nonlocal_bind": 1,
    "ipv6/ip_nonlocal_bind": 1,
    "bridge/bridge-nf-call-iptables": 0,
    "bridge/bridge-nf-call-ip6tables": 0,
}
# The fabric both forwards packets to the node and answers packets from it for the same address. Early demultiplexing
# would give forwarded packets to its own sockets.
_ON_FABRIC = {"ipv4/ip_early_demux": 0, "ipv4/tcp_early_demux": 0, "ipv4/udp_early_demux": 0}
_WITH_BRIDGE = {"bridge/bridge-nf-call-iptables": 1, "bridge/bridge-nf-call-ip6tables": 1}

# (namespace, device) at both ends of every cable. On a node with its own kernel the devices are called eth0 and so on
# until they are renamed, so those that keep these names come first.
_CABLES = (
    ("node", "eth0", "fabric", "n-eth0"),
    ("node", "eth1", "fabric", "n-eth1"),
    ("peer", "eth0", "fabric", "p-eth0"),
    ("peer3", "eth0", "fabric", "q-eth0"),
    ("client", "eth0", "fabric", "c-eth0"),
    *((pod, "eth0", "node", "veth" + pod) for pod in PODS),
)
_HOSTS = ("client", "peer", "peer3", *PODS)
_UP = ["link set lo up", "link set eth0 up"]


def _cable_of_node(cable: tuple[str, str, str, str]) -> tuple[str, str, str]:
    """Return the node's device, the namespace at the other end and the device there."""
    name, device, other, other_device = cable
    return (device, other, other_device) if name == "node" else (other_device, name, device)


class Topology(NamespaceSet):
    """The namespaces of one lab. *instance* keeps several labs on one machine apart; *pod_network* is ``ptp``
    (a routed veth for each pod) or ``bridge`` (all pods on the bridge cni0).

    With *plug* the node is a separate machine instead of a namespace. For each of its devices *plug* is called with the
    namespace at the other end of the cable, and must create the named device there. The caller gives the machine
    :attr:`node_devices` in their order, :meth:`node_sysctls` and :meth:`node_lines`.
    """

    node_devices = tuple(_cable_of_node(cable)[0] for cable in _CABLES if "node" in cable)

    def __init__(self, instance: str, pod_network: str = "ptp", plug: Callable[[str, str], None] | None = None) -> None:
        names = [name for name in ("node", "fabric", *_HOSTS) if name != "node" or plug is None]
        super().__init__(f"kpl{instance}-", names)
        self._bridge = pod_network == "bridge"
        self._plug = plug

    def build(self) -> None:
        """Build everything in new namespaces. Raises LabError if ip(8) refuses a line."""
        self.create()
        self._set_sysctls()
        self._make_cables()
        for name in self.names:
            ip_batch(list(self._lines(name)), self.full_name(name))

    def _make_cables(self) -> None:
        lines = []
        for cable in _CABLES:
            if self._plug is not None and "node" in cable:
                _device, other, other_device = _cable_of_node(cable)
                self._plug(NETNS_DIRECTORY + self.full_name(other), other_device)
            else:
                name, device, other, other_device = cable
                ends = (self.full_name(name), self.full_name(other))
                lines.append(f"link add {device} netns {ends[0]} type veth peer name {other_device} netns {ends[1]}")
        ip_batch(lines)

    def node_sysctls(self) -> dict[str, str]:
        """Return the node's kernel parameters as paths below /proc/sys; its devices are still called eth0, eth1, ..."""
        values = self._sysctls("node")
        for number in range(len(self.node_devices)):
            # The defaults apply to devices created later, not to existing ones.
            values.update({path.replace("default", f"eth{number}"): value for path, value in values.items()})
        return {f"net/{path}": str(value) for path, value in values.items()}

    def node_lines(self) -> list[str]:
        """Return the lines of ip(8) that set up the node, whose devices are still called eth0, eth1, ..."""
        lines = [f"link set eth{number} name {device}" for number, device in enumerate(self.node_devices)]
        lines = [line for line in lines if line.split()[2] != line.split()[4]]
        return [*lines, *self._lines("node")]

    def _lines(self, name: str) -> Iterator[str]:
        yield from self._links(name)
        for version in VERSIONS:
            yield from self._addresses_and_routes(name, version)

    def _set_sysctls(self) -> None:
        for name, namespace in self.namespaces.items():
            namespace.set_sysctls(self._sysctls(name))

    def _sysctls(self, name: str) -> dict[str, object]:
        values: dict[str, object] = dict(_EVERYWHERE)
        if name in ROUTERS:
            values.update(_ON_ROUTERS)
            if name != "node":
                values.update(_ON_OTHER_ROUTERS)
        if name == "fabric":
            values.update(_ON_FABRIC)
        if name == "node" and self._bridge:
            values.update(_WITH_BRIDGE)
        return values

    def _links(self, name: str) -> Iterator[str]:
        yield from _UP if name != "fabric" else _UP[:1]
        if name == "node":
            yield "link set eth1 up"
            yield from pod_links([f"veth{pod}" for pod in PODS], bridge=self._bridge)
        if name == "fabric":
            yield from ("link add br0 type bridge", "link set br0 up")
            for device in ("n-eth0", "p-eth0", "q-eth0"):
                yield from (f"link set {device} master br0", f"link set {device} up")
            yield from ("link set n-eth1 up", "link set c-eth0 up")

    def _addresses_and_routes(self, name: str, version: int) -> Iterator[str]:
        if name == "node":
            yield from self._node(version)
        elif name == "fabric":
            yield from _fabric(version)
        elif name == "client":
            for host in CLIENT_HOSTS:
                yield _add_address(f"{CLIENT_PREFIX[version]}{host}", SUBNET_BITS[version], "eth0")
            yield f"route add default via {FABRIC_CLIENT[version]}"
        elif name in PEERS:
            yield _add_address(PEERS[name].address[version], SUBNET_BITS[version], "eth0")
            yield f"route add local {PEERS[name].pod_network[version]} dev lo"
            yield f"route add default via {NODE[version]}"
        else:
            yield from self._pod(name, version)

    def _node(self, version: int) -> Iterator[str]:
        yield _add_address(NODE[version], SUBNET_BITS[version], "eth0")
        yield _add_address(NODE_SECOND[version], SUBNET_BITS[version], "eth1")
        yield f"route add default via {FABRIC[version]}"
        yield from _routes_to_peers(version)
        if self._bridge:
            yield _add_address(POD_GATEWAY[version], SUBNET_BITS[version], "cni0")
            return
        for pod in PODS:
            yield _add_address(POD_GATEWAY[version], HOST_BITS[version], "veth" + pod)
            yield f"route add {pod_address(pod, version)}/{HOST_BITS[version]} dev veth{pod}"

    def _pod(self, pod: str, version: int) -> Iterator[str]:
        bits = SUBNET_BITS if self._bridge else HOST_BITS
        yield _add_address(pod_address(pod, version), bits[version], "eth0")
        if not self._bridge:
            yield f"route add {POD_GATEWAY[version]} dev eth0"
        yield f"route add default via {POD_GATEWAY[version]}"


def _fabric(version: int) -> Iterator[str]:
    yield _add_address(FABRIC[version], SUBNET_BITS[version], "br0")
    yield _add_address(FABRIC_SECOND[version], SUBNET_BITS[version], "n-eth1")
    yield _add_address(FABRIC_CLIENT[version], SUBNET_BITS[version], "c-eth0")
    yield from _routes_to_peers(version)
    for network in ROUTED_TO_NODE[version]:
        yield f"route add {network} via {NODE[version]}"
    family, everything = ("", "default") if version == 4 else ("-6 ", "::/0")
    for network in FORWARDED_FROM_NODE[version]:
        yield f"{family}rule add pref 100 iif br0 to {network} lookup main"
    yield f"{family}rule add pref {TABLE_ANSWER_ALL} iif br0 lookup {TABLE_ANSWER_ALL}"
    yield f"route add local {everything} dev lo table {TABLE_ANSWER_ALL}"
    yield f"{family}rule add pref {TABLE_BACK_TO_NODE} fwmark {OUTSIDE_MARK} lookup {TABLE_BACK_TO_NODE}"
    yield f"route add default via {NODE[version]} table {TABLE_BACK_TO_NODE}"


def _routes_to_peers(version: int) -> Iterator[str]:
    for peer in PEERS.values():
        yield f"route add {peer.pod_network[version]} via {peer.address[version]}"


def _add_address(address: str, bits: int, device: str) -> str:
    return f"addr add {address}/{bits} dev {device}" + (" nodad" if ":" in address else "")
