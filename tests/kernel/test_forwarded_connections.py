# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Open connections that the node forwards to an endpoint end when the endpoint fails its checks, and no others do."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Iterator, List

import pytest

from tests.kernel.agent_node import AgentNode, wait_for
from tests.kernel.backends import ADDRESS, PORT, Backend, endpoint, manifests, write_manifests
from tests.lab import system

MODES = ("nftables", "iptables", pytest.param("ipvs", marks=pytest.mark.uml))
CHECK = {"kubenode.proxy/check": "tcp", "kubenode.proxy/check-interval": "200ms"}
ENDED = "ended connections to a failed endpoint"


class Routed:
    """A client and the backends, each in a network namespace behind the node, which routes between them."""

    def __init__(self) -> None:
        self.client, self.servers = (f"knfw{os.getpid()}-{part}" for part in ("client", "servers"))
        for number, name in enumerate((self.client, self.servers)):
            system.ip_batch([f"netns add {name}", f"link add port{number} type veth peer name eth0 netns {name}"])
            system.ip_batch(["link set lo up", "link set eth0 up"], name)
        system.ip_batch(
            [
                *("link set port0 up", "link set port1 up"),
                *("address add 203.0.113.1/24 dev port0", "address add 192.0.2.1/24 dev port1"),
            ]
        )
        system.ip_batch(["address add 203.0.113.10/24 dev eth0", "route add default via 203.0.113.1"], self.client)
        addresses = [f"address add {endpoint(number)}/24 dev eth0" for number in (1, 2)]
        system.ip_batch([*addresses, "route add default via 192.0.2.1"], self.servers)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")

    def backends(self) -> List[Backend]:
        """Start the backends, which keep connections open."""
        with system.inside(f"/run/netns/{self.servers}"):
            return [Backend(number, hold=True) for number in (1, 2)]

    def connection_to(self, number: str) -> socket.socket:
        """Return the client's open connection to one backend, through the Service's address."""
        for _attempt in range(200):
            sock = system.socket_inside(f"/run/netns/{self.client}", socket.AF_INET, socket.SOCK_STREAM)
            sock.settimeout(20)
            sock.connect((ADDRESS, PORT))
            if sock.recv(16).decode() == number:
                return sock
            sock.close()
        raise AssertionError(f"backend {number} never answers")

    def close(self) -> None:
        """Remove the namespaces."""
        system.ip_batch([f"netns delete {name}" for name in (self.client, self.servers)])


@pytest.fixture
def network() -> Iterator[Routed]:
    routed = Routed()
    yield routed
    routed.close()


@pytest.fixture(params=MODES)
def node(request, tmp_path, network) -> Iterator[AgentNode]:
    agent_node = AgentNode(tmp_path, request.param, variant="" if request.param == "nftables" else "legacy")
    write_manifests(agent_node.services, manifests((1, 2), **CHECK))
    yield agent_node
    # Printed if the test fails.
    print(agent_node.log)
    agent_node.close()


def test_a_forwarded_connection_is_reset_at_its_next_packet(node, network):
    with contextlib.ExitStack() as stack:
        backends = network.backends()
        for backend in backends:
            stack.callback(backend.close)
        node.start()
        wait_for(lambda: len(node.status()["checks"]) == 2, 30.0)
        lost, kept = (stack.enter_context(contextlib.closing(network.connection_to(number))) for number in "12")
        # The backend refuses its checks from now on. The connection itself is still open at its end.
        backends[0].stop()
        wait_for(lambda: ENDED in node.log, 30.0)
        lost.settimeout(0.5)
        with pytest.raises(socket.timeout):
            # A client that only waits learns nothing.
            lost.recv(1)
        lost.settimeout(30)
        lost.send(b"x")
        with pytest.raises(ConnectionResetError):
            lost.recv(1)
        # The connection to the backend that passes is not affected, in either direction.
        kept.send(b"x")
        backends[1].send(b"still here")
        kept.settimeout(30)
        assert kept.recv(16) == b"still here"
