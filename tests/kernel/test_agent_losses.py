# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent applies and reports the loss of most Services; if configured, it holds the loss back."""

from __future__ import annotations

import subprocess
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_slice, node_object, service
from tests.waiting import wait_for

SERVICES = range(1, 13)
REPORT = "most Services of this node lose their endpoints"


@pytest.fixture
def node(tmp_path) -> Iterator[AgentNode]:
    agent_node = AgentNode(tmp_path, "nftables")
    agent_node.store.put(node_object())
    for number in SERVICES:
        agent_node.store.put(service(number))
        agent_node.store.put(endpoint_slice(number))
    yield agent_node
    agent_node.close()


def served() -> set[int]:
    """Return the numbers of the Services with endpoints, as nft shows them."""
    command = ["nft", "list", "map", "ip", "kube-proxy", "service-frontends"]
    listed = subprocess.run(command, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    return {number for number in SERVICES if f"{cluster_ip(number)} ." in listed.stdout}


def lose(node: AgentNode, *numbers: int) -> None:
    for number in numbers:
        metadata = endpoint_slice(number)["metadata"]
        node.store.delete("EndpointSlice", metadata["namespace"], metadata["name"])


def losses(node: AgentNode) -> float:
    return node.metric("kubenode_proxy_endpoint_loss_events_total")


def test_an_outage_is_applied_and_reported_once(node):
    node.start()
    assert served() == set(SERVICES) and losses(node) == 0
    lose(node, *range(1, 12))
    wait_for(lambda: served() == {12}, 30.0, 0.05)
    wait_for(lambda: losses(node) == 1, 30.0, 0.05)
    assert node.log.count(REPORT) == 1 and "of the 12 Services that have endpoints on this node lose them" in node.log


def test_a_configured_hold_delays_an_outage_but_no_other_change(node):
    node.options = ["--hold-loss", "3600"]
    node.start()
    lose(node, *range(1, 12))
    wait_for(lambda: losses(node) == 1, 30.0, 0.05)
    # Changes arrive one by one, and half of the Services do not count as most of them yet.
    wait_for(lambda: "held_back=True" in node.log or "held_back=true" in node.log, 60.0, 0.05)
    node.store.put(endpoint_slice(1))
    wait_for(lambda: 1 in served(), 30.0, 0.05)
    kept = served()
    assert {1, 12} <= kept and len(kept) >= 6, "at least half of the Services keep their endpoints"
    for number in range(2, 12):
        node.store.put(endpoint_slice(number))
    wait_for(lambda: served() == set(SERVICES), 30.0, 0.05)


def test_a_held_change_is_applied_after_the_configured_time(node):
    node.options = ["--hold-loss", "2"]
    node.start()
    lose(node, *range(1, 12))
    wait_for(lambda: served() == {12}, 30.0, 0.05)
    assert node.log.count(REPORT) == 1


def test_a_loss_across_a_restart_is_reported(node):
    node.start()
    node.stop()
    lose(node, *range(1, 12))
    node.start()
    assert "11 of the 12 Services that have endpoints on this node would lose all of them" in node.log
    assert losses(node) == 1 and served() == {12}
