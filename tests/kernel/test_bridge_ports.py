# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A port of a bridge gets no frame of another pod's address through, and everything that a pod needs."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import struct
import subprocess
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nflog import PacketLog
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.traffic.element_counters import (
    forged_packets,
)
from tests.kernel.test_forged_sources import (
    BALANCED4,
    BALANCED6,
    CLIENT_POD,
    FREE,
    GATEWAY,
    POLICIES,
    V4,
    V6,
    VICTIM,
    ForgingLab,
    _framed,
    between,
    ip,
    udp,
)
from tests.lab.system import ip_batch

ARP, IPV4, IPV6 = 0x0806, 0x0800, 0x86DD
EVERYBODY = b"\xff" * 6
#: A pod that no policy isolates.
RECEIVER = CLIENT_POD
REMOTE = ("10.244.2.11", "fd00:10:244:2::11")
SOLICITATION, ADVERTISEMENT, ROUTER, REDIRECT = 135, 136, 134, 137
TAGS = [b"\x81\0\0\0", b"\x88\xa8\0\0", b"\x81\0\0\0\x81\0\0\0"]
#: What precedes a packet in a frame of another protocol: one of its own, MPLS, LLC.
PROTOCOLS = [b"\x88\xb5\0\0", b"\x88\x47\0\0\x01\x40", b"\0\x60\xaa\xaa\x03\0\0\0"]


class PortLab(ForgingLab):
    """The small cluster on a bridge, with frames instead of packets."""

    def raw(self, name):
        made = self.network.namespaces[name].socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        made.bind(("eth0", 3))
        return made

    def hardware(self, name, device="eth0"):
        shown = self.inside(name, "ip", "-j", "link", "show", device)
        return bytes.fromhex(json.loads(shown)[0]["address"].replace(":", ""))

    def inside(self, name, *command):
        return subprocess.check_output(["ip", "netns", "exec", self.network.full_name(name), *command], text=True)

    def arrived(self, frames, sender=FREE, receiver=RECEIVER):
        """Send frames from a pod, and return the names of those that reach another one. ``frames``: by name."""
        numbers = dict(enumerate(frames))
        found, target, source = set(), self.hardware(receiver), self.hardware(sender)
        with contextlib.closing(self.raw(sender)) as out, contextlib.closing(self.raw(receiver)) as heard:
            for number, name in numbers.items():
                tag, kind, body = frames[name]
                text = b"probe %d." % number
                packet = body + text if kind == ARP else _framed(lengthened(body + text))
                out.send((target if kind != ARP else EVERYBODY) + source + tag + struct.pack("!H", kind) + packet)
            end = time.monotonic() + 0.5
            while (left := end - time.monotonic()) > 0:
                if select.select([heard], [], [], left)[0]:
                    data = heard.recv(2048)
                    if b"probe " in data:
                        found.add(numbers[int(data.partition(b"probe ")[2].partition(b".")[0])])
        return found


def lengthened(packet):
    """Fill in the length of an IPv6 packet."""
    return packet if packet[0] >> 4 == 4 else packet[:4] + struct.pack("!H", len(packet) - 40) + packet[6:]


def arp(sender, target, hardware=b"\2\0\0\0\0\1", operation=2):
    """Return a claim that ``sender`` is at a hardware address, to everybody."""
    ends = [ipaddress.ip_address(each).packed for each in (sender, target)]
    return b"", ARP, struct.pack("!HHBBH", 1, IPV4, 6, 4, operation) + hardware + ends[0] + EVERYBODY + ends[1]


def message(source, destination, kind, target, limit=255):
    """Return a message of neighbour discovery about a target, with the link-layer address of the sender."""
    about = ipaddress.ip_address(target).packed
    flags = 0x20000000 if kind == ADVERTISEMENT else 0
    body = struct.pack("!BBHI", kind, 0, 0, flags) + about + struct.pack("!BB6s", 2, 1, b"\2\0\0\0\0\1")
    return b"", IPV6, ip(source, destination, 58, limit) + body


def packet(source, destination, tag=b""):
    return tag, IPV6 if ":" in source else IPV4, udp(source, destination)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    made = PortLab(tmp_path_factory.mktemp("ports"), "nftables", True)
    yield made
    made.close()


OWN_LOCAL = "fe80::1"


def claims(*, of, local=OWN_LOCAL):
    """Return frames by which a pod claims addresses. ``of``: pairs of addresses by the name of their owner."""
    found = {}
    for name, (four, six) in of.items():
        found[f"ARP reply of {name}"] = arp(four, V4[RECEIVER])
        found[f"ARP request of {name}"] = arp(four, V4[RECEIVER], operation=1)
        found[f"gratuitous ARP of {name}"] = arp(four, four)
        found[f"advertisement of {name}"] = message(local, V6[RECEIVER], ADVERTISEMENT, six)
        found[f"unsolicited advertisement of {name}"] = message(local, "ff02::1", ADVERTISEMENT, six)
        found[f"solicitation from {name}"] = message(six, V6[RECEIVER], SOLICITATION, V6[RECEIVER])
        found[f"IPv4 from {name}"] = packet(four, V4[RECEIVER])
        found[f"IPv6 from {name}"] = packet(six, V6[RECEIVER])
    return found


OTHERS = {
    "the victim": (V4[VICTIM], V6[VICTIM]),
    "the receiver": (V4[RECEIVER], V6[RECEIVER]),
    "the gateway": GATEWAY,
    "a remote pod": REMOTE,
    "nobody": ("10.244.1.99", "fd00:10:244:1::99"),
}
ROUTING = {
    "a router advertisement": message(OWN_LOCAL, "ff02::1", ROUTER, "::"),
    "a redirect": message(OWN_LOCAL, V6[RECEIVER], REDIRECT, REMOTE[1]),
}
#: Address assignment, and what each host of a link sends.
NEEDED = {
    "DHCP": (b"", IPV4, udp("0.0.0.0", "255.255.255.255", 67, 68)),
    "DHCPv6": (b"", IPV6, udp(OWN_LOCAL, "ff02::1:2", 547, 546)),
    "ARP probe": arp("0.0.0.0", V4[FREE], operation=1),
    "duplicate address detection": message("::", "ff02::1:ff00:13", SOLICITATION, V6[FREE]),
    "router solicitation": message(OWN_LOCAL, "ff02::2", 133, "::"),
    "listener report": message("::", "ff02::16", 143, "::", 1),
    "link-local advertisement": message(OWN_LOCAL, "ff02::1", ADVERTISEMENT, OWN_LOCAL),
}


def own():
    return claims(of={"itself": (V4[FREE], V6[FREE])})


def test_a_port_claims_only_the_addresses_of_its_pod(lab):
    """No pod is isolated here, so that nothing but the ports is judged."""
    lab.converge()
    sent = {**claims(of=OTHERS), **ROUTING, **own(), **NEEDED}
    assert lab.arrived(sent) == {**own(), **NEEDED}.keys()


def test_frames_that_no_policy_judges_do_not_pass(lab):
    """The kernel shows the IP hooks no other protocol and no tag, and a pod accepts the tag 0 as none."""
    lab.converge(*POLICIES)
    sent = {start: packet(V6[FREE], V6[VICTIM], start) for start in (*TAGS, *PROTOCOLS)}
    assert lab.arrived(sent) == set()
    lab.converge(*POLICIES, checkSources=False)
    assert lab.arrived(sent) == sent.keys()


@pytest.fixture
def filtering(lab):
    """The bridge filters VLANs, which not every kernel can; that of Debian can."""

    def configured(on):
        ip_batch([f"link set cni0 type bridge vlan_filtering {on}"], lab.network.full_name("node1"))

    configured(1)
    yield lab
    configured(0)


@pytest.mark.ipvs
def test_ports_of_a_bridge_that_filters_vlans_are_checked(filtering):
    """Tag 1 is the default of all ports, so its frames reach a pod without the tag."""
    filtering.converge()
    sent = {**claims(of=OTHERS), **own(), **NEEDED}
    default = {f"tag 1: {name}": (b"\x81\0\0\1", *frame[1:]) for name, frame in sent.items()}
    priority = {f"tag 0: {name}": (b"\x81\0\0\0", *frame[1:]) for name, frame in sent.items()}
    assert filtering.arrived({**sent, **default, **priority}) == {**own(), **NEEDED}.keys()


@pytest.mark.ipvs
def test_trunks_of_a_bridge_that_filters_vlans_pass_tags(filtering):
    """Their frames are of networks of the operator's, which no policy is about."""
    node = "node1"
    for pod in (FREE, RECEIVER):
        filtering.inside(node, "bridge", "vlan", "add", "dev", f"veth{pod[3:]}", "vid", "7")
    filtering.converge(*POLICIES)
    try:
        tagged = {"tag 7": packet("192.0.2.1", "192.0.2.2", b"\x81\0\0\7")}
        assert filtering.arrived(tagged) == tagged.keys()
    finally:
        for pod in (FREE, RECEIVER):
            filtering.inside(node, "bridge", "vlan", "del", "dev", f"veth{pod[3:]}", "vid", "7")


@pytest.mark.ipvs
def test_ports_are_checked_beside_ipvs(tmp_path):
    with contextlib.closing(PortLab(tmp_path, "ipvs", True)) as lab:
        lab.converge()
        sent = {**claims(of=OTHERS), **ROUTING, **own(), **NEEDED}
        assert lab.arrived(sent) == {**own(), **NEEDED}.keys()
        itself = between(VICTIM, VICTIM, {"itself": (V4[VICTIM], V6[VICTIM])}, {"its Service": (BALANCED4, BALANCED6)})
        assert lab.received(itself) == itself.keys()


def test_a_change_of_the_mode_leaves_the_table_alone(lab):
    """Its chain keeps its handle, so that no frame passes unchecked meanwhile; a cleanup removes it."""

    def shown():
        return lab.node.inside("nft", "-a", "-s", "list", "ruleset", "bridge")

    lab.converge(*POLICIES)
    before = shown()
    assert "# handle" in before and f'"veth13" . {V4[FREE]}' in before
    for mode in ("iptables", "nftables"):
        lab.node.environment["LAB_MODE"] = mode
        lab.converge(*POLICIES)
        assert shown() == before
    lab.node.clean_up()
    assert shown() == ""


def test_dropped_frames_are_counted_and_logged(lab):
    """A log has no line for a claim by ARP, which is no packet between two addresses."""
    lab.converge(logDenied=True, logGroup=9)
    pretended = OTHERS["the victim"]
    sent = {"ARP": arp(pretended[0], V4[RECEIVER]), **{at: packet(at, V4[RECEIVER]) for at in pretended[:1]}}
    sent["IPv6"] = packet(pretended[1], V6[RECEIVER])
    with lab.network.namespaces["node1"].inside():
        before = forged_packets()
        log = PacketLog(9)
    with contextlib.closing(log):
        assert lab.arrived(sent) == set()
        logged = []
        end = time.monotonic() + 10
        # The kernel collects packets for a second.
        while len(logged) < 2 and select.select([log], [], [], max(0.0, end - time.monotonic()))[0]:
            logged += [(item.prefix, item.source) for item in log.packets()]
    assert logged == [("denied forged ", ipaddress.ip_address(each).packed) for each in pretended]
    with lab.network.namespaces["node1"].inside():
        after = forged_packets()
    assert {name: count - before[name] for name, count in after.items() if count != before[name]} == {"veth13": 3}


def test_duplicate_addresses_are_detected(lab):
    """A pod gets its own address, and learns that another one has the victim's."""
    lab.converge(*POLICIES)
    name = lab.network.full_name(FREE)
    lab.inside(FREE, "sysctl", "-qw", "net.ipv6.conf.eth0.accept_dad=1", "net.ipv6.conf.eth0.dad_transmits=1")
    ip_batch([f"addr del {V6[FREE]}/64 dev eth0", f"addr add {V6[FREE]}/64 dev eth0"], name)
    ip_batch([f"addr add {V6[VICTIM]}/64 dev eth0"], name)
    try:
        states = {}
        end = time.monotonic() + 5
        while states.get(V6[FREE]) != "used" or states.get(V6[VICTIM]) != "refused":
            assert time.monotonic() < end, states
            shown = json.loads(lab.inside(FREE, "ip", "-6", "-j", "addr", "show", "dev", "eth0"))
            for item in shown[0]["addr_info"]:
                state = "refused" if item.get("dadfailed") else "waits" if item.get("tentative") else "used"
                states[item["local"]] = state
            time.sleep(0.1)
    finally:
        ip_batch([f"addr del {V6[VICTIM]}/64 dev eth0", "route replace default via fd00:10:244:1::1"], name)


def test_a_pod_reaches_itself_through_its_service(lab):
    """The bridge sends the packet back to the port that it came from."""
    lab.converge()
    itself = between(VICTIM, VICTIM, {"itself": (V4[VICTIM], V6[VICTIM])}, {"its Service": (BALANCED4, BALANCED6)})
    assert lab.received(itself) == itself.keys()


def test_pods_that_an_operator_exempts_claim_their_ranges(lab):
    """The address of another pod is not exempt, although the range contains it."""
    ranges = ["10.244.1.0/24", "fd00:10:244:1::/64"]
    lab.converge(*POLICIES, exemptSources=ranges, exemptSourceNamespaces=["bank"])
    exempt = claims(of={name: OTHERS[name] for name in ("nobody",)})
    closed = claims(of={name: OTHERS[name] for name in ("the victim", "the receiver")})
    assert lab.arrived({**exempt, **closed, **own()}) == {**exempt, **own()}.keys()


def test_a_pod_that_adds_the_address_of_another_sends_nothing_from_it(lab):
    """Nor does the other one lose it, although a single look cannot know whose it was first."""
    name = lab.network.full_name("pod15")
    ip_batch([f"addr add {V4[FREE]}/24 dev eth0", f"addr add {V6[FREE]}/64 dev eth0 nodad"], name)
    try:
        lab.converge(*POLICIES)
        others = claims(of={key: OTHERS[key] for key in ("the victim", "the receiver")})
        assert lab.arrived({**own(), **others}) == own().keys()
        assert lab.arrived(own(), sender="pod15") == set()
    finally:
        ip_batch([f"addr del {V4[FREE]}/24 dev eth0", f"addr del {V6[FREE]}/64 dev eth0"], name)
