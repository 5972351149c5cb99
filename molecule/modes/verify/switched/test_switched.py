# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Effects of the mode switches on clients, and the state left on the nodes."""

from __future__ import annotations

import json

import pytest

SERVICES = ("10.96.0.10", "198.51.100.20")


def look(scenario, node, name):
    return json.loads((scenario.place(node.lab) / f"{name}.json").read_text(encoding="utf-8"))


def chains(portrait, family="iptables"):
    return [line for line in portrait[family] if "KUBE-" in line]


@pytest.fixture
def report(scenario, node):
    return json.loads((scenario.directory / "traffic.json").read_text(encoding="utf-8"))[node.name]


def test_no_request_was_lost(report):
    assert report["lost"] == []
    assert report["answered"] >= 50
    assert report["backends"][0].startswith("pod-1")
    assert report["backends"][-1].startswith("pod-2")


def test_connection_opened_before_the_first_switch_still_works_after_the_last(report):
    assert report["held"].startswith("pod-")


NFTABLES = ["table ip kube-proxy", "table ip6 kube-proxy"]


@pytest.mark.parametrize(("name", "number"), [("node1", 1), ("node2", 2)])
def test_nftables_mode_has_its_table_and_no_chain_of_earlier_modes(scenario, nodes, name, number):
    assert chains(look(scenario, nodes[name], "mode-0"))
    found = look(scenario, nodes[name], f"mode-{number}")
    assert [chains(found), chains(found, "ip6tables")] == [[], []]
    assert found["nftables"] == NFTABLES


def test_ipvs_mode_has_virtual_servers_and_no_chain_of_a_service(scenario, nodes):
    assert [line for line in chains(look(scenario, nodes["node2"], "mode-0")) if "KUBE-SVC-" in line]
    found = look(scenario, nodes["node2"], "mode-1")
    assert found["virtual servers"]
    assert [line for line in chains(found) if "KUBE-SVC-" in line or "KUBE-SEP-" in line] == []
    assert {f"kube-ipvs0 inet {address}/32" for address in SERVICES} <= set(found["addresses"])


def test_nothing_of_the_other_modes_is_left_at_the_end(scenario, node):
    first, back = look(scenario, node, "mode-0"), look(scenario, node, "mode-3")
    for section in ("iptables", "ip6tables", "nftables", "sets", "virtual servers", "addresses"):
        assert back[section] == first[section], section
    assert node.host.run("ip link show kube-ipvs0").rc != 0


def test_services_still_answer(node):
    for address, port in (("10.96.0.10", 80), (node.address, 30080), ("198.51.100.20", 80)):
        assert node.ask(address, port).outcome == "answer"
    assert node.ask("10.96.0.50", 80).outcome == "refused"
