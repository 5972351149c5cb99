# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packets with a source that is not of their sender, and neighbour discovery that was forwarded, pass no policy."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import socket
import struct
import time

import pytest

from tests.kernel.test_link_local_policies import deny
from tests.lab.system import ip_batch
from tests.netpol import cases
from tests.netpol.network import Network
from tests.netpol.running import Node

PORT = 8080
UDP, ICMPV6 = 17, 58
#: A pod whose egress is denied; one whose policies deny everything, except from the last; one with no policy.
DENIED, VICTIM, FREE, CLIENT_POD = "pod11", "pod12", "pod13", "pod14"
V4 = {name: f"10.244.1.{name[3:]}" for name in (DENIED, VICTIM, FREE, CLIENT_POD)}
V6 = {name: f"fd00:10:244:1::{name[3:]}" for name in (DENIED, VICTIM, FREE, CLIENT_POD)}
NODE4, NODE6 = "172.18.0.2", "fd00:172:18::2"
REMOTE4, REMOTE6 = "10.244.2.11", "fd00:10:244:2::11"
#: By which every pod on a bridge, or its node, can be reached.
EVERYBODY = {"224.0.0.1": "group", "255.255.255.255": "broadcast", "10.244.1.255": "subnet", "ff02::1": "group"}
BALANCED4, BALANCED6 = "10.96.0.50", "fd00:10:96::50"


class ForgingLab:
    """The small cluster, in which every host hears UDP, and any can send what it likes."""

    def __init__(self, directory, mode, bridge):
        self.network = Network(f"f{os.getpid()}", bridge)
        self.network.__enter__()
        self.node = Node(self.network, directory, mode)
        self._path = directory / "config.yaml"

    def close(self):
        self.network.destroy()

    def converge(self, *policies, without=frozenset(), **settings):
        """Enforce only these policies. ``without``: pods that are not known."""
        document = {"apiVersion": "kubenode.proxy/v1alpha1", "kind": "NodeProxyConfiguration"}
        document["networkPolicy"] = {"enabled": True, **settings}
        text = self._path.read_text(encoding="utf-8").partition("---")[0]
        self._path.write_text(f"{text}---\n{json.dumps(document)}\n", encoding="utf-8")
        self.node.environment.pop("LAB_NETWORK_POLICY", None)
        unknown = {V4[name] for name in without}
        objects = [
            item
            for key, item in cases.steps("ip-block")[0].objects.items()
            if key[0] != "NetworkPolicy" and item.get("status", {}).get("podIP") not in unknown
        ]
        return self.node.converge([*objects, *balanced(), *policies])

    def _listeners(self, name):
        namespace = self.network.namespaces[name]
        for family, kind, protocol in (
            (socket.AF_INET, socket.SOCK_DGRAM, 0),
            (socket.AF_INET6, socket.SOCK_DGRAM, 0),
            (socket.AF_INET6, socket.SOCK_RAW, ICMPV6),
        ):
            made = namespace.socket(family, kind, protocol)
            if kind == socket.SOCK_DGRAM:
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                made.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", PORT))
            yield made

    def received(self, flows):
        """Send packets, and return the names of the flows that arrive. ``flows``: by name: sender, receiver, packet."""
        with contextlib.ExitStack() as stack:
            receivers = {receiver for _sender, receiver, _packet in flows.values()}
            heard = {
                stack.enter_context(contextlib.closing(made)): name
                for name in receivers
                for made in self._listeners(name)
            }
            numbers = dict(enumerate(flows))
            found = set()
            # Again, because a neighbour that is not known yet may cost the first one.
            for _attempt in range(2):
                for number, name in numbers.items():
                    if name not in found:
                        sender, _receiver, packet = flows[name]
                        self._send(sender, packet + b"probe %d" % number)
                found.update(numbers[number] for number, at in _heard(heard, 0.8) if flows[numbers[number]][1] == at)
            return found

    def _send(self, sender, packet):
        six = packet[0] >> 4 == 6
        family = socket.AF_INET6 if six else socket.AF_INET
        body = packet[40:] if six else packet[20:]
        raw = bytearray(packet)
        if six:
            raw[4:6] = struct.pack("!H", len(body))
            target = (socket.inet_ntop(family, packet[24:40]), 0, 0, 0)
        else:
            target = (socket.inet_ntop(family, packet[16:20]), 0)
        namespace = self.network.namespaces[sender]
        if target[0] in EVERYBODY:
            # A raw socket would replace the source 0.0.0.0.
            with contextlib.closing(namespace.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)) as made:
                made.sendto(_framed(bytes(raw)), ("eth0", 0x86DD if six else 0x0800, 0, 0, b"\xff" * 6))
            return
        with contextlib.closing(namespace.socket(family, socket.SOCK_RAW, 255)) as made:
            made.sendto(_checked(bytes(raw)), target)


def _heard(listeners, seconds):
    """Yield the number in each packet that is heard, and the name of the listener."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for each in select.select(listeners, [], [], left)[0]:
            data = each.recv(2048)
            if b"probe " in data:
                yield int(data.partition(b"probe ")[2]), listeners[each]


def _checked(packet):
    """Fill in lengths and the checksum of UDP or ICMPv6."""
    six = packet[0] >> 4 == 6
    start = 40 if six else 20
    head, body = bytearray(packet[:start]), bytearray(packet[start:])
    protocol = head[6] if six else head[9]
    place = 6 if protocol == UDP else 2
    if protocol == UDP:
        body[4:6] = struct.pack("!H", len(body))
    if six:
        pseudo = bytes(head[8:40]) + struct.pack("!II", len(body), protocol)
        total = sum(struct.unpack(f"!{(len(pseudo) + len(body) + 1) // 2}H", pseudo + body + bytes(len(body) % 2)))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        body[place : place + 2] = struct.pack("!H", ~total & 0xFFFF)
    return bytes(head) + bytes(body)


def _framed(packet):
    """Fill in all that the kernel fills in for a raw socket."""
    if packet[0] >> 4 == 6:
        return _checked(packet)
    head = packet[:2] + struct.pack("!H", len(packet)) + packet[4:10] + bytes(2) + packet[12:20]
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    return _checked(head[:10] + struct.pack("!H", ~total & 0xFFFF) + head[12:] + packet[20:])


def udp(source, destination, port=PORT, source_port=5555):
    """Return a datagram without its payload, from any source."""
    return ip(source, destination, UDP, 64) + struct.pack("!HHHH", source_port, port, 0, 0)


def discovery(source, destination, kind, hop_limit):
    """Return an ICMPv6 message without its payload."""
    return ip(source, destination, ICMPV6, hop_limit) + struct.pack("!BBHI", kind, 0, 0, 0)


def ip(source, destination, protocol, hop_limit):
    ends = [ipaddress.ip_address(each).packed for each in (source, destination)]
    if ":" in source:
        return struct.pack("!IHBB", 6 << 28, 0, protocol, hop_limit) + b"".join(ends)
    return struct.pack("!BBHHHBBH", 0x45, 0, 0, 0, 0, hop_limit, protocol, 0) + b"".join(ends)


def balanced():
    """Return a Service whose only endpoint is the victim."""
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "balanced"},
        "spec": {
            "clusterIP": BALANCED4,
            "clusterIPs": [BALANCED4, BALANCED6],
            "ipFamilies": ["IPv4", "IPv6"],
            "ports": [{"port": PORT, "protocol": "UDP"}],
        },
    }
    for family, address in (("IPv4", V4[VICTIM]), ("IPv6", V6[VICTIM])):
        yield {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "namespace": "shop",
                "name": f"balanced-{family.lower()}",
                "labels": {"kubernetes.io/service-name": "balanced"},
            },
            "addressType": family,
            "ports": [{"name": "", "port": PORT, "protocol": "UDP"}],
            "endpoints": [{"addresses": [address], "nodeName": "node1", "conditions": {"ready": True}}],
        }


@pytest.fixture
def lab(tmp_path):
    def made(mode="nftables", bridge=False):
        opened.append(ForgingLab(tmp_path, mode, bridge))
        return opened[-1]

    opened = []
    yield made
    for each in opened:
        each.close()


ONLY_CLIENT = deny("shop", "db", "Ingress", "Egress")
ONLY_CLIENT["spec"]["ingress"] = [
    {"from": [{"namespaceSelector": {"matchLabels": {"team": "blue"}}, "podSelector": {"matchLabels": {"app": "db"}}}]}
]
POLICIES = (ONLY_CLIENT, deny("shop", "web", "Egress"))
GATEWAY = ("10.244.1.1", "fd00:10:244:1::1")
#: What nobody but the node, another node and the pods themselves may send from.
OF_OTHERS = {
    "node": (NODE4, NODE6),
    "gateway": GATEWAY,
    "remote": (REMOTE4, REMOTE6),
    "unknown": ("8.8.8.8", "fd99::77"),
}
OF_PODS = {name: (V4[name], V6[name]) for name in (VICTIM, CLIENT_POD)}
TO_VICTIM = {"itself": OF_PODS[VICTIM], "its Service": (BALANCED4, BALANCED6)}


def between(sender, receiver, sources, targets):
    """Return flows from each source to each target, in both families, by name."""
    return {
        f"{sender} as {source} to {target} of {receiver}, {family}": (sender, receiver, udp(*ends))
        for source, addresses in sources.items()
        for target, others in targets.items()
        for family, ends in zip(cases.FAMILIES, zip(addresses, others))
    }


def honest():
    """Return flows that no policy denies, from the senders' own addresses."""
    own = {name: (V4[name], V6[name]) for name in V4}
    remote = {"remote": (REMOTE4, REMOTE6)}
    return {
        **between(FREE, "node2", {"itself": own[FREE]}, remote),
        **between("node2", FREE, remote, {"itself": own[FREE]}),
        **between(FREE, CLIENT_POD, {"itself": own[FREE]}, {"itself": own[CLIENT_POD]}),
        **between(CLIENT_POD, VICTIM, {"itself": own[CLIENT_POD]}, TO_VICTIM),
        **between("node1", VICTIM, {"node": (NODE4, NODE6), "gateway": GATEWAY}, {"itself": own[VICTIM]}),
    }


def forged(bridge):
    """Return flows that policies deny, with sources that they would believe."""
    sources = {**OF_OTHERS, **OF_PODS, "no pod": ("10.244.1.99", "fd00:10:244:1::99")}
    return {
        **between(FREE, VICTIM, sources, TO_VICTIM),
        **between("node2", VICTIM, {name: OF_OTHERS[name] for name in ("node", "gateway")} | OF_PODS, TO_VICTIM),
        **between(DENIED, "node2", sources, {"remote": (REMOTE4, REMOTE6)}),
    }


@pytest.mark.parametrize(
    ("mode", "bridge"),
    [
        ("nftables", False),
        ("iptables", True),
        pytest.param("nftables", True, marks=pytest.mark.full),
        pytest.param("iptables", False, marks=pytest.mark.full),
        pytest.param("ipvs", False, marks=pytest.mark.ipvs),
        pytest.param("ipvs", True, marks=pytest.mark.ipvs),
    ],
)
def test_a_forged_source_reaches_nobody(lab, mode, bridge):
    forging = lab(mode, bridge)
    forging.converge(*POLICIES)
    found = forging.received({**forged(bridge), **honest(), **forwarded(bridge)})
    # What a router did not forward is needed. The kernel keeps router solicitations and redirects from sockets.
    needed = {name for name in forwarded(bridge) if name[1] == "node1" and name[3] == 255}
    assert found - needed == honest().keys() and (DENIED, "node1", 135, 255) in found


def forwarded(bridge):
    """Return neighbour discovery that policies deny, since a router forwards it, and such to the node itself."""
    ways = {
        (DENIED, "node2"): (V6[DENIED], REMOTE6),
        ("node2", VICTIM): (REMOTE6, V6[VICTIM]),
        (DENIED, "node1"): (V6[DENIED], NODE6),
        **({} if bridge else {(DENIED, VICTIM): (V6[DENIED], V6[VICTIM])}),
    }
    return {
        (*way, kind, limit): (*way, discovery(*ends, kind, limit))
        for way, ends in ways.items()
        for kind in range(133, 138)
        for limit in (64, 255)
    }


def tunnel(own, other, *routes):
    """Return lines for a host with a tunnel between node1 and node2. ``own``, ``other``: the numbers of the ends."""
    yield f"link add vx0 type vxlan id 7 local 172.18.0.{own} remote 172.18.0.{other} dstport 4789"
    yield from ("link set vx0 up", f"addr add 192.0.2.{own}/29 dev vx0", f"addr add fd07::{own}/64 dev vx0 nodad")
    for route in routes:
        yield f"route replace {route} via {f'fd07::{other}' if ':' in route else f'192.0.2.{other}'}"


def uplink(own, other):
    """Return lines for a host with another link between node1 and the router."""
    device = "eth1" if own == 2 else "uplink"
    yield f"link set {device} up"
    yield from (f"addr add 172.19.0.{own}/24 dev {device}", f"addr add fd00:172:19::{own}/64 dev {device} nodad")
    if own == 2:
        for option, ends, pods in (
            ("", ("172.18.0.2", V4[FREE], BALANCED4, "203.0.113.0/24"), "10.244.0.0/16"),
            ("-6 ", ("fd00:172:18::2", V6[FREE], BALANCED6, "2001:db8:113::/64"), "fd00:10:244::/48"),
        ):
            via = f"fd00:172:19::{other}" if option else f"172.19.0.{other}"
            yield f"{option}route add default via {via} dev eth1 table 100"
            yield f"{option}rule add pref 10 to {pods} lookup main"
            yield from (f"{option}rule add pref 20 from {end} lookup 100" for end in ends)
            yield f"{option}rule add pref 20 fwmark 7 lookup 100"
    else:
        yield from (
            f"route replace 10.244.1.0/24 via 172.19.0.{other}",
            f"route replace fd00:10:244:1::/64 via fd00:172:19::{other}",
        )


@pytest.mark.parametrize("bridge", [False, pytest.param(True, marks=pytest.mark.full)])
def test_other_interfaces_and_routes_are_left_alone(lab, bridge):
    """Asymmetric routes, tunnels, further interfaces of pods, and pods that are not known yet."""
    forging = lab(bridge=bridge)
    name = forging.network.full_name
    ip_batch([f"link add eth1 netns {name('node1')} type veth peer uplink netns {name('router')}"])
    ip_batch([*uplink(2, 1), *tunnel(2, 3, "10.244.3.0/24", "fd00:10:244:3::/64")], name("node1"))
    ip_batch(list(uplink(1, 2)), name("router"))
    locals_ = ["route add local 10.244.3.0/24 dev lo", "route add local fd00:10:244:3::/64 dev lo"]
    ip_batch([*tunnel(3, 2, "10.244.1.0/24", "fd00:10:244:1::/64"), *locals_], name("node2"))
    ip_batch([f"link add net1 netns {name(FREE)} type veth peer second netns {name('node1')}"])
    ip_batch(["link set net1 up", "addr add 192.168.9.13/24 dev net1"], name(FREE))
    ip_batch(["link set second up", "addr add 192.168.9.1/24 dev second"], name("node1"))
    forging.converge(*POLICIES, without={CLIENT_POD})
    tunnelled = {"tunnel": ("10.244.3.11", "fd00:10:244:3::11")}
    own = {each: {"itself": (V4[each], V6[each])} for each in V4}
    flows = {
        **between("client", FREE, {"client": ("203.0.113.10", "2001:db8:113::10")}, own[FREE]),
        **between("node2", FREE, tunnelled, own[FREE]),
        **between(FREE, "node2", own[FREE], tunnelled),
        **between(FREE, "node1", own[FREE], {"node": (NODE4, NODE6)}),
        **between(FREE, CLIENT_POD, own[FREE], own[CLIENT_POD]),
        **between(CLIENT_POD, FREE, own[CLIENT_POD], own[FREE]),
        "second interface": (FREE, "node1", udp("192.168.9.13", "192.168.9.1")),
    }
    found = forging.received({**flows, **forged(bridge)})
    assert (flows.keys() - found, found - flows.keys()) == (set(), set())


def test_an_operator_lets_pods_send_from_exempt_sources(lab):
    """An address of another pod is not exempt, although the ranges contain it."""
    forging = lab()
    ranges = ["198.51.100.0/24", "2001:db8:51::/64", "10.244.1.0/24", "fd00:10:244:1::/64"]
    sources = {"a client": ("198.51.100.7", "2001:db8:51::7")}
    open_to, closed_to = (between(each, "node2", sources, {"remote": (REMOTE4, REMOTE6)}) for each in (FREE, DENIED))
    forging.converge(*POLICIES, exemptSources=ranges, exemptSourceNamespaces=["bank"])
    assert forging.received({**open_to, **closed_to, **forged(False)}) == open_to.keys()
    forging.converge(*POLICIES, checkSources=False)
    assert forging.received(between(FREE, VICTIM, OF_PODS, TO_VICTIM)), "with no check they pass"


def to_everybody(sender, receiver, sources=()):
    """Return flows to the groups and broadcast addresses of a link, by name. ``sources``: the sender's if empty."""
    return {
        f"{sender} as {source} to {target}, at {receiver}": (sender, receiver, udp(source, target))
        for source in sources or (V4[sender], V6[sender])
        for target in EVERYBODY
        if (":" in source) == (":" in target)
    }


def test_no_policy_is_passed_by_broadcast_or_multicast(lab):
    """Nor by sending from no address, which hosts accept if it is sent to a broadcast address."""
    forging = lab(bridge=True)
    forging.converge()
    reaching, heard_by_node = to_everybody(FREE, VICTIM), to_everybody(FREE, "node1")
    nameless = {**to_everybody(FREE, VICTIM, ["0.0.0.0"]), **to_everybody(FREE, "node1", ["0.0.0.0"])}
    nameless = {name: flow for name, flow in nameless.items() if "255.255.255.255" in name}
    everything = {**reaching, **heard_by_node, **nameless}
    assert forging.received(everything) == everything.keys()
    forging.converge(deny("shop", "db", "Ingress"))
    found = forging.received({**everything, **honest()})
    assert found >= heard_by_node.keys() and not found & reaching.keys()
    assert not [name for name in found & nameless.keys() if VICTIM in name]
    forging.converge(deny("bank", "web", "Egress"))
    assert forging.received(everything) == set()


CLUSTER_DENY = {
    "apiVersion": "policy.networking.k8s.io/v1alpha2",
    "kind": "ClusterNetworkPolicy",
    "metadata": {"name": "closed"},
    "spec": {
        "tier": "Admin",
        "priority": 1,
        "subject": {"namespaces": {}},
        "egress": [{"action": "Deny", "to": [{"networks": ["0.0.0.0/0", "::/0"]}]}],
    },
}


def test_a_packet_without_ports_passes_no_policy(lab):
    """Others read one with a header that ends before the ports, and headers before that may be long."""
    forging = lab()
    ends = {socket.AF_INET: (V4[FREE], REMOTE4), socket.AF_INET6: (V6[FREE], REMOTE6)}
    namespaces = forging.network.namespaces

    def send():
        for family, (source, destination) in ends.items():
            with contextlib.closing(namespaces[FREE].socket(family, socket.SOCK_RAW, 255)) as made:
                for number in (6, UDP, 132):
                    packet = bytearray(ip(source, destination, number, 64) + b"abc")
                    if family == socket.AF_INET6:
                        packet[5] = 3
                    made.sendto(packet, (destination, 0))

    def passed():
        everything = namespaces["node2"].socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
        found = set()
        with contextlib.closing(everything) as link:
            for _attempt in range(2):
                send()
                found.update(_arriving(link, 0.8))
        return found

    assert passed() == {(version, number) for version in (4, 6) for number in (6, UDP, 132)}
    forging.converge(CLUSTER_DENY, clusterNetworkPolicies=True)
    assert not passed()
    forging.converge(deny("bank", "web", "Egress"))
    assert not passed()


def _arriving(link, seconds):
    """Yield the version and the protocol of each packet for the remote pods."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([link], [], [], left)[0]:
            data = link.recv(2048)
            version = data[0] >> 4
            if (version, data[16:20]) == (4, ipaddress.ip_address(REMOTE4).packed):
                yield 4, data[9]
            elif (version, data[24:40]) == (6, ipaddress.ip_address(REMOTE6).packed):
                yield 6, data[6]
