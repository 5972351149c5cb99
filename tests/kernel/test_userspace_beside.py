# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A static Service in userspace mode on a node whose other Services the kernel serves, with real packets."""

from __future__ import annotations

import re
import subprocess
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_slice, service
from tests.kernel.backends import (
    ADDRESS,
    PORT,
    Backend,
    ask,
    endpoint,
    make_network,
    manifests,
    three_backends,
    write_manifests,
)
from tests.kernel.userspace_node import addresses_on, userspace_node
from tests.waiting import wait_for

FULL = pytest.mark.full
MODES = (
    "nftables",
    pytest.param("iptables", marks=FULL),
    pytest.param("ipvs", marks=(pytest.mark.uml, FULL)),
)
USERSPACE = {"kubenode.proxy/mode": "userspace"}


@pytest.fixture(params=MODES)
def node(request, tmp_path) -> Iterator[AgentNode]:
    make_network()
    agent_node = userspace_node(tmp_path, request.param, variant="" if request.param == "nftables" else "legacy")
    agent_node.store.put(service(1))
    agent_node.store.put(endpoint_slice(1))
    write_manifests(agent_node.services, manifests(**USERSPACE))
    yield agent_node
    agent_node.close()


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    with three_backends() as servers:
        yield servers


def rules(node: AgentNode) -> str:
    """Return what the kernel has for Services, as the mode's own tool prints it."""
    if node.mode == "ipvs":
        return subprocess.run(["ipvsadm", "-Sn"], check=True, capture_output=True, text=True).stdout
    return node.kernel_text("legacy")


def explained(node: AgentNode) -> str:
    return node.run("explain", "--control", str(node.scratch / "agent.sock"), f"{ADDRESS}:{PORT}").stdout


def test_a_dead_server_costs_no_request(node, backends):
    device = "kube-ipvs0" if node.mode == "ipvs" else "kube-userspace0"
    node.start()
    assert {ask() for _request in range(60)} == {"1", "2", "3"}
    assert (ADDRESS, False) in addresses_on(device)
    # The Services of the cluster follow when it is known.
    wait_for(lambda: cluster_ip(1) in rules(node), 60.0)
    assert ADDRESS not in rules(node)
    assert cluster_ip(1) in [address for address, _deprecated in addresses_on(device)] or node.mode != "ipvs"
    assert {ask() for _request in range(60)} == {"1", "2", "3"}
    shown = explained(node)
    assert f"listen tcp {ADDRESS}:{PORT} forward" in shown and "the agent forwards the connection" in shown
    wait_for(lambda: not node.differences()["changed"], 60.0, 0.5)

    # No check excludes the server, and still no request fails.
    backends[0].stop()
    assert {ask() for _request in range(200)} == {"2", "3"}
    backends[0].start()

    # What another program removes is repaired.
    subprocess.run(["ip", "address", "delete", f"{ADDRESS}/32", "dev", device], check=True)
    wait_for(lambda: (ADDRESS, False) in addresses_on(device), 60.0)
    wait_for(lambda: ask(0.5).isdecimal(), 60.0)

    # The kernel serves it without the annotation, and nothing of userspace mode is left.
    write_manifests(node.services, manifests())
    wait_for(lambda: ADDRESS in rules(node), 60.0)
    wait_for(lambda: not addresses_on("kube-userspace0"), 60.0)
    wait_for(lambda: node.status()["forwarding"].get("listeners", 0) == 0, 60.0)
    assert {ask() for _request in range(60)} == {"1", "2", "3"}
    wait_for(lambda: not node.differences()["changed"], 60.0, 0.5)

    # A change to userspace mode costs no request: listeners are there before rules are removed.
    write_manifests(node.services, manifests(**USERSPACE))
    failed = []

    def changed() -> bool:
        answer = ask()
        failed.extend([] if answer.isdecimal() else [answer])
        return ADDRESS not in rules(node)

    wait_for(changed, 60.0)
    assert not failed and all(ask().isdecimal() for _request in range(60))
    assert node.stop() == 0
    kept = r"stopped; the programmed rules are kept, but not the \d+ listeners of the agent, until the next start"
    assert re.search(kept, node.log)
    settings = ("--config", str(node.scratch / "config.yaml"), "--state-directory", str(node.scratch / "run"))
    assert node.run("cleanup", *settings).returncode == 0
    assert not addresses_on(device) and cluster_ip(1) not in rules(node)


@pytest.mark.parametrize("node", ["nftables"], indirect=True)
def test_without_the_agent_the_kernel_serves_it_with_a_warning(node, backends):
    done = node.converge()
    assert done.returncode == 0, done.stderr
    assert "Service static/apiserver:https (6443/TCP): userspace mode needs the agent; nftables mode serves it" in (
        done.stdout + done.stderr
    )
    assert {ask() for _request in range(60)} == {"1", "2", "3"}
    assert endpoint(1) in rules(node)
    # The agent takes the Service over from the kernel.
    node.start()
    wait_for(lambda: ADDRESS not in rules(node), 60.0)
    assert {ask() for _request in range(60)} == {"1", "2", "3"}
