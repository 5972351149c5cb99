# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Open connections that the node forwards to an endpoint end when the endpoint fails its checks, and no others do."""

from __future__ import annotations

import contextlib
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode
from tests.kernel.backends import Routed, manifests, write_manifests
from tests.waiting import wait_for

MODES = ("nftables", "iptables", pytest.param("ipvs", marks=pytest.mark.uml))
CHECK = {"kubenode.proxy/check": "tcp", "kubenode.proxy/check-interval": "200ms"}
ENDED = "ended connections to removed or failed endpoints"


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


def test_the_client_of_a_forwarded_connection_is_reset_while_it_waits(node, network):
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
        lost.settimeout(1)
        with pytest.raises(ConnectionResetError):
            lost.recv(1)
        # The connection to the backend that passes is not affected, in either direction.
        kept.send(b"x")
        backends[1].send(b"still here")
        kept.settimeout(30)
        assert kept.recv(16) == b"still here"
