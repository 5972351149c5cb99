# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Static Services with real packets: served before the API server is reachable, protected, reloaded."""

from __future__ import annotations

from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import read_cache
from tests.kernel.agent_node import AgentNode, cluster_ip, endpoint_slice, service
from tests.kernel.backends import (
    ADDRESS,
    NAME,
    PORT,
    Backend,
    ask,
    endpoint,
    make_network,
    manifests,
    three_backends,
    write_manifests,
)
from tests.kernel.userspace_node import node_in_mode
from tests.waiting import wait_for

FULL = pytest.mark.full
MODES = ("nftables", "iptables", pytest.param("ipvs", marks=(pytest.mark.uml, FULL)), "userspace")


@pytest.fixture(params=MODES)
def node(request, tmp_path) -> Iterator[AgentNode]:
    make_network()
    agent_node = node_in_mode(tmp_path, request.param, api=False)
    write_manifests(agent_node.services, manifests())
    yield agent_node
    agent_node.close()


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    with three_backends() as servers:
        yield servers


def known(node):
    return node.status().get("clusterKnown")


def test_a_node_boots_without_any_api_server(node, backends):
    node.start(wait=False)
    wait_for(lambda: ask(0.2).isdecimal(), 60.0)
    assert {ask() for _request in range(60)} == {"1", "2", "3"}
    status = node.status()
    assert status["staticServices"] == {NAME: f"{node.services}/apiserver.json"}
    assert status["clusterKnown"] is False and status["syncs"] > 0
    shown = node.run("explain", "--control", str(node.scratch / "agent.sock"), f"{ADDRESS}:{PORT}").stdout
    assert f"Service {NAME}" in shown and endpoint(2) in shown

    # The cluster is followed as soon as its API server answers.
    node.store.put(service(1))
    node.store.put(endpoint_slice(1))
    node.start_api()
    wait_for(lambda: known(node), 60.0)
    wait_for(lambda: not node.differences()["changed"], 30.0, 0.5)
    assert cluster_ip(1) in node.run("explain", "--control", str(node.scratch / "agent.sock"), "default/svc-1").stdout
    assert {ask() for _request in range(60)} == {"1", "2", "3"}
    # The copy of the cluster on disk holds only objects of the cluster.
    assert node.stop() == 0
    cached = read_cache(str(node.scratch / "cache.gz"))
    assert {item["metadata"]["name"] for item in cached if item["kind"] == "Service"} == {"svc-1"}


@pytest.mark.parametrize(
    "node",
    ["nftables", pytest.param("iptables", marks=FULL), pytest.param("ipvs", marks=(pytest.mark.uml, FULL))],
    indirect=True,
)
def test_files_are_followed_and_a_tenant_cannot_take_the_address(node, backends):
    thief = service(7, namespace="tenant", clusterIP=ADDRESS, clusterIPs=[ADDRESS])
    thief["spec"]["ports"] = [{"name": "p80", "protocol": "TCP", "port": PORT}]
    thief["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    node.store.put(thief)
    node.start_api()
    node.start()
    wait_for(lambda: known(node), 60.0)
    assert {ask() for _request in range(60)} == {"1", "2", "3"}
    (conflict,) = node.status()["conflicts"]
    assert f"{NAME} gets it" in conflict

    write_manifests(node.services, manifests((2,)))
    wait_for(lambda: {ask() for _request in range(20)} == {"2"}, 30.0)
    (node.services / "broken.yaml").write_text("kind: [")
    wait_for(lambda: node.status()["refused"], 30.0)
    (line,) = node.status()["refused"]
    assert line.startswith(f"file {node.services}/broken.yaml: neither JSON nor valid YAML")
    assert {ask() for _request in range(20)} == {"2"}
    # Restart while the API server is down: the programmed state stays, and the copy on disk does not replace it.
    assert node.stop() == 0
    node.stop_api()
    node.start()
    assert {ask() for _request in range(20)} == {"2"}
    (node.services / "apiserver.json").unlink()
    wait_for(lambda: not ask(0.2).isdecimal(), 30.0)


@pytest.mark.parametrize("node", ["nftables"], indirect=True)
def test_a_rollback_restores_static_services_and_keeps_their_files(node, backends):
    """Convergences and rollbacks without the agent; then the agent serves what the files say."""
    node.store.put(service(1))
    node.store.put(endpoint_slice(1))
    node.start_api()
    done = node.converge("--keep-states", "3")
    assert done.returncode == 0, done.stderr
    assert {ask() for _request in range(40)} == {"1", "2", "3"}
    write_manifests(node.services, manifests((2,)))
    done = node.converge("--keep-states", "3")
    assert done.returncode == 0, done.stderr
    assert {ask() for _request in range(20)} == {"2"}
    files = {path.name: path.read_bytes() for path in node.services.iterdir()}
    done = node.run("rollback", *node.places)
    assert done.returncode == 0, done.stderr
    assert {ask() for _request in range(40)} == {"1", "2", "3"}
    assert {path.name: path.read_bytes() for path in node.services.iterdir()} == files
    node.start()
    assert {ask() for _request in range(20)} == {"2"}
