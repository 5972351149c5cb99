# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Service traffic beside the rules and addresses of kube-proxy's usual neighbours; docs/other-programs.md lists them.

A convergence, the repair of drift and clean-up leave each neighbour's rules as they were.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters import sysctl_profile
from tests.kernel import neighbour_rules
from tests.kernel.external_rules import has_nftables
from tests.kernel.neighbour_node import NODE_PORT, PLACES, Flow, Node, add, drift, holds, state
from tests.kernel.neighbour_rules import IN_A_POD, NAMES_ON_THE_NODE, Neighbour, node_local_dns, on_the_node
from tests.kernel.packet_network import NAMES, Network
from tests.lab.system import run
from tests.waiting import wait_for

FAMILIES = ("IPv4", pytest.param("IPv6", marks=pytest.mark.full))
#: In ipvs mode with the filter backend. User-mode Linux has legacy iptables and no nf_tables with NAT; QEMU has all but
#: that.
IPVS_IPTABLES = pytest.param("ipvs iptables", marks=(pytest.mark.uml, pytest.mark.full))
IPVS_NFTABLES = pytest.param("ipvs nftables", marks=pytest.mark.ipvs)
IPVS = (IPVS_IPTABLES, IPVS_NFTABLES)
#: Both in each run: where the packets of the two meet different rules of others.
IPVS_BOTH = (pytest.param("ipvs iptables", marks=(pytest.mark.uml, pytest.mark.ipvs)), IPVS_NFTABLES)
MODES = ("iptables", "nftables", *IPVS)
#: Neighbours whose rules in the tables of iptables only nft understands, so that iptables mode cannot use these tables.
NFT_ONLY = ("tailscale-nftables",)
WITH_IPTABLES = tuple(name for name in NAMES_ON_THE_NODE if name not in NFT_ONLY)


@pytest.fixture
def family() -> str:
    """Return the family of tests that are for one only."""
    return "IPv4"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> Iterator[Node]:
    """Yield the node among its pods."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    network = Network()
    try:
        yield Node(network, tmp_path, PLACES[family])
    finally:
        network.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["iptables", pytest.param("ipvs iptables", marks=pytest.mark.ipvs)])
@pytest.mark.parametrize("name", NFT_ONLY)
def test_iptables_names_the_table_that_it_cannot_use(node: Node, name: str, mode: str, family: str) -> None:
    add(node.at, on_the_node(family)[name])
    before = state()
    words = rf"table (nat|filter) of {family}: .* cannot show it, .* only nft understands"
    with pytest.raises(KernelError, match=words):
        node.converge(mode)
    assert state() == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", WITH_IPTABLES)
def test_services_beside_a_neighbour_in_iptables_mode(node: Node, name: str, family: str) -> None:
    serve_beside(node, "iptables", on_the_node(family)[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES_ON_THE_NODE)
def test_services_beside_a_neighbour_in_nftables_mode(node: Node, name: str, family: str) -> None:
    serve_beside(node, "nftables", on_the_node(family)[name])


def ipvs_beside(name: str) -> Any:
    """Return the parameter for ipvs mode with iptables beside a neighbour, on the kernels that support both."""
    if on_the_node("IPv4")[name].nft:
        return pytest.param(name, marks=pytest.mark.ipvs)
    quick = () if name.startswith("calico") else (pytest.mark.full,)
    return pytest.param(name, marks=(pytest.mark.uml, pytest.mark.ipvs, *quick))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [ipvs_beside(name) for name in WITH_IPTABLES])
def test_services_beside_a_neighbour_in_ipvs_mode(node: Node, name: str, family: str) -> None:
    serve_beside(node, "ipvs iptables", on_the_node(family)[name])


@pytest.mark.ipvs
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES_ON_THE_NODE)
def test_services_beside_a_neighbour_in_ipvs_mode_without_iptables(node: Node, name: str, family: str) -> None:
    serve_beside(node, "ipvs nftables", on_the_node(family)[name])


def serve_beside(node: Node, mode: str, neighbour: Neighbour) -> None:
    """Check that Services answer beside the neighbour, before and after a repair, and that clean-up leaves it."""
    add(node.at, neighbour)
    before = state()
    assert node.converge(mode).changed
    assert node.outcomes() == node.at.served(mode)
    drift(node.at, mode)
    assert node.converge(mode).changed and not node.converge(mode).changed
    assert holds(state(), before)
    assert node.outcomes() == node.at.served(mode)
    assert node.leave().changed
    assert state() == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_felix_finds_the_mode_of_the_node(node: Node, mode: str, family: str) -> None:
    """Felix takes a table kube-proxy with chains for kube-proxy in nftables mode, and its absence for another mode."""

    def detected() -> bool:
        listed = json.loads(run(["nft", "--json", "list", "chains", node.at.table]))["nftables"]
        return any(item.get("chain", {}).get("table") == "kube-proxy" for item in listed)

    assert not detected()
    others = ("iptables", "nftables") if has_nftables() else ("iptables",)
    for programmed in (mode, *others, mode):
        node.converge(programmed)
        assert detected() is (programmed == "nftables")
        assert ("kube-ipvs0" in run(["ip", "-o", "link"])) is programmed.startswith("ipvs")
    node.leave()
    assert not detected()


#: In each mode the flows that Docker's policy drops. Of connections that leave the node, the chains of iptables mode
#: accept those that are masqueraded. IPVS sends packets past FORWARD; only answers that leave the node traverse it.
DROPPED = {"iptables": (0,), "nftables": (0, 2, 3), "ipvs iptables": (), "ipvs nftables": (0, 2, 3)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [*MODES[:2], *IPVS_BOTH])
def test_docker_drops_forwarded_packets(node: Node, mode: str, family: str) -> None:
    at = node.at
    add(at, Neighbour(neighbour_rules.of_family(family, neighbour_rules.DOCKER_IPTABLES)))
    before = state()
    node.converge(mode)
    dropped = {at.flows[number]: {"drop"} for number in DROPPED[mode]}
    assert node.outcomes() == {**at.served(mode), **dropped}
    accepted = [("DOCKER-USER", option, NAMES[family]["pods"], "-j", "ACCEPT") for option in ("-s", "-d")]
    for rule in accepted:
        run([at.iptables, "-I", *rule])
    assert node.outcomes() == at.served(mode)
    assert holds(state(), before)
    node.leave()
    for rule in accepted:
        run([at.iptables, "-D", *rule])
    assert state() == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_an_address_of_kube_vip_or_keepalived_on_the_node(node: Node, mode: str, family: str) -> None:
    place = f"{node.at.balanced}/{node.at.bits}"
    more = node.at.at_once
    node.converge(mode)
    run(["ip", "address", "add", place, "dev", "vx", *more])
    assert node.outcomes() == node.at.served(mode)
    drift(node.at, mode)
    assert node.converge(mode).changed and not node.converge(mode).changed
    assert place in run(["ip", "address", "show", "dev", "vx"])
    run(["ip", "address", "delete", place, "dev", "vx"])
    # In ipvs mode each address of the node has virtual servers for node ports.
    assert node.converge(mode).changed is mode.startswith("ipvs")
    assert node.outcomes() == node.at.served(mode)
    run(["ip", "address", "add", place, "dev", "vx", *more])
    node.leave()
    assert place in run(["ip", "address", "show", "dev", "vx"])


SENDS = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", (sys.argv[1], 9))
"""


def answers_neighbours(node: Node) -> bool:
    """Return whether the node answers ARP, or neighbour discovery, for the address of the load balancer."""
    inside = ["ip", "netns", "exec", f"{node.network.prefix}-x"]
    address = node.at.balanced
    parameters = f"net.{node.at.family.lower()}.neigh.eth0"
    run([*inside, "sysctl", "-qw", f"{parameters}.mcast_solicit=2", f"{parameters}.retrans_time_ms=200"])
    run([*inside, "ip", "route", "add", address, "dev", "eth0"])
    run([*inside, sys.executable, "-c", SENDS, address])

    def entries() -> list[dict[str, Any]]:
        return list(json.loads(run([*inside, "ip", "-json", "neighbour", "show", address])))

    wait_for(lambda: entries() and "INCOMPLETE" not in entries()[0]["state"], 10.0, 0.05)
    run([*inside, "ip", "route", "delete", address])
    return "lladdr" in entries()[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_only_the_announcer_answers_for_an_address_of_a_load_balancer(node: Node, mode: str, family: str) -> None:
    """MetalLB's speaker answers ARP and neighbour discovery itself, so that the kernel of no node may."""
    node.ipvs = {"strictARP": True}
    node.converge(mode)
    assert not answers_neighbours(node)
    assert node.outcomes() == node.at.served(mode)


@pytest.mark.uml
@pytest.mark.full
@pytest.mark.parametrize("family", ("IPv4", "IPv6"))
def test_addresses_of_ipvs_mode_are_announced_without_strict_arp(node: Node, family: str) -> None:
    """Neighbour discovery is answered only for addresses of the device that receives the question."""
    node.converge("ipvs iptables")
    assert answers_neighbours(node) is (family == "IPv4")


@pytest.mark.parametrize("strict", (False, True))
def test_strict_arp_leaves_addresses_of_other_devices_to_the_announcer(node: Node, strict: bool) -> None:
    """The addresses are on the loopback device here, and on a device of its own in ipvs mode."""
    run(["ip", "address", "add", f"{node.at.balanced}/32", "dev", "lo"])
    if strict:
        chosen = sysctl_profile.profile(sysctl_profile.ProfileSettings("ipvs", (6, 1, 0), strict_arp=True))
        for name, value in sysctl_profile.wanted_values(chosen).items():
            if ".arp_" in name:
                run(["sysctl", "-qw", f"{name}={value}"])
    assert answers_neighbours(node) is not strict


@pytest.mark.parametrize("family", ["IPv6"])
def test_neighbour_discovery_needs_no_strict_arp(node: Node, family: str) -> None:
    """The kernel answers it only for addresses of the device that receives the question."""
    run(["ip", "address", "add", f"{node.at.balanced}/128", "dev", "lo", *node.at.at_once])
    assert not answers_neighbours(node)


ASKS = """
import os, socket, sys
if sys.argv[1] == "sidecar":
    os.setuid(1337)
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET)
sock.settimeout(4)
if sys.argv[1] == "ambient":
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 0x539)
sock.connect((sys.argv[2], 80))
print(sock.recv(100).decode().split()[0])
"""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "rules"), IN_A_POD)
@pytest.mark.parametrize("mode", MODES)
def test_istio_redirects_inside_pods(node: Node, mode: str, kind: str, rules: str, family: str) -> None:
    """Its rules in a pod come before those of the node for what the pod sends, and after them for what it gets."""
    at = node.at
    restore = [f"{at.iptables}-restore", "--noflush"]
    for place, name, port in (("p", "outbound", 15001), ("l", "inbound", 15006)):
        inside = ["ip", "netns", "exec", f"{node.network.prefix}-{place}"]
        run([*inside, *restore], stdin=neighbour_rules.of_family(family, rules))
        node.serve(place, name, port)
    node.converge(mode)
    flows: list[Flow] = [("P", at.address, 80, "tcp"), ("X", at.node, NODE_PORT, "tcp")]
    assert node.network.outcomes(family, flows) == [{"outbound:15001"}, {"inbound:15006+M", "r:80+M"}]
    # What the proxy itself sends goes to the node, which chooses an endpoint.
    words = ["ip", "netns", "exec", f"{node.network.prefix}-p", sys.executable, "-c", ASKS, kind, at.address]
    assert run([*words]).strip() in ("inbound:15006", "r:80")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES[:2])
def test_untracked_queries_reach_the_dns_cache_of_the_node(node: Node, mode: str, family: str) -> None:
    """NodeLocal DNSCache in its usual configuration: the cluster IP on a device, and exempt from NAT."""
    dns = node.at.dns
    flows: list[Flow] = [(place, dns, 5353, protocol) for place in ("P", "N") for protocol in ("tcp", "udp")]
    node.converge(mode)
    cluster_dns = node.network.outcomes(family, flows)
    assert cluster_dns == [{"l:5353", "r:5353"}] * 4
    add(node.at, on_the_node(family)["node-local-dns"])
    run(["ip", "address", "add", f"{dns}/{node.at.bits}", "dev", "lo", *node.at.at_once])
    node.serve("", "cache", 5353, dns)
    assert node.network.outcomes(family, flows, tries=4) == [{"cache:5353"}] * 4
    assert not node.converge(mode).changed


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", IPVS)
def test_a_dns_cache_at_an_address_of_its_own_beside_ipvs(node: Node, mode: str, family: str) -> None:
    """It reaches the cluster's DNS at the cluster IP, which is on the device of ipvs mode."""
    own = {"IPv4": "169.254.20.10", "IPv6": "fd00:53::10"}[family]
    node.converge(mode)
    add(node.at, node_local_dns(own, node.at.bits))
    run(["ip", "address", "add", f"{own}/{node.at.bits}", "dev", "lo", *node.at.at_once])
    node.serve("", "cache", 5353, own)
    flows: list[Flow] = [(place, own, 5353, protocol) for place in ("P", "N") for protocol in ("tcp", "udp")]
    for _ in range(2):
        assert node.network.outcomes(family, flows, tries=4) == [{"cache:5353"}] * 4
        answered = node.outcomes([("N", node.at.dns, 5353, "udp"), ("P", node.at.dns, 5353, "tcp")])
        assert list(answered.values()) == [{":5353+M"}, {":5353"}]
        drift(node.at, mode)
        node.converge(mode)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", IPVS_BOTH)
def test_a_virtual_server_of_kube_vip_serves_where_it_is_excluded(node: Node, mode: str, family: str) -> None:
    """kube-vip with lb_enable, or keepalived: an address on the node's interface, and a virtual server."""
    own, bits = {"IPv4": "192.0.2.100", "IPv6": "2001:db8:2::100"}[family], node.at.bits
    bracketed = [f"[{text}]" if family == "IPv6" else text for text in (own, NAMES[family]["L"])]
    kube_vip = f"-A -t {bracketed[0]}:6443 -s rr\n-a -t {bracketed[0]}:6443 -r {bracketed[1]}:8443 -m -w 1\n"
    run(["ip", "address", "add", f"{own}/{bits}", "dev", "vx", *node.at.at_once])
    run(["ipvsadm", "-R"], stdin=kube_vip)
    before = state()
    node.ipvs = {"excludeCIDRs": [f"{own}/{bits}"]}
    assert node.converge(mode).changed
    drift(node.at, mode)
    run(["ipvsadm", "-R"], stdin=kube_vip)
    assert node.converge(mode).changed and not node.converge(mode).changed
    assert holds(state(), before)
    flow: Flow = ("P", own, 6443, "tcp")
    assert node.outcomes([*node.at.flows, flow]) == {**node.at.served(mode), flow: {":8443"}}
    node.leave()
    assert state() == before
    node.ipvs = {}
    node.converge(mode)
    assert ":6443" not in run(["ipvsadm", "-Sn"])
