# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients of a removed endpoint are reset at the time that its Service or the configuration names, and no others are.

The endpoint's machine is lost: it neither answers nor resets.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.socket import finished
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.tcp_resets import resetting
from tests.kernel.agent_node import AgentNode, endpoint_slice, service
from tests.kernel.backends import ADDRESS, ADDRESS_SIX, PORT, Backend, Routed, endpoint, manifests, write_manifests
from tests.lab import system
from tests.waiting import wait_for

MODES = ("nftables", "iptables", "userspace", pytest.param("ipvs", marks=pytest.mark.uml))
SAME = (
    "nftables",
    pytest.param("iptables", marks=pytest.mark.full),
    pytest.param("ipvs", marks=(pytest.mark.uml, pytest.mark.full)),
)
ANNOTATION = "kubenode.proxy/removed-endpoints"
ENDED = "ended connections to removed or failed endpoints"
NODE_PORT = 30443
#: Of the Service's load balancer.
BALANCED = ("198.51.100.7", "fd00:198::7")


@pytest.fixture
def network() -> Iterator[Routed]:
    routed = Routed()
    yield routed
    routed.close()


@pytest.fixture
def backends(network) -> Iterator[list[Backend]]:
    found = network.backends()
    yield found
    for backend in found:
        backend.close()


def in_modes(*modes):
    """Return the mark of a test in modes; those that show the same as another one run with all tests only."""
    return pytest.mark.parametrize("node", modes, indirect=True)


@pytest.fixture
def node(request, tmp_path, network, backends) -> Iterator[AgentNode]:
    agent_node = AgentNode(tmp_path, request.param, variant="legacy" if request.param == "ipvs" else "")
    yield agent_node
    # Printed if the test fails.
    print(agent_node.log)
    agent_node.close()


def serve(node, numbers, policy="", unready=()) -> None:
    """Write the Service and its endpoints: a node port, and the annotation if there is one."""
    served, slices = manifests((*numbers, *unready), **({ANNOTATION: policy} if policy else {}))
    served["spec"]["type"] = "NodePort"
    served["spec"]["ports"][0]["nodePort"] = NODE_PORT
    for item in slices["endpoints"][len(numbers) :]:
        item["conditions"] = {"ready": False, "serving": False}
    write_manifests(node.services, [served, slices])


def serves(node, count) -> bool:
    """Return whether the agent has applied that many endpoints."""
    found = node.run("explain", "--control", str(node.scratch / "agent.sock"), f"{ADDRESS}:{PORT}").stdout
    return sum(endpoint(number) in found for number in (1, 2)) == count


def lose(network, number=1) -> None:
    """Have the machine of an endpoint answer nothing any more."""
    lines = [f"rule add from {endpoint(number)} blackhole", f"-6 rule add from {endpoint(number, 'IPv6')} blackhole"]
    system.ip_batch(lines, network.servers)


def error_after(sock: socket.socket, seconds: float) -> str:
    """Return the name of the error that a client which only reads gets, ``timeout`` if none, and keep the time."""
    sock.settimeout(seconds)
    try:
        sock.recv(1)
    except OSError as error:
        return type(error).__name__.replace("TimeoutError", "timeout")
    return "end"


def busy(sock: socket.socket, found: list[str]) -> None:
    """Send until an error, whose name is recorded."""
    sock.settimeout(30)
    with contextlib.suppress(socket.timeout):
        try:
            while True:
                sock.send(b"x" * 100)
                time.sleep(0.002)
        except ConnectionError as error:
            found.append(type(error).__name__)


def dual_stack(numbers) -> list[dict]:
    """Return the Service, as a load balancer with addresses of both families, and its endpoints."""
    served, slices = manifests(numbers, **{ANNOTATION: "reset"})
    served["spec"].update(
        type="LoadBalancer",
        clusterIPs=[ADDRESS, ADDRESS_SIX],
        ipFamilies=["IPv4", "IPv6"],
        ipFamilyPolicy="RequireDualStack",
    )
    served["spec"]["ports"][0]["nodePort"] = NODE_PORT
    served["status"] = {"loadBalancer": {"ingress": [{"ip": address} for address in BALANCED]}}
    six = {**slices, "metadata": {**slices["metadata"], "name": "apiserver-six"}, "addressType": "IPv6"}
    six["endpoints"] = [{"addresses": [endpoint(number, "IPv6")]} for number in numbers]
    return [served, slices, six]


@in_modes(*MODES)
def test_clients_of_a_lost_endpoint_are_reset_within_a_second(node, network):
    # By default nftables mode serves node ports only on the address that the Node object has.
    node.write_configuration(nodePortAddresses=["203.0.113.0/24", "fd00:203::/64"])
    write_manifests(node.services, dual_stack((1, 2)))
    node.start()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [backend.close() for backend in six])
        six = network.backends(["IPv6"])

        def connection(number, address=ADDRESS, port=PORT):
            made = network.connection_to(number, address=address, port=port)
            return stack.enter_context(contextlib.closing(made))

        sending = connection("1")
        kept = [connection("2", address) for address in (ADDRESS, ADDRESS_SIX)]
        waiting = [connection("1", address) for address in (ADDRESS, ADDRESS_SIX, *BALANCED)]
        # Masqueraded ones.
        waiting += [connection("1", address, NODE_PORT) for address in ("203.0.113.1", "fd00:203::1")]
        errors: list[str] = []
        thread = threading.Thread(target=busy, args=(sending, errors))
        thread.start()
        lose(network)
        write_manifests(node.services, dual_stack((2,)))
        wait_for(lambda: node.log.count(ENDED) == 2, 30.0, 0.01)
        begin = time.monotonic()
        assert [error_after(sock, 1.0) for sock in waiting] == ["ConnectionResetError"] * len(waiting)
        thread.join(1.0)
        assert errors in (["ConnectionResetError"], ["BrokenPipeError"])
        assert time.monotonic() - begin < 1.0
        for sock in kept:
            assert error_after(sock, 0.2) == "timeout"
            sock.send(b"x")
        assert node.log.count(" local=0 reset=") == 2


@in_modes(*SAME)
def test_a_client_is_reset_when_the_time_has_passed_also_if_the_agent_was_restarted(node, network):
    serve(node, (1, 2), "reset-after=6s")
    node.start()
    with (
        contextlib.closing(network.connection_to("1")) as first,
        contextlib.closing(network.connection_to("2")) as kept,
    ):
        lose(network)
        begin = time.monotonic()
        serve(node, (2,), "reset-after=6s", unready=(1,))
        assert error_after(first, 5.5) == "timeout"
        assert error_after(first, 30.0) == "ConnectionResetError"
        # The agent reads the files every two seconds, and a busy machine delays the reset.
        assert 6.0 <= time.monotonic() - begin < 20.0
        # An endpoint that is back in time keeps its connections.
        synced = node.log.count("msg=synced")
        serve(node, (1,), "reset-after=6s", unready=(2,))
        wait_for(lambda: node.log.count("msg=synced") > synced, 30.0)
        serve(node, (1, 2), "reset-after=6s")
        assert error_after(kept, 8.0) == "timeout"
        # What was removed while no agent ran is due as long after its start.
        node.stop()
        lose(network, 2)
        serve(node, (1,), "reset-after=6s")
        node.start()
        begin = time.monotonic()
        assert error_after(kept, 1.0) == "timeout"
        assert error_after(kept, 30.0) == "ConnectionResetError"


@in_modes("nftables")
@pytest.mark.parametrize("default", ["keep", "reset"])
def test_the_default_of_the_configuration_and_of_kube_proxy(node, network, default):
    policy = {} if default == "keep" else {"servicePolicy": {"removedEndpoints": default}}
    node.node_configuration.update(policy)
    node.write_configuration()
    serve(node, (1, 2))
    node.start()
    with contextlib.closing(network.connection_to("1")) as idle:
        lose(network)
        serve(node, (2,))
        wait_for(lambda: serves(node, 1), 30.0)
        expected = {"keep": "timeout", "reset": "ConnectionResetError"}
        assert error_after(idle, 2.0 if default == "keep" else 30.0) == expected[default]
        if default == "reset":
            # The agent reports after the client was reset.
            wait_for(lambda: ENDED in node.log, 30.0)
        assert (ENDED in node.log) == (default == "reset")


@in_modes(*SAME[:2])
def test_clients_of_a_deleted_service_are_reset(node, network):
    serve(node, (1, 2), "reset")
    node.start()
    with contextlib.closing(network.connection_to("1")) as idle:
        write_manifests(node.services, [])
        assert error_after(idle, 30.0) == "ConnectionResetError"


@in_modes(*SAME)
def test_a_program_of_the_node_gets_an_error(node, network):
    serve(node, (1, 2), "reset")
    node.start()
    with contextlib.closing(network.connection_to("1", local=True)) as local:
        lose(network)
        serve(node, (2,), "reset")
        wait_for(lambda: ENDED in node.log, 30.0, 0.01)
        if "sockets of local programs cannot be closed" in node.log:
            with contextlib.suppress(ConnectionError):
                local.send(b"x")
        assert error_after(local, 30.0) in ("ConnectionAbortedError", "ConnectionResetError", "end")


@pytest.mark.parametrize("mode", ["nftables", pytest.param("iptables", marks=pytest.mark.full)])
def test_a_run_without_the_agent_resets_at_once_and_names_what_it_cannot(tmp_path, network, backends, mode):
    node = AgentNode(tmp_path, mode)
    with contextlib.closing(node):
        node.store.put(service(1))
        node.store.put(endpoint_slice(1))
        serve(node, (1, 2), "reset")
        assert node.converge().returncode == 0
        with contextlib.closing(network.connection_to("1")) as idle:
            lose(network)
            serve(node, (2,), "reset-after=30s")
            run = node.converge()
            assert run.returncode == 0 and "reset-after needs the agent" in run.stdout + run.stderr
            assert error_after(idle, 1.0) == "timeout"
            serve(node, (2,), "reset", unready=(1,))
            assert node.converge().returncode == 0
            # The tables have not changed, so nothing is examined.
            assert error_after(idle, 1.0) == "timeout"
            serve(node, (1, 2), "reset")
            assert node.converge().returncode == 0
            serve(node, (2,), "reset")
            assert node.converge().returncode == 0
            assert error_after(idle, 1.0) == "ConnectionResetError"


@pytest.mark.parametrize(("family", "server"), [("IPv4", "192.0.2.11"), ("IPv6", "fd00:192::11")])
def test_a_client_that_only_waits_is_reset_in_both_families(network, family, server):
    number = socket.AF_INET6 if family == "IPv6" else socket.AF_INET
    with contextlib.ExitStack() as stack:

        def made(place):
            return stack.enter_context(
                contextlib.closing(system.socket_inside(f"/run/netns/{place}", number, socket.SOCK_STREAM))
            )

        listener, idle = made(network.servers), made(network.client)
        listener.bind((server, 8080))
        listener.listen(1)
        wait_for(lambda: idle.connect_ex((server, 8080)) in (0, 106), 20.0)
        accepted = stack.enter_context(listener.accept()[0])
        # What the client has not acknowledged for long is part of the number that it reports.
        accepted.send(b"x" * 5000)
        assert len(idle.recv(5000, socket.MSG_WAITALL)) == 5000
        flow = tuple(
            (packed(place[0]) or b"") + place[1].to_bytes(2, "big") for place in (idle.getsockname(), (server, 8080))
        )
        gone = (flow[0][:-2] + b"\0\1", flow[1])
        begin = time.monotonic()
        assert finished(resetting(family, {flow, gone})) == 1
        # A client that has no such connection any more is not waited for. One whose kernel has just answered a segment
        # of a lost or repeated handshake so answers the second request.
        assert time.monotonic() - begin < 1.0
        assert error_after(idle, 1.0) == "ConnectionResetError"
