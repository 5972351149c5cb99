# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One host with many IPv6 addresses keeps nobody out: connections, datagrams and requests to the agent itself."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode
from tests.kernel.userspace_node import service_of, userspace_node
from tests.lab import manifests, system
from tests.waiting import wait_for

SERVICE, ENDPOINT, NODE_IP, USER = "fd00:10:96::7", "fd00:10:244:1::11", "fd00:192::1", "fd00:7:1::1"
HOARD = [f"fd00:7::{number:x}" for number in range(1, 121)]
#: Open files of the agent; a quarter of them are the connections to its own ports.
FILES = 4096
MOST = 100


def answer_datagrams(sock: socket.socket) -> None:
    """Answer each datagram with the port from which it came."""
    with contextlib.suppress(OSError):
        while True:
            _data, peer = sock.recvfrom(100)
            if peer is None:
                break
            sock.sendto(str(peer[1]).encode(), peer)


@pytest.fixture
def node(tmp_path) -> Iterator[AgentNode]:
    agent_node = userspace_node(tmp_path)
    addresses = [ENDPOINT, NODE_IP, USER, *HOARD]
    system.ip_batch([f"-6 address add {address}/128 dev lo nodad" for address in addresses])
    agent_node.node_configuration["userspace"] = {"maxConnections": MOST, "maxSessions": MOST}
    agent_node.write_configuration(healthzBindAddress=f"[{NODE_IP}]:{agent_node.health_port}")
    agent_node.before_exec = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    item = service_of(1, ("TCP", "UDP"), clusterIP=SERVICE, clusterIPs=[SERVICE], ipFamilies=["IPv6"])
    ports = [manifests.port(8080, name=f"p80-{name.lower()}", protocol=name) for name in ("TCP", "UDP")]
    endpoints = [manifests.endpoint(ENDPOINT, "node1")]
    for each in (item, manifests.endpoint_slice("svc-1", endpoints, ports)):
        agent_node.store.put(each)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((ENDPOINT, 8080), family=socket.AF_INET6, backlog=512))
        datagrams = stack.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        datagrams.bind((ENDPOINT, 8080))
        threading.Thread(target=greet, args=(listening,), daemon=True).start()
        threading.Thread(target=answer_datagrams, args=(datagrams,), daemon=True).start()
        agent_node.start()
        yield agent_node
        agent_node.close()
        for sock in (listening, datagrams):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def greet(listening: socket.socket) -> None:
    """Greet each client, and keep its connection open."""
    kept: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while True:
            kept.append(listening.accept()[0])
            kept[-1].sendall(b"hello")


def dial(source: str, place: str, port: int, text: bytes = b"", kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Connect from an address, and send."""
    sock = socket.socket(socket.AF_INET6, kind)
    sock.settimeout(10)
    sock.bind((source, 0))
    sock.connect((place, port))
    sock.sendall(text)
    return sock


def served(source: str, place: str, port: int, text: bytes, kind: int = socket.SOCK_STREAM) -> bool:
    """Return whether a client gets an answer."""
    try:
        with dial(source, place, port, text, kind) as sock:
            return bool(sock.recv(100))
    except OSError:
        return False


def test_a_host_with_many_addresses_keeps_nobody_out(node):
    with contextlib.ExitStack() as stack:
        # Connections: each sends a byte now and then, so that none is silent.
        held = []
        for source in HOARD[: MOST - 1]:
            held.append(stack.enter_context(dial(source, SERVICE, 80)))
            assert held[-1].recv(10) == b"hello"
        for attempt in range(20):
            for sock in held:
                with contextlib.suppress(OSError):
                    sock.send(b"x")
            assert served(USER, SERVICE, 80, b"x"), attempt
            with contextlib.suppress(ConnectionResetError):
                held.append(stack.enter_context(dial(HOARD[attempt], SERVICE, 80)))
        assert node.metric("kubenode_proxy_forwarding_connections") <= MOST

        # Datagrams: the session of another user survives, so the endpoint sees the same port.
        user = stack.enter_context(dial(USER, SERVICE, 80, b"x", socket.SOCK_DGRAM))
        port = user.recv(100)
        for attempt in range(20):
            for source in HOARD:
                assert served(source, SERVICE, 80, b"x", socket.SOCK_DGRAM)
            if not attempt % 5:
                user.send(b"x")
                assert user.recv(100) == port
        assert node.metric("kubenode_proxy_forwarding_sessions") == MOST

        # Requests to the agent's own port, of which the host begins more than there may be.
        begun = FILES // 4 + len(HOARD)
        for number in range(begun):
            stack.enter_context(dial(HOARD[number % len(HOARD)], NODE_IP, node.health_port, b"G"))
        full = "kubenode_proxy_http_connections_closed_total"
        wait_for(lambda: node.metric(full) > 0)
        request = b"GET /healthz HTTP/1.1\r\n\r\n"
        assert sum(served(USER, NODE_IP, node.health_port, request) for _attempt in range(20)) == 20
