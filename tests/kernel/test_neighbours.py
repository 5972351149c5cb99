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
from tests.kernel.neighbour_rules import IN_A_POD, ON_THE_NODE, Neighbour
from tests.kernel.packet_network import NAMES, SERVER, Network
from tests.kernel.test_leaving import COUNTERS, HANDLES
from tests.lab import manifests
from tests.lab.background import Background

FAMILY = "IPv4"
ADDRESS, BALANCED, NODE_PORT, DNS = "172.30.0.10", "1.2.3.10", 30010, "172.30.0.53"
NODE = NAMES[FAMILY]["N"]
Flow = Tuple[str, str, int, str]
FLOWS: List[Flow] = [
    ("P", ADDRESS, 80, "tcp"),
    ("N", ADDRESS, 80, "tcp"),
    ("X", BALANCED, 80, "tcp"),
    ("X", NODE, NODE_PORT, "tcp"),
]
MODES = ("iptables", "nftables")
#: Neighbours whose rules in the tables of iptables only nft understands, so that iptables mode cannot use these tables.
NFT_ONLY = ("tailscale-nftables",)


def cluster() -> ClusterState:
    """Return a cluster with a Service of all kinds of addresses, and the Service of its DNS, on one node."""
    port = manifests.port(80)
    endpoints = [manifests.endpoint(NAMES[FAMILY]["L"], "node-1"), manifests.endpoint(NAMES[FAMILY]["R"], "node-2")]
    dns = [manifests.port(5353, name=protocol.lower(), protocol=protocol) for protocol in ("UDP", "TCP")]
    objects = [
        manifests.service("web", ADDRESS, [{**port, "nodePort": NODE_PORT}], ingress=[BALANCED], type="LoadBalancer"),
        manifests.endpoint_slice("web", endpoints, [port]),
        manifests.service("kube-dns", DNS, dns),
        manifests.endpoint_slice("kube-dns", endpoints, dns),
        {"kind": "ServiceCIDR", "metadata": {"name": "all"}, "spec": {"cidrs": [NAMES[FAMILY]["services"]]}},
        {
            "kind": "Node",
            "metadata": {"name": "node-1"},
            "status": {"addresses": [{"type": "InternalIP", "address": NODE}]},
        },
    ]
    state = ClusterState.from_objects(objects)
    assert state.refusals == ()
    return state


class Node:
    """The node of ``Network``, converged in a mode."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.network = network
        self._directory = directory / "state"

    def converge(self, mode: str) -> Report:
        """Converge the node to the cluster."""
        return converge(
            Request(
                cluster=cluster(),
                configuration=load({"mode": mode, "clusterCIDR": NAMES[FAMILY]["pods"]}).configuration,
                node_name="node-1",
                state_directory=str(self._directory),
                whole_cluster=False,
            )
        )

    def leave(self) -> Report:
        """Remove everything that was programmed."""
        return remove(self._directory)

    def outcomes(self, flows: Sequence[Flow] = FLOWS) -> Dict[Flow, Set[str]]:
        """Return the outcomes of each flow, without the endpoint that was chosen at random."""
        found = self.network.outcomes(FAMILY, flows, tries=4)
        return {
            flow: {outcome[1:] if ":" in outcome else outcome for outcome in one} for flow, one in zip(flows, found)
        }

    def serve(self, place: str, name: str, port: int, address: str = "0.0.0.0") -> None:
        """Start a server with a name in the namespace of a pod, or on the node if none is named."""
        inside = ["ip", "netns", "exec", f"{self.network.prefix}-{place}"] if place else []
        words = [sys.executable, "-c", SERVER.replace("0.0.0.0", address), name, "2", str(port)]
        self.network.servers.append(Background([*inside, *words]))


SERVED = {
    FLOWS[0]: {":80"},
    FLOWS[1]: {":80"},
    FLOWS[2]: {":80+M"},
    FLOWS[3]: {":80+M"},
}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Yield the node among its pods."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    network = Network()
    try:
        yield Node(network, tmp_path)
    finally:
        network.close()


def add(neighbour: Neighbour) -> None:
    """Add the rules of a neighbour."""
    if neighbour.iptables:
        external_rules.restore("nft", neighbour.iptables)
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


def drift(mode: str) -> None:
    """Remove what serves the Services, as another program may do."""
    if mode == "nftables":
        run("nft", "delete", "table", "ip", "kube-proxy")
    else:
        run("iptables", "-t", "nat", "-F", "KUBE-SERVICES")


@pytest.mark.parametrize("name", NFT_ONLY)
def test_iptables_mode_names_the_table_that_it_cannot_use(node: Node, name: str) -> None:
    add(ON_THE_NODE[name])
    before = state()
    with pytest.raises(KernelError, match=r"table (nat|filter) of IPv4: .* cannot show it, .* only nft understands"):
        node.converge("iptables")
    assert state() == before


@pytest.mark.parametrize("name", [name for name in ON_THE_NODE if name not in NFT_ONLY])
def test_services_beside_a_neighbour_in_iptables_mode(node: Node, name: str) -> None:
    serve_beside(node, "iptables", ON_THE_NODE[name])


@pytest.mark.parametrize("name", ON_THE_NODE)
def test_services_beside_a_neighbour_in_nftables_mode(node: Node, name: str) -> None:
    serve_beside(node, "nftables", ON_THE_NODE[name])


def serve_beside(node: Node, mode: str, neighbour: Neighbour) -> None:
    """Check that Services answer beside the neighbour, before and after a repair, and that clean-up leaves it."""
    add(neighbour)
    before = state()
    assert node.converge(mode).changed
    assert node.outcomes() == SERVED
    drift(mode)
    assert node.converge(mode).changed and not node.converge(mode).changed
    assert holds(state(), before)
    assert node.outcomes() == SERVED
    assert node.leave().changed
    assert state() == before


@pytest.mark.parametrize("mode", MODES)
def test_felix_finds_the_mode_of_the_node(node: Node, mode: str) -> None:
    """Felix takes a table kube-proxy with chains for kube-proxy in nftables mode, and its absence for another mode."""

    def detected() -> bool:
        listed = json.loads(run("nft", "--json", "list", "chains", "ip"))["nftables"]
        return any(item.get("chain", {}).get("table") == "kube-proxy" for item in listed)

    assert not detected()
    for programmed in (mode, *MODES):
        assert node.converge(programmed).changed or programmed == mode
        assert detected() is (programmed == "nftables")
    node.leave()
    assert not detected()


@pytest.mark.parametrize(
    ("mode", "dropped", "served"),
    [("iptables", FLOWS[:1], FLOWS[1:]), ("nftables", FLOWS[2:], FLOWS[1:2])],
    ids=["iptables", "nftables"],
)
def test_docker_drops_forwarded_packets(node: Node, mode: str, dropped: List[Flow], served: List[Flow]) -> None:
    """Of connections that leave the node, the chains of iptables mode accept those that are masqueraded."""
    external_rules.restore("nft", neighbour_rules.DOCKER_IPTABLES)
    before = state()
    node.converge(mode)
    assert node.outcomes(dropped) == {flow: {"drop"} for flow in dropped}
    assert node.outcomes(served) == {flow: SERVED[flow] for flow in served}
    accepted = [("DOCKER-USER", option, NAMES[FAMILY]["pods"], "-j", "ACCEPT") for option in ("-s", "-d")]
    for rule in accepted:
        run("iptables", "-I", *rule)
    assert node.outcomes() == SERVED
    assert holds(state(), before)
    node.leave()
    for rule in accepted:
        run("iptables", "-D", *rule)
    assert state() == before


@pytest.mark.parametrize("mode", MODES)
def test_an_address_of_kube_vip_or_keepalived_on_the_node(node: Node, mode: str) -> None:
    node.converge(mode)
    run("ip", "address", "add", f"{BALANCED}/32", "dev", "vx")
    assert node.outcomes() == SERVED
    drift(mode)
    assert node.converge(mode).changed and not node.converge(mode).changed
    assert f"{BALANCED}/32" in run("ip", "address", "show", "dev", "vx")
    run("ip", "address", "delete", f"{BALANCED}/32", "dev", "vx")
    assert not node.converge(mode).changed
    assert node.outcomes() == SERVED
    run("ip", "address", "add", f"{BALANCED}/32", "dev", "vx")
    node.leave()
    assert f"{BALANCED}/32" in run("ip", "address", "show", "dev", "vx")


SENDS = "import socket, sys; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', (sys.argv[1], 9))"


def answers_arp(network: Network) -> bool:
    """Return whether the node answers ARP from the external host for the address of the load balancer."""
    inside = ["ip", "netns", "exec", f"{network.prefix}-x"]
    run(*inside, "sysctl", "-qw", "net.ipv4.neigh.eth0.mcast_solicit=2", "net.ipv4.neigh.eth0.retrans_time_ms=200")
    run(*inside, "ip", "route", "add", BALANCED, "dev", "eth0")
    run(*inside, sys.executable, "-c", SENDS, BALANCED)

    def entries() -> List[Dict[str, Any]]:
        return list(json.loads(run(*inside, "ip", "-json", "neighbour", "show", BALANCED)))

    wait_for(lambda: entries() and "INCOMPLETE" not in entries()[0]["state"], 10.0, 0.05)
    run(*inside, "ip", "route", "delete", BALANCED)
    return "lladdr" in entries()[0]


@pytest.mark.parametrize("mode", MODES)
def test_only_the_announcer_answers_arp_for_an_address_of_a_load_balancer(node: Node, mode: str) -> None:
    """MetalLB's speaker answers ARP itself, so that the kernel of no node may."""
    node.converge(mode)
    assert not answers_arp(node.network)
    assert node.outcomes() == SERVED


@pytest.mark.parametrize("strict", (False, True))
def test_strict_arp_leaves_addresses_of_other_devices_to_the_announcer(node: Node, strict: bool) -> None:
    """The addresses are on the loopback device here, and on a device of its own in ipvs mode."""
    run("ip", "address", "add", f"{BALANCED}/32", "dev", "lo")
    if strict:
        chosen = sysctl_profile.profile(sysctl_profile.ProfileSettings("ipvs", (6, 1, 0), strict_arp=True))
        for name, value in sysctl_profile.wanted_values(chosen).items():
            if ".arp_" in name:
                run("sysctl", "-qw", f"{name}={value}")
    assert answers_arp(node.network) is not strict


ASKS = """
import os, socket, sys
if sys.argv[1] == "sidecar":
    os.setuid(1337)
sock = socket.socket()
sock.settimeout(4)
if sys.argv[1] == "ambient":
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 0x539)
sock.connect((sys.argv[2], 80))
print(sock.recv(100).decode().split()[0])
"""


@pytest.mark.parametrize(("kind", "rules"), IN_A_POD)
@pytest.mark.parametrize("mode", MODES)
def test_istio_redirects_inside_pods(node: Node, mode: str, kind: str, rules: str) -> None:
    """Its rules in a pod come before those of the node for what the pod sends, and after them for what it gets."""
    for place, name, port in (("p", "outbound", 15001), ("l", "inbound", 15006)):
        run("ip", "netns", "exec", f"{node.network.prefix}-{place}", "iptables-nft-restore", "--noflush", text=rules)
        node.serve(place, name, port)
    node.converge(mode)
    flows: List[Flow] = [("P", ADDRESS, 80, "tcp"), ("X", NODE, NODE_PORT, "tcp")]
    assert node.network.outcomes(FAMILY, flows) == [{"outbound:15001"}, {"inbound:15006+M", "r:80+M"}]
    # What the proxy itself sends goes to the node, which chooses an endpoint.
    words = ["ip", "netns", "exec", f"{node.network.prefix}-p", sys.executable, "-c", ASKS, kind, ADDRESS]
    assert run(*words).strip() in ("inbound:15006", "r:80")


@pytest.mark.parametrize("mode", MODES)
def test_untracked_queries_reach_the_dns_cache_of_the_node(node: Node, mode: str) -> None:
    """NodeLocal DNSCache in its usual configuration: the cluster IP on a device, and exempt from NAT."""
    flows: List[Flow] = [(place, DNS, 5353, protocol) for place in ("P", "N") for protocol in ("tcp", "udp")]
    node.converge(mode)
    cluster_dns = node.network.outcomes(FAMILY, flows)
    assert cluster_dns == [{"l:5353", "r:5353"}] * 4
    add(ON_THE_NODE["node-local-dns"])
    run("ip", "address", "add", f"{DNS}/32", "dev", "lo")
    node.serve("", "cache", 5353, DNS)
    assert node.network.outcomes(FAMILY, flows, tries=4) == [{"cache:5353"}] * 4
    assert not node.converge(mode).changed
