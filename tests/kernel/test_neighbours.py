# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Service traffic beside the rules and addresses of kube-proxy's usual neighbours; docs/neighbours.md lists them.

A convergence, the repair of drift and clean-up leave each neighbour's rules as they were.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.converged import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import sysctl_profile
from tests.kernel import external_rules, neighbour_rules
from tests.kernel.agent_node import wait_for
from tests.kernel.convergence_node import remove
from tests.kernel.external_rules import run
from tests.kernel.neighbour_rules import IN_A_POD, NAMES_ON_THE_NODE, Neighbour, on_the_node
from tests.kernel.packet_network import NAMES, SERVER, Network
from tests.kernel.test_leaving import COUNTERS, HANDLES
from tests.lab import manifests
from tests.lab.background import Background

Flow = Tuple[str, str, int, str]
NODE_PORT = 30010


class Places:
    """The addresses of Services in one family, the flows to them, and their outcomes."""

    def __init__(self, family: str, address: str, balanced: str, dns: str) -> None:
        self.family = family
        self.address, self.balanced, self.dns = address, balanced, dns
        self.node = NAMES[family]["N"]
        self.bits, self.iptables, self.table = (128, "ip6tables", "ip6") if family == "IPv6" else (32, "iptables", "ip")
        self.served: Dict[Flow, Set[str]] = {
            ("P", address, 80, "tcp"): {":80"},
            ("N", address, 80, "tcp"): {":80"},
            ("X", balanced, 80, "tcp"): {":80+M"},
            ("X", self.node, NODE_PORT, "tcp"): {":80+M"},
        }
        self.flows = list(self.served)


PLACES = {
    "IPv4": Places("IPv4", "172.30.0.10", "1.2.3.10", "172.30.0.53"),
    "IPv6": Places("IPv6", "fd00:30::10", "2001:db8:51::10", "fd00:30::53"),
}
FAMILIES = ("IPv4", pytest.param("IPv6", marks=pytest.mark.full))
MODES = ("iptables", "nftables")
#: Neighbours whose rules in the tables of iptables only nft understands, so that iptables mode cannot use these tables.
NFT_ONLY = ("tailscale-nftables",)


def cluster(at: Places) -> ClusterState:
    """Return a cluster with a Service of all kinds of addresses, and the Service of its DNS, on one node."""
    port = manifests.port(80)
    names = NAMES[at.family]
    endpoints = [manifests.endpoint(names["L"], "node-1"), manifests.endpoint(names["R"], "node-2")]
    dns = [manifests.port(5353, name=protocol.lower(), protocol=protocol) for protocol in ("UDP", "TCP")]
    objects = [
        manifests.service(
            "web", at.address, [{**port, "nodePort": NODE_PORT}], ingress=[at.balanced], type="LoadBalancer"
        ),
        manifests.endpoint_slice("web", endpoints, [port]),
        manifests.service("kube-dns", at.dns, dns),
        manifests.endpoint_slice("kube-dns", endpoints, dns),
        {"kind": "ServiceCIDR", "metadata": {"name": "all"}, "spec": {"cidrs": [names["services"]]}},
        {
            "kind": "Node",
            "metadata": {"name": "node-1"},
            "status": {"addresses": [{"type": "InternalIP", "address": at.node}]},
        },
    ]
    state = ClusterState.from_objects(objects)
    assert state.refusals == ()
    return state


class Node:
    """The node of ``Network``, converged in a mode."""

    def __init__(self, network: Network, directory: Path, at: Places) -> None:
        self.network = network
        self.at = at
        self._directory = directory / "state"

    def converge(self, mode: str) -> Report:
        """Converge the node to the cluster."""
        return converge(
            Request(
                cluster=cluster(self.at),
                configuration=load({"mode": mode, "clusterCIDR": NAMES[self.at.family]["pods"]}).configuration,
                node_name="node-1",
                state_directory=str(self._directory),
                whole_cluster=False,
            )
        )

    def leave(self) -> Report:
        """Remove everything that was programmed."""
        return remove(self._directory)

    def outcomes(self, flows: Sequence[Flow] = ()) -> Dict[Flow, Set[str]]:
        """Return the outcomes of some or all flows, without the endpoint that was chosen at random."""
        chosen = flows or self.at.flows
        found = self.network.outcomes(self.at.family, chosen, tries=4)
        return {
            flow: {outcome[1:] if ":" in outcome else outcome for outcome in one} for flow, one in zip(chosen, found)
        }

    def serve(self, place: str, name: str, port: int, address: str = "") -> None:
        """Start a server with a name in the namespace of a pod, or on the node if none is named."""
        inside = ["ip", "netns", "exec", f"{self.network.prefix}-{place}"] if place else []
        everywhere, kind = ('"::"', "10") if self.at.family == "IPv6" else ('"0.0.0.0"', "2")
        program = SERVER.replace(everywhere, f'"{address}"') if address else SERVER
        self.network.servers.append(Background([*inside, sys.executable, "-c", program, name, kind, str(port)]))


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


def add(at: Places, neighbour: Neighbour) -> None:
    """Add the rules of a neighbour."""
    if neighbour.iptables:
        external_rules.restore("nft", neighbour.iptables, at.iptables)
    if neighbour.nft:
        run("nft", "-f", "-", text=neighbour.nft)


def state() -> List[str]:
    """Return all rules, with those of iptables-nft, and all addresses and devices, without counters and handles."""
    text = HANDLES.sub("", COUNTERS.sub("", run("nft", "-a", "list", "ruleset")))
    return [*text.splitlines(), *run("ip", "-o", "address").splitlines()]


def holds(lines: List[str], wanted: List[str]) -> bool:
    """Return whether lines include all the wanted ones, in order."""
    remaining = iter(lines)
    return all(line in remaining for line in wanted)


def drift(at: Places, mode: str) -> None:
    """Remove what serves the Services, as another program may do."""
    if mode == "nftables":
        run("nft", "delete", "table", at.table, "kube-proxy")
    else:
        run(at.iptables, "-t", "nat", "-F", "KUBE-SERVICES")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NFT_ONLY)
def test_iptables_mode_names_the_table_that_it_cannot_use(node: Node, name: str, family: str) -> None:
    add(node.at, on_the_node(family)[name])
    before = state()
    words = rf"table (nat|filter) of {family}: .* cannot show it, .* only nft understands"
    with pytest.raises(KernelError, match=words):
        node.converge("iptables")
    assert state() == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name in NAMES_ON_THE_NODE if name not in NFT_ONLY])
def test_services_beside_a_neighbour_in_iptables_mode(node: Node, name: str, family: str) -> None:
    serve_beside(node, "iptables", on_the_node(family)[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES_ON_THE_NODE)
def test_services_beside_a_neighbour_in_nftables_mode(node: Node, name: str, family: str) -> None:
    serve_beside(node, "nftables", on_the_node(family)[name])


def serve_beside(node: Node, mode: str, neighbour: Neighbour) -> None:
    """Check that Services answer beside the neighbour, before and after a repair, and that clean-up leaves it."""
    add(node.at, neighbour)
    before = state()
    assert node.converge(mode).changed
    assert node.outcomes() == node.at.served
    drift(node.at, mode)
    assert node.converge(mode).changed and not node.converge(mode).changed
    assert holds(state(), before)
    assert node.outcomes() == node.at.served
    assert node.leave().changed
    assert state() == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_felix_finds_the_mode_of_the_node(node: Node, mode: str, family: str) -> None:
    """Felix takes a table kube-proxy with chains for kube-proxy in nftables mode, and its absence for another mode."""

    def detected() -> bool:
        listed = json.loads(run("nft", "--json", "list", "chains", node.at.table))["nftables"]
        return any(item.get("chain", {}).get("table") == "kube-proxy" for item in listed)

    assert not detected()
    for programmed in (mode, *MODES):
        assert node.converge(programmed).changed or programmed == mode
        assert detected() is (programmed == "nftables")
    node.leave()
    assert not detected()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("mode", "dropped", "served"),
    [("iptables", slice(0, 1), slice(1, 4)), ("nftables", slice(2, 4), slice(1, 2))],
    ids=["iptables", "nftables"],
)
def test_docker_drops_forwarded_packets(node: Node, mode: str, dropped: slice, served: slice, family: str) -> None:
    """Of connections that leave the node, the chains of iptables mode accept those that are masqueraded."""
    at = node.at
    add(at, Neighbour(neighbour_rules.of_family(family, neighbour_rules.DOCKER_IPTABLES)))
    before = state()
    node.converge(mode)
    assert node.outcomes(at.flows[dropped]) == {flow: {"drop"} for flow in at.flows[dropped]}
    assert node.outcomes(at.flows[served]) == {flow: at.served[flow] for flow in at.flows[served]}
    accepted = [("DOCKER-USER", option, NAMES[family]["pods"], "-j", "ACCEPT") for option in ("-s", "-d")]
    for rule in accepted:
        run(at.iptables, "-I", *rule)
    assert node.outcomes() == at.served
    assert holds(state(), before)
    node.leave()
    for rule in accepted:
        run(at.iptables, "-D", *rule)
    assert state() == before


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_an_address_of_kube_vip_or_keepalived_on_the_node(node: Node, mode: str, family: str) -> None:
    place = f"{node.at.balanced}/{node.at.bits}"
    more = ["nodad"] if family == "IPv6" else []
    node.converge(mode)
    run("ip", "address", "add", place, "dev", "vx", *more)
    assert node.outcomes() == node.at.served
    drift(node.at, mode)
    assert node.converge(mode).changed and not node.converge(mode).changed
    assert place in run("ip", "address", "show", "dev", "vx")
    run("ip", "address", "delete", place, "dev", "vx")
    assert not node.converge(mode).changed
    assert node.outcomes() == node.at.served
    run("ip", "address", "add", place, "dev", "vx", *more)
    node.leave()
    assert place in run("ip", "address", "show", "dev", "vx")


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
    run(*inside, "sysctl", "-qw", f"{parameters}.mcast_solicit=2", f"{parameters}.retrans_time_ms=200")
    run(*inside, "ip", "route", "add", address, "dev", "eth0")
    run(*inside, sys.executable, "-c", SENDS, address)

    def entries() -> List[Dict[str, Any]]:
        return list(json.loads(run(*inside, "ip", "-json", "neighbour", "show", address)))

    wait_for(lambda: entries() and "INCOMPLETE" not in entries()[0]["state"], 10.0, 0.05)
    run(*inside, "ip", "route", "delete", address)
    return "lladdr" in entries()[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_only_the_announcer_answers_for_an_address_of_a_load_balancer(node: Node, mode: str, family: str) -> None:
    """MetalLB's speaker answers ARP and neighbour discovery itself, so that the kernel of no node may."""
    node.converge(mode)
    assert not answers_neighbours(node)
    assert node.outcomes() == node.at.served


@pytest.mark.parametrize("strict", (False, True))
def test_strict_arp_leaves_addresses_of_other_devices_to_the_announcer(node: Node, strict: bool) -> None:
    """The addresses are on the loopback device here, and on a device of its own in ipvs mode."""
    run("ip", "address", "add", f"{node.at.balanced}/32", "dev", "lo")
    if strict:
        chosen = sysctl_profile.profile(sysctl_profile.ProfileSettings("ipvs", (6, 1, 0), strict_arp=True))
        for name, value in sysctl_profile.wanted_values(chosen).items():
            if ".arp_" in name:
                run("sysctl", "-qw", f"{name}={value}")
    assert answers_neighbours(node) is not strict


@pytest.mark.parametrize("family", ["IPv6"])
def test_neighbour_discovery_needs_no_strict_arp(node: Node, family: str) -> None:
    """The kernel answers it only for addresses of the device that receives the question."""
    run("ip", "address", "add", f"{node.at.balanced}/128", "dev", "lo")
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
    restore = [f"{at.iptables}-nft-restore", "--noflush"]
    for place, name, port in (("p", "outbound", 15001), ("l", "inbound", 15006)):
        inside = ["ip", "netns", "exec", f"{node.network.prefix}-{place}"]
        run(*inside, *restore, text=neighbour_rules.of_family(family, rules))
        node.serve(place, name, port)
    node.converge(mode)
    flows: List[Flow] = [("P", at.address, 80, "tcp"), ("X", at.node, NODE_PORT, "tcp")]
    assert node.network.outcomes(family, flows) == [{"outbound:15001"}, {"inbound:15006+M", "r:80+M"}]
    # What the proxy itself sends goes to the node, which chooses an endpoint.
    words = ["ip", "netns", "exec", f"{node.network.prefix}-p", sys.executable, "-c", ASKS, kind, at.address]
    assert run(*words).strip() in ("inbound:15006", "r:80")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_untracked_queries_reach_the_dns_cache_of_the_node(node: Node, mode: str, family: str) -> None:
    """NodeLocal DNSCache in its usual configuration: the cluster IP on a device, and exempt from NAT."""
    dns = node.at.dns
    flows: List[Flow] = [(place, dns, 5353, protocol) for place in ("P", "N") for protocol in ("tcp", "udp")]
    node.converge(mode)
    cluster_dns = node.network.outcomes(family, flows)
    assert cluster_dns == [{"l:5353", "r:5353"}] * 4
    add(node.at, on_the_node(family)["node-local-dns"])
    run("ip", "address", "add", f"{dns}/{node.at.bits}", "dev", "lo")
    node.serve("", "cache", 5353, dns)
    assert node.network.outcomes(family, flows, tries=4) == [{"cache:5353"}] * 4
    assert not node.converge(mode).changed
