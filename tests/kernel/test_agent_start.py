# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Starting from a state on disk: the API server is preferred, and awaited longer while the kernel already serves."""

from __future__ import annotations

import subprocess
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.presence import holds_dataplane, holds_other_mode
from tests.kernel.agent_node import AgentNode, endpoint_ip, endpoint_slice, service
from tests.waiting import wait_for

FROM_DISK = "starting from the cluster state kept on disk"


@pytest.fixture
def stopped(tmp_path):
    """Provide a stopped node whose state on disk is older than the cluster's, and whose kernel still serves."""
    agent_node = AgentNode(tmp_path, "nftables")
    agent_node.store.put(service(1))
    agent_node.store.put(endpoint_slice(1))
    agent_node.start()
    assert agent_node.stop() == 0
    agent_node.store.put(endpoint_slice(1, first=4))
    yield agent_node
    agent_node.close()


def seconds_until_disk(node):
    started = time.monotonic()
    node.start(wait=False)
    wait_for(lambda: FROM_DISK in node.log, 60.0)
    return time.monotonic() - started


def test_an_api_server_that_answers_after_three_seconds_is_awaited(stopped):
    def slow(_target):
        time.sleep(3.0)

    stopped.api.wrong = slow
    stopped.start()
    assert FROM_DISK not in stopped.log
    text = stopped.kernel_text("")
    assert endpoint_ip(1, 4) in text and endpoint_ip(1, 0) not in text


def test_a_serving_node_falls_back_to_the_disk_after_ten_seconds(stopped):
    stopped.stop_api()
    assert seconds_until_disk(stopped) >= 10.0
    line = next(line for line in stopped.log.splitlines() if FROM_DISK in line)
    assert "cannot be reached" in line


def test_a_node_that_serves_nothing_falls_back_earlier(stopped):
    stopped.stop_api()
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    stopped.start(wait=False)
    wait_for(lambda: stopped.status().get("syncs", 0) > 0, 60.0)
    assert FROM_DISK in stopped.log
    assert endpoint_ip(1, 0) in stopped.kernel_text("")


@pytest.mark.parametrize(
    "commands",
    [
        ["nft add table ip kube-proxy", "nft add chain ip kube-proxy services"],
        ["nft add table ip6 kube-proxy", "nft add chain ip6 kube-proxy services"],
        ["iptables-nft -t nat -N KUBE-SERVICES"],
        ["ip6tables-nft -t nat -N KUBE-SERVICES"],
        ["iptables-legacy -t nat -N KUBE-SERVICES"],
        ["ip link add kube-ipvs0 type veth peer name other"],
    ],
    ids=lambda commands: commands[0].replace(" ", "-"),
)
def test_a_dataplane_of_any_mode_is_detected(commands):
    assert not holds_dataplane()
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if "legacy" in command and done.returncode:
            pytest.skip("this kernel has no legacy tables")
        assert done.returncode == 0, done.stderr
    assert holds_dataplane()
    # Of another mode it is for an agent that programs something else.
    chains, table = "KUBE-SERVICES" in commands[0], commands[0].startswith("nft")
    assert not holds_other_mode(chains, table)
    assert holds_other_mode(False, False) is (chains or table)
    assert holds_other_mode(not chains, not table) is (chains or table)


def test_rules_of_other_programs_are_not_taken_for_a_dataplane():
    for command in (
        "nft add table ip filter",
        "nft add chain ip filter KUBE-FIREWALL",
        "iptables-nft -t nat -N DOCKER",
    ):
        subprocess.run(command.split(), check=True)
    assert not holds_dataplane()
