# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node with Services of one family among its pods, in any mode, to which tests add the rules of other programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Sequence

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.kernel.convergence_node import has_ipvs, remove
from tests.kernel.external_rules import has_nftables, restore
from tests.kernel.neighbour_rules import Neighbour
from tests.kernel.packet_network import NAMES, SERVER, Network
from tests.kernel.test_leaving import COUNTERS, EMPTY_TABLE, HANDLES
from tests.lab import manifests
from tests.lab.background import Background
from tests.lab.system import run

Flow = tuple[str, str, int, str]
NODE_PORT = 30010


class Places:
    """The addresses of Services in one family, the flows to them, and the programs that have rules of this family."""

    def __init__(self, family: str, address: str, balanced: str, dns: str) -> None:
        self.family = family
        self.address, self.balanced, self.dns = address, balanced, dns
        self.node = NAMES[family]["N"]
        self.bits, self.program, self.table = (128, "ip6tables", "ip6") if family == "IPv6" else (32, "iptables", "ip")
        #: Words of ip(8) with which an address can be used at once: without duplicate address detection.
        self.at_once = ["nodad"] if family == "IPv6" else []
        self.flows: list[Flow] = [
            ("P", address, 80, "tcp"),
            ("N", address, 80, "tcp"),
            ("X", balanced, 80, "tcp"),
            ("X", self.node, NODE_PORT, "tcp"),
        ]

    def served(self, mode: str) -> dict[Flow, set[str]]:
        """Return the outcomes of the flows. In ipvs mode the node itself sends from the Service's address."""
        masqueraded = (False, mode.startswith("ipvs"), True, True)
        return {flow: {":80+M" if changed else ":80"} for flow, changed in zip(self.flows, masqueraded)}

    @property
    def iptables(self) -> str:
        """The program of iptables, of the variant that the kernel supports."""
        return f"{self.program}-{variant()}"


def variant() -> str:
    """Return the variant of iptables that other programs use."""
    return "nft" if has_nftables() else "legacy"


PLACES = {
    "IPv4": Places("IPv4", "172.30.0.10", "1.2.3.10", "172.30.0.53"),
    "IPv6": Places("IPv6", "fd00:30::10", "2001:db8:51::10", "fd00:30::53"),
}


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
    """The node of ``Network``, converged in a mode: its name, and in ipvs mode that of the filter backend."""

    def __init__(self, network: Network, directory: Path, at: Places) -> None:
        self.network = network
        self.at = at
        #: The section ``ipvs`` of the configuration.
        self.ipvs: dict[str, Any] = {}
        self._directory = directory / "state"

    def converge(self, mode: str) -> Report:
        """Converge the node to the cluster."""
        name, _, filter_backend = mode.partition(" ")
        document = {"mode": name, "clusterCIDR": NAMES[self.at.family]["pods"], "ipvs": self.ipvs}
        done = converge(
            Request(
                cluster=cluster(self.at),
                configuration=load(document, node_source={"ipvsFilterBackend": filter_backend or "auto"}).configuration,
                node_name="node-1",
                state_directory=str(self._directory),
                whole_cluster=False,
            )
        )
        assert (done.mode, done.ipvs_filter_backend) == (name, filter_backend)
        return done

    def leave(self) -> Report:
        """Remove everything that was programmed."""
        return remove(self._directory)

    def outcomes(self, flows: Sequence[Flow] = ()) -> dict[Flow, set[str]]:
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


def add(at: Places, neighbour: Neighbour) -> None:
    """Add the rules of a neighbour."""
    if neighbour.iptables:
        restore(variant(), neighbour.iptables, at.program)
    if neighbour.nft:
        run(["nft", "-f", "-"], stdin=neighbour.nft)


def state() -> list[str]:
    """Return all rules, sets, virtual servers, addresses and devices, without counters and handles."""
    if has_nftables():
        text = run(["nft", "-a", "list", "ruleset"])
    else:
        saved = "".join(run([f"{program}-legacy-save"]) for program in ("iptables", "ip6tables"))
        text = "".join(f"{line}\n" for line in saved.splitlines() if not line.startswith("#"))
    if has_ipvs():
        text += run(["ipset", "save"]) + run(["ipvsadm", "-Sn"])
    text = EMPTY_TABLE.sub("", HANDLES.sub("", COUNTERS.sub("", text)))
    return [*text.splitlines(), *run(["ip", "-o", "address"]).splitlines()]


def holds(lines: list[str], wanted: list[str]) -> bool:
    """Return whether lines include all the wanted ones, in order."""
    remaining = iter(lines)
    return all(line in remaining for line in wanted)


def drift(at: Places, mode: str) -> None:
    """Remove what serves the Services, as another program may do."""
    if mode.startswith("ipvs"):
        run(["ipvsadm", "-C"])
        run(["ip", "address", "flush", "dev", "kube-ipvs0"])
    if mode.endswith("nftables"):
        run(["nft", "delete", "table", at.table, "kubenode-ipvs" if mode.startswith("ipvs") else "kube-proxy"])
    else:
        run([at.iptables, "-t", "nat", "-F", "KUBE-SERVICES"])
