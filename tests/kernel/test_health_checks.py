# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Health checks of a static Service with real packets: a failed endpoint is skipped, its connections are closed."""

from __future__ import annotations

import contextlib
import socket
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode, endpoint_slice, service
from tests.kernel.backends import (
    ADDRESS,
    NAME,
    PORT,
    Backend,
    ask,
    connected_to,
    endpoint,
    make_network,
    manifests,
    three_backends,
    write_manifests,
)
from tests.kernel.userspace_node import node_in_mode
from tests.lab import system
from tests.waiting import wait_for

MODES = ("nftables", "iptables", pytest.param("ipvs", marks=pytest.mark.uml), "userspace")
NO_DESTROY = "sockets of local programs cannot be closed"
CHECK = {"kubenode.proxy/check": "tcp", "kubenode.proxy/check-interval": "200ms"}


@pytest.fixture(params=MODES)
def node(request, tmp_path) -> Iterator[AgentNode]:
    make_network()
    agent_node = node_in_mode(tmp_path, request.param)
    write_manifests(agent_node.services, manifests(**CHECK))
    yield agent_node
    # Printed if the test fails.
    print(agent_node.log)
    agent_node.close()


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    with three_backends(hold=True) as servers:
        yield servers


def failing(node):
    return {item["endpoint"] for item in node.status()["checks"] if not item["passing"]}


def answers():
    return {ask() for _request in range(40)}


def explained(node):
    return node.run("explain", "--control", str(node.scratch / "agent.sock"), f"{ADDRESS}:{PORT}").stdout


def await_end(node, connection) -> Exception:
    """Return the error that a client of a failed backend gets, after a send where the kernel cannot close sockets."""
    connection.settimeout(0.2)
    for _attempt in range(100):
        try:
            if NO_DESTROY in node.log:
                connection.send(b"x")
            connection.recv(16)
        except socket.timeout:
            continue
        except OSError as error:
            return error
    raise AssertionError("the connection is still open")


def test_failed_endpoints_are_skipped_until_they_pass(node, backends):
    node.start()
    wait_for(lambda: len(node.status()["checks"]) == 3, 30.0)
    assert failing(node) == set() and answers() == {"1", "2", "3"}
    kept = connected_to("3")
    with contextlib.closing(connected_to("1")) as lost:
        backends[0].stop()
        # A local program learns of it at once, although the held connection itself is still open.
        assert isinstance(await_end(node, lost), OSError)
    assert failing(node) == {f"{endpoint(1)}:{PORT}"} and answers() == {"2", "3"}
    text = explained(node)
    assert f"no  {endpoint(1)}:{PORT}: excluded: failed 2 of 2 checks, last error: Connection refused" in text
    assert node.metric("kubenode_proxy_checked_endpoints") == 3
    # Connections to a passing backend are not touched.
    kept.settimeout(0.5)
    with contextlib.closing(kept), pytest.raises(socket.timeout):
        kept.recv(1)

    # If all endpoints fail, all are served.
    backends[1].stop()
    backends[2].stop()
    wait_for(lambda: len(failing(node)) == 3, 30.0)
    wait_for(lambda: "served because too few endpoints pass" in explained(node), 30.0)
    for backend in backends[:2]:
        backend.start()
    wait_for(lambda: failing(node) == {f"{endpoint(3)}:{PORT}"}, 30.0)
    wait_for(lambda: answers() == {"1", "2"}, 30.0)
    shown = node.run("status", "--control", str(node.scratch / "agent.sock")).stdout
    assert f"check:      {NAME} {endpoint(3)}:{PORT}: failing" in shown


def test_a_node_boots_while_a_backend_is_dead(node, backends):
    node.stop_api()
    backends[1].stop()
    node.start(wait=False)
    wait_for(lambda: ask(0.2).isdecimal(), 60.0)
    wait_for(lambda: failing(node) == {f"{endpoint(2)}:{PORT}"}, 30.0)
    wait_for(lambda: answers() == {"1", "3"}, 30.0)


def test_an_endpoint_at_an_address_that_the_node_gets_is_not_checked_any_more(tmp_path):
    make_network()
    later = endpoint(30)
    node = AgentNode(tmp_path, "nftables")
    node.node_configuration["healthChecks"] = {"namespaces": ["default"]}
    node.write_configuration()
    tenant = service(1)
    tenant["metadata"]["annotations"] = CHECK
    node.store.put(tenant)
    slices = endpoint_slice(1, 1)
    slices["endpoints"][0]["addresses"] = [later]
    node.store.put(slices)
    with contextlib.closing(node):
        node.start()
        wait_for(lambda: failing(node) == {f"{later}:8080"}, 30.0)
        system.ip_batch([f"address add {later}/32 dev backends"])
        wait_for(lambda: node.status()["checks"] == [], 30.0)
        assert node.status()["unchecked"] == [
            "Service default/svc-1: endpoints at addresses of this node are not checked"
        ]
        system.ip_batch([f"address del {later}/32 dev backends"])
        wait_for(lambda: len(node.status()["checks"]) == 1, 30.0)
        assert node.stop() == 0
        assert "stopped; the programmed rules are kept" in node.log
