# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent and annotations of the policy of Services with real packets: weights, maintenance, schedulers of IPVS."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections import Counter
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.kernel.agent_node import AgentNode
from tests.kernel.backends import ADDRESS, PORT, Backend, ask, connected_to, endpoint, make_network, three_backends
from tests.lab import manifests
from tests.waiting import wait_for

WEIGHT = "kubenode.proxy/weight"
MODES = ("nftables", "iptables", "userspace", pytest.param("ipvs", marks=pytest.mark.uml))
PORTS = [manifests.port(PORT)]


def node_of(number, weight=""):
    """Return the Node of a backend, with a weight if one is given."""
    annotations = {WEIGHT: weight} if weight else {}
    node = manifests.node(f"w{number}", f"198.51.100.{number}", f"10.250.{number}.0/24")
    return {**node, "metadata": {"name": f"w{number}", "labels": {}, "annotations": annotations}}


def slice_of(number, weight=""):
    """Return the EndpointSlice of a backend, with a weight if one is given."""
    listed = [manifests.endpoint(endpoint(number), f"w{number}")]
    item = manifests.endpoint_slice("web", listed, PORTS, name=f"web-{number}")
    item["metadata"]["annotations"] = {WEIGHT: weight} if weight else {}
    return item


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    with three_backends(hold=True) as servers:
        yield servers


def make_node(scratch, mode):
    make_network()
    node = AgentNode(scratch, mode, variant="legacy" if mode in ("iptables", "ipvs") else "")
    node.node_configuration["servicePolicy"] = {"nodeWeights": True}
    node.write_configuration()
    node.store.put(manifests.service("web", ADDRESS, PORTS))
    return node


@pytest.fixture(params=MODES)
def node(request, tmp_path) -> Iterator[AgentNode]:
    made = make_node(tmp_path, request.param)
    yield made
    # Printed if the test fails.
    print(made.log)
    made.close()


def explained(node):
    return node.run("explain", "--control", str(node.scratch / "agent.sock"), f"{ADDRESS}:{PORT}").stdout


def test_weights_share_connections_and_0_keeps_those_that_exist(node, backends):
    for number, weight in ((1, "3"), (2, ""), (3, "0")):
        node.store.put(slice_of(number, weight))
        node.store.put(node_of(number))
    node.start()
    wait_for(lambda: ask(0.5) in ("1", "2"), 60.0)
    found = Counter(ask() for _request in range(400))
    # More than six standard deviations from three quarters; without weights there would be 200 of each.
    assert found["1"] + found["2"] == 400 and 245 <= found["1"] <= 355
    assert f"no  {endpoint(3)}:{PORT}: ready; in maintenance: its weight is 0" in explained(node)

    with contextlib.closing(connected_to("1")) as kept:
        node.store.put(node_of(1, "0"))
        wait_for(lambda: f"no  {endpoint(1)}:{PORT}: ready; in maintenance" in explained(node), 30.0)
        assert {ask() for _request in range(40)} == {"2"}
        kept.settimeout(0.5)
        with pytest.raises(socket.timeout):
            kept.recv(1)
        kept.send(b"x")

        # Without any weight there is no endpoint.
        node.store.put(slice_of(2, "0"))
        wait_for(lambda: ask(0.5) == "ConnectionRefusedError", 30.0)
    node.store.put(node_of(1))
    wait_for(lambda: ask(0.5) == "1", 30.0)
    assert {ask() for _request in range(20)} == {"1"}


@pytest.mark.parametrize("node", ["nftables", pytest.param("ipvs", marks=pytest.mark.uml)], indirect=True)
def test_the_share_of_a_new_endpoint_rises(node, backends):
    """It stays at an eighth of its weight while the time is an hour, and rises to the whole when it is five seconds."""

    def lasting(text):
        return manifests.service("web", ADDRESS, PORTS, metadata={"annotations": {"kubenode.proxy/slow-start": text}})

    for item in (lasting("60m"), slice_of(1)):
        node.store.put(item)
    node.start()
    assert {ask() for _request in range(20)} == {"1"}
    node.store.put(slice_of(2))
    wait_for(lambda: "in slow start with 1/8 of its share" in explained(node), 60.0)
    found = Counter(ask() for _request in range(200))
    # Six standard deviations around a ninth, and then around a half.
    assert found["1"] + found["2"] == 200 and 1 <= found["2"] <= 49
    node.store.put(lasting("5s"))
    wait_for(lambda: f"{endpoint(2)}:{PORT}: ready\n" in explained(node), 60.0)
    found = Counter(ask() for _request in range(200))
    assert found["1"] + found["2"] == 200 and 58 <= found["2"] <= 142


def virtual_servers():
    """Return the options of virtual servers as ipvsadm prints them, by address and port."""
    lines = subprocess.run(["ipvsadm", "-Sn"], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[2]: " ".join(line.split()[3:]) for line in lines if line.startswith("-A")}


def scheduled(scheduler, flags=""):
    annotations = {"kubenode.proxy/scheduler": scheduler, "kubenode.proxy/scheduler-flags": flags}
    return {"annotations": {name: value for name, value in annotations.items() if value}}


WITH_FLAGS = "-s sh -b sh-fallback,sh-port"
#: A scheduler of newer kernels, which that of the guest does not have.
MISSING = "twos"


@pytest.mark.uml
def test_services_choose_their_scheduler_and_a_missing_one_costs_nothing(tmp_path):
    """First in a run without an agent, in check mode before, then with an agent, which repairs external changes."""
    chosen, missing = f"{ADDRESS}:{PORT}", f"10.103.97.9:{PORT}"
    flags = "sh-fallback,sh-port"
    objects = [
        manifests.service("web", ADDRESS, PORTS, metadata=scheduled("sh", flags)),
        manifests.service("new", "10.103.97.9", PORTS, metadata=scheduled(MISSING)),
        slice_of(1),
        manifests.node("node1", "192.0.2.1", "10.244.1.0/24"),
    ]
    make_network()
    request = Request(
        ClusterState.from_objects(objects),
        load({"mode": "ipvs"}, "").configuration,
        node_name="node1",
        state_directory=str(tmp_path / "once"),
    )
    warning = f"Service default/new ({PORT}/TCP): this kernel has no scheduler {MISSING}; the node's (rr) is used"
    for check, changed in ((True, True), (False, True), (True, False)):
        report = converge(request._replace(check=check))
        assert report.changed is changed
        assert [line for line in report.warnings if "scheduler" in line] == [warning]
    assert virtual_servers() == {chosen: WITH_FLAGS, missing: "-s rr"}

    node = AgentNode(tmp_path, "ipvs", variant="legacy")
    for item in objects[:3]:
        node.store.put(item)
    with contextlib.closing(node):
        node.start()
        assert virtual_servers() == {chosen: WITH_FLAGS, missing: "-s rr"}
        assert node.status()["ignored"] == [warning]
        subprocess.run(["ipvsadm", "-E", "-t", chosen, "-s", "lc"], check=True)
        wait_for(lambda: virtual_servers()[chosen] == WITH_FLAGS, 30.0)
        node.store.put(manifests.service("web", ADDRESS, PORTS, metadata=scheduled("mh", "mh-port")))
        wait_for(lambda: virtual_servers()[chosen] == "-s mh -b mh-port", 30.0)
        node.store.put(manifests.service("web", ADDRESS, PORTS))
        wait_for(lambda: virtual_servers()[chosen] == "-s rr", 30.0)
