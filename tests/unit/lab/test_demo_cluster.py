# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The demonstration's snapshot fits the lab's network and shows every promised feature."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pytest

from tests.lab.cluster import SNAPSHOT
from tests.lab.topology import NODES, demonstration_nodes, pods_of

ITEMS: list[dict[str, Any]] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))["items"]
SERVICES = [item for item in ITEMS if item["kind"] == "Service"]


def test_there_is_a_service_of_every_kind_that_the_demonstration_promises() -> None:
    assert len(SERVICES) >= 12
    specs = [service["spec"] for service in SERVICES]
    assert {spec["type"] for spec in specs} == {"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"}
    assert any(spec.get("loadBalancerSourceRanges") for spec in specs)
    assert any(spec["sessionAffinity"] == "ClientIP" for spec in specs)
    assert any(spec.get("clusterIP") == "None" for spec in specs)
    protocols = {(port["port"], port["protocol"]) for spec in specs for port in spec.get("ports", [])}
    assert {(53, "UDP"), (53, "TCP")} <= protocols


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_pods_lie_in_the_range_of_their_node_and_have_names_of_their_own(node: Any) -> None:
    pods = pods_of(SNAPSHOT, node)
    assert len({pod.name for pod in pods}) == len(pods)
    for pod in pods:
        assert ipaddress.ip_address(pod.address) in ipaddress.ip_network(node.pods)
        assert ipaddress.ip_address(pod.address6) in ipaddress.ip_network(node.pods6)


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_node_objects_have_the_addresses_of_the_laboratory(node: Any) -> None:
    found = next(item for item in ITEMS if item["kind"] == "Node" and item["metadata"]["name"] == node.name)
    assert [entry["address"] for entry in found["status"]["addresses"]] == [node.address, node.address6, node.name]
    assert found["spec"]["podCIDRs"] == [node.pods, node.pods6]


def test_every_slice_belongs_to_a_service() -> None:
    names = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in SERVICES}
    for item in ITEMS:
        if item["kind"] == "EndpointSlice":
            labels = item["metadata"]["labels"]
            assert (item["metadata"]["namespace"], labels["kubernetes.io/service-name"]) in names


@pytest.mark.parametrize(
    ("machine", "host_has_ipvs", "third"),
    [("x86_64", True, [False]), ("x86_64", False, [True]), ("aarch64", True, [False]), ("aarch64", False, [])],
)
def test_ipvs_mode_is_shown_where_the_machine_can(
    monkeypatch: pytest.MonkeyPatch, machine: str, host_has_ipvs: bool, third: list[bool]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    nodes = demonstration_nodes(host_has_ipvs)
    assert [node.mode for node in nodes] == ["iptables", "nftables", "ipvs"][: 2 + len(third)]
    assert [node.own_kernel for node in nodes] == [False, False, *third]
