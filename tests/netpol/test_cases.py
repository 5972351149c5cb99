# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cases of network policies on the wire, by single convergences and by the agent, and random clusters."""

from __future__ import annotations

import asyncio

import pytest

from . import cases
from .agent_node import agent_in
from .conftest import Lab
from .network import Network
from .oracle import Oracle, Packet
from .random_clusters import NODE_ADDRESSES, Generator
from .running import BesideAnother, Node, run_case
from .wire import Probe, Wire

#: Cases that are run in further modes without FULL=1: those in which the mode matters.
SERVICES = ("node-port-source", "service-is-transparent")
BY_AGENT = ("policy-comes-and-goes", "cnp-tiers")
STEPS, PACKETS = 3, 25


def _marked(name: str, quick: tuple[str, ...]) -> object:
    return name if name in quick else pytest.param(name, marks=pytest.mark.full)


@pytest.mark.parametrize("name", cases.names())
def test_a_case_with_nftables(lab: Lab, name: str) -> None:
    network, node = lab("nftables")
    assert asyncio.run(run_case(name, network, node)) == []


@pytest.mark.parametrize("name", [_marked(name, SERVICES) for name in cases.names()])
def test_a_case_with_iptables(lab: Lab, name: str) -> None:
    network, node = lab("iptables")
    assert asyncio.run(run_case(name, network, node)) == []


@pytest.mark.ipvs
@pytest.mark.full
@pytest.mark.parametrize("name", cases.names())
def test_a_case_with_ipvs(lab: Lab, name: str) -> None:
    network, node = lab("ipvs")
    assert asyncio.run(run_case(name, network, node)) == []
    # 10.96.0.0/16, the cluster IPs, as the kernel lists virtual servers.
    assert ":0A60" in node.inside("cat", "/proc/net/ip_vs").replace(" ", ":"), "another mode serves the Services"


@pytest.mark.full
@pytest.mark.parametrize("name", cases.names())
def test_a_case_with_pods_on_a_bridge(lab: Lab, name: str) -> None:
    network, node = lab("nftables", bridge=True)
    assert asyncio.run(run_case(name, network, node)) == []


@pytest.mark.parametrize("name", [_marked(name, BY_AGENT) for name in cases.names()])
def test_a_case_by_the_agent(lab: Lab, name: str) -> None:
    network, node = lab("nftables")
    with agent_in(node) as agent:
        assert asyncio.run(run_case(name, network, agent)) == []


@pytest.mark.parametrize("name", [SERVICES[0], pytest.param(SERVICES[1], marks=pytest.mark.full)])
def test_a_case_where_another_program_serves_the_services(lab: Lab, name: str) -> None:
    network, node = lab("iptables")
    assert asyncio.run(run_case(name, network, BesideAnother(node))) == []


def _probe(packet: Packet) -> Probe:
    host = cases.host_of(packet.source)
    return Probe(packet.protocol, host, packet.source, packet.destination, packet.port)


async def _differences(network: Network, node: Node, seed: int) -> list[str]:
    """A random cluster with changes: each packet that passes although the oracle denies it, or the other way."""
    generator = Generator(seed)
    objects = generator.cluster()
    wire = Wire(network)
    wrong: list[str] = []
    try:
        for step in range(STEPS):
            await asyncio.to_thread(node.converge, objects.values())
            oracle = Oracle(objects.values(), "node1", NODE_ADDRESSES)
            # What a pod sends to itself never leaves its namespace.
            packets = [packet for packet in generator.packets(PACKETS) if packet.source != packet.destination]
            expected = {_probe(packet): oracle.allowed(packet) for packet in packets}
            answers = await wire.allowed(list(expected))
            wrong += [
                f"seed {seed} step {step}: {probe}: the oracle says {'allowed' if expected[probe] else 'denied'}"
                for probe, answered in answers.items()
                if answered != expected[probe]
            ]
            generator.change(objects)
    finally:
        wire.close()
    return wrong


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(2, 200, 22))])
def test_random_clusters_on_the_wire(lab: Lab, first: int) -> None:
    network, node = lab("nftables")
    last = first + (22 if first else 2)
    assert [line for seed in range(first, last) for line in asyncio.run(_differences(network, node, seed))] == []
