# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies in the kernel: the table, its repair, open connections and counters; cases are in tests/netpol."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netpol import cases
from tests.netpol.network import Network
from tests.netpol.running import Node, run_case
from tests.netpol.wire import Wire

#: The directory of the package module_utils.
ENGINE = Path(__file__).resolve().parents[2] / "plugins"
TABLE = "inet kubenode-network-policy"


@pytest.fixture
def lab(tmp_path):
    def made(mode, bridge=False):
        network = Network(f"t{os.getpid()}", bridge)
        opened.append(network)
        network.__enter__()
        return network, Node(network, tmp_path, mode)

    opened = []
    yield made
    for network in opened:
        network.destroy()


async def surviving_connections(network, node, how):
    """Return which connections that were open before the policies existed still work afterwards."""
    base = cases.steps("union-of-policies")[0].objects
    wire = Wire(network)
    flows = {
        "allowed": "tcp shop/web -> shop/db:8080 ipv4",
        "allowed by a Service": "tcp shop/web -> service/shop/db ipv6",
        "of the node": "tcp node1 -> shop/db:8080 ipv4",
        "denied": "tcp bank/web -> shop/db:8080 ipv4",
        "denied from outside": "tcp client -> shop/db:8080 ipv6",
    }
    try:
        without = [item for key, item in base.items() if key[0] != "NetworkPolicy"]
        await asyncio.to_thread(node.converge, without, LAB_NETWORK_POLICY_ESTABLISHED=how)
        for name, flow in flows.items():
            (probe,) = cases.probes_of(flow, base).values()
            assert await wire.open(name, probe), name
        await asyncio.to_thread(node.converge, base.values(), LAB_NETWORK_POLICY_ESTABLISHED=how)
        return {name for name in flows if await wire.is_alive(name)}
    finally:
        wire.close()


@pytest.mark.parametrize("how", ["keep", "cut"])
def test_open_connections_that_a_new_policy_denies(lab, how):
    network, node = lab("nftables")
    alive = asyncio.run(surviving_connections(network, node, how))
    allowed = {"allowed", "allowed by a Service", "of the node"}
    assert alive == (allowed if how == "cut" else {*allowed, "denied", "denied from outside"})


def rules(node):
    return node.inside("nft", "list", "ruleset")


def test_a_second_run_changes_nothing_and_removal_leaves_nothing(lab):
    _network, node = lab("nftables")
    objects = cases.steps("ip-block")[0].objects
    assert TABLE not in rules(node)
    node.converge(objects.values())
    first = rules(node)
    assert TABLE in first
    monitor = subprocess.Popen(
        ["ip", "netns", "exec", _network.full_name("node1"), "nft", "monitor"], stdout=subprocess.PIPE, text=True
    )
    try:
        node.converge(objects.values())
    finally:
        monitor.terminate()
    assert monitor.communicate()[0] == ""
    assert rules(node) == first
    node.converge(objects.values(), LAB_NETWORK_POLICY="0")
    assert TABLE not in rules(node) and "table ip kube-proxy" in rules(node)
    node.converge(objects.values())
    assert TABLE in rules(node)
    node.clean_up()
    assert rules(node) == ""


def test_changes_by_another_program_are_repaired(lab):
    _network, node = lab("nftables")
    objects = cases.steps("cnp-tiers")[0].objects
    node.converge(objects.values())
    first = rules(node)
    for command in (
        ("flush", "set", *TABLE.split(), "isolated-in4"),
        ("flush", "map", *TABLE.split(), "pods4"),
        ("flush", "chain", *TABLE.split(), "policy-in4"),
        ("add", "element", *TABLE.split(), "blocks4", "{ 192.0.2.0-192.0.2.7 : 1:1 }"),
        ("add", "element", *TABLE.split(), "tier-ports-accept", "{ 8000:7 . tcp . 1-9 }"),
        ("add", "element", *TABLE.split(), "isolated-in4", "{ * }"),
        ("add", "element", *TABLE.split(), "grants-in4", "{ * : 8000:1 }"),
        ("add", "element", *TABLE.split(), "port-ranges", "{ * }"),
        ("delete", "table", *TABLE.split()),
    ):
        node.inside("nft", *command)
        assert rules(node) != first
        node.converge(objects.values())
        assert sorted(rules(node).split()) == sorted(first.split()), command


def test_nft_lists_the_table_and_loads_its_own_listing(lab, tmp_path):
    _network, node = lab("nftables")
    node.converge(cases.steps("cnp-egress")[0].objects.values())
    first = rules(node)
    assert node.inside("nft", "-j", "list", "ruleset")
    listed = tmp_path / "listed.nft"
    listed.write_text("flush ruleset\n" + first, encoding="utf-8")
    node.inside("nft", "-f", str(listed))
    assert sorted(rules(node).replace(",", " ").split()) == sorted(first.replace(",", " ").split())


def test_denied_packets_are_counted_by_pod(lab):
    network, node = lab("nftables")
    assert asyncio.run(run_case("default-deny-ingress", network, node)) == []
    listed = node.inside("nft", "list", "set", *TABLE.split(), "denied-in4")
    assert "10.244.1.12 counter packets" in listed and "10.244.1.12 counter packets 0" not in listed
    read = "from module_utils.kernel.nftables.traffic.element_counters import denied_packets"
    code = f"{read}; print(denied_packets()['in', bytes((10, 244, 1, 12))])"
    assert int(node.inside("env", f"PYTHONPATH={ENGINE}", sys.executable, "-c", code)) > 0


async def unknown_pod_answers(network, node):
    """Return which flows pass before and after the pod at the end of most of them is known."""
    base = cases.steps("union-of-policies")[0].objects
    items = {key: item for key, item in base.items() if key[0] != "NetworkPolicy"}
    flows = {
        "to it": "tcp shop/db -> shop/web:80",
        "from it": "tcp shop/web -> shop/db:8080",
        "from outside": "tcp client -> shop/web:80",
        "to it from its node": "tcp node1 -> shop/web:80",
        "from it to its node": "tcp shop/web -> node1:80",
        "between known pods": "tcp bank/web -> shop/db:8080",
    }
    probes = {
        (name, str(probe)): probe for name, flow in flows.items() for probe in cases.probes_of(flow, base).values()
    }
    wire = Wire(network)
    found = []
    try:
        for known in (False, True):
            objects = [item for key, item in items.items() if known or key != ("Pod", "shop", "web")]
            await asyncio.to_thread(node.converge, objects)
            answers = await wire.allowed(list(probes.values()))
            found.append({name for (name, _text), probe in probes.items() if answers[probe]})
            denied = {name for (name, _text), probe in probes.items() if not answers[probe]}
            assert not found[-1] & denied, "both families have the same answers"
    finally:
        wire.close()
    return found, set(flows)


def configure(node, tmp_path, policy):
    """Write this section ``networkPolicy`` into the node's configuration, and leave the rest to it."""
    document = {"apiVersion": "kubenode.proxy/v1alpha1", "kind": "NodeProxyConfiguration", "networkPolicy": policy}
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text(encoding="utf-8").partition("---")[0] + f"---\n{json.dumps(document)}\n")
    node.environment.pop("LAB_NETWORK_POLICY", None)


async def answers(network, node, objects, flows):
    """Return which of these flows pass in each family, as texts."""
    wire = Wire(network)
    probes = [(flow, family, probe) for flow in flows for family, probe in cases.probes_of(flow, objects).items()]
    try:
        await asyncio.to_thread(node.converge, objects.values())
        found = await wire.allowed([probe for _flow, _family, probe in probes])
    finally:
        wire.close()
    return {(flow, family) for flow, family, probe in probes if found[probe]}


def test_egress_rules_are_not_applied_to_egress_exempt_cidrs(lab, tmp_path):
    """As for a DNS cache on the node; another destination, and the ingress rules of a pod, are judged as before."""
    network, node = lab("nftables")
    objects = cases.steps("own-node")[0].objects
    flows = ["tcp shop/web -> node1:80", "tcp shop/web -> node2:80", "tcp shop/web -> shop/db:8080"]
    configure(node, tmp_path, {"enabled": True})
    assert asyncio.run(answers(network, node, objects, flows)) == set()
    egress_exempt = ["172.18.0.2/32", "fd00:172:18::2/128", "10.244.0.0/16"]
    configure(node, tmp_path, {"enabled": True, "egressExemptCIDRs": egress_exempt})
    passed = asyncio.run(answers(network, node, objects, flows))
    assert passed == {(flows[0], family) for family in cases.FAMILIES}
    # The destination's own policy denies the packets of the third flow.
    first = rules(node)
    node.inside("nft", "delete", "element", *TABLE.split(), "egress-exempt4", "{ 10.244.0.0/16 }")
    node.converge(objects.values())
    assert sorted(rules(node).split()) == sorted(first.split())


def test_addresses_of_no_known_pod_reach_only_their_node(lab, tmp_path):
    network, node = lab("nftables")
    policy = {"enabled": True, "unknownPods": "deny", "podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"]}
    configure(node, tmp_path, policy)
    (unknown, known), every = asyncio.run(unknown_pod_answers(network, node))
    assert unknown == {"to it from its node", "from it to its node", "between known pods"} and known == every
    first = rules(node)
    listed = tmp_path / "listed.nft"
    listed.write_text("flush ruleset\n" + first, encoding="utf-8")
    node.inside("nft", "-f", str(listed))
    assert sorted(rules(node).replace(",", " ").split()) == sorted(first.replace(",", " ").split())
    policy["podCIDRs"] = ["10.244.3.0/24"]
    configure(node, tmp_path, policy)
    with pytest.raises(
        AssertionError, match=r"pods of this node have addresses outside of 10\.244\.3\.0/24: 10\.244\.1\.11"
    ):
        node.converge(cases.steps("union-of-policies")[0].objects.values())
