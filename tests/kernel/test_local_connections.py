# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs of the node that are connected through IPVS get an error at once when their endpoint is excluded.

The kernel of user-mode Linux is built without INET_DIAG_DESTROY and must say so; Debian's own kernels (`make debian`)
have it.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Iterator

import pytest

from tests.lab import system
from tests.lab.pausing import end_connections

pytestmark = pytest.mark.uml

ADDRESS, PORT = "10.96.0.1", 80
ENDPOINTS = ("192.0.2.11", "192.0.2.12")
TARGET_PORT = 8080


@pytest.fixture
def connections() -> Iterator[dict[str, socket.socket]]:
    """Provide an open connection to each endpoint of a virtual server, by the endpoint's address."""
    system.ip_batch(
        [
            "link add services type dummy",
            *(f"address add {address}/32 dev services" for address in (ADDRESS, *ENDPOINTS)),
            "link set services up",
        ]
    )
    # As in ipvs mode: the node's own connections are masqueraded, and tracked with their real server.
    system.run(["iptables-legacy", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"])
    system.run(["ipvsadm", "-A", "-t", f"{ADDRESS}:{PORT}", "-s", "rr"])
    Path("/proc/sys/net/ipv4/vs/conntrack").write_text("1", encoding="ascii")
    for endpoint in ENDPOINTS:
        system.run(["ipvsadm", "-a", "-t", f"{ADDRESS}:{PORT}", "-r", f"{endpoint}:{TARGET_PORT}", "-m"])
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((endpoint, TARGET_PORT))) for endpoint in ENDPOINTS]
        found: dict[str, socket.socket] = {}
        for _turn in ENDPOINTS:
            sock = stack.enter_context(socket.create_connection((ADDRESS, PORT), 30))
            for server in servers:
                server.settimeout(0.2)
                with contextlib.suppress(socket.timeout):
                    accepted, peer = server.accept()
                    stack.enter_context(accepted)
                    assert peer == sock.getsockname()
                    found[server.getsockname()[0]] = sock
        assert set(found) == set(ENDPOINTS)
        yield found


def test_the_socket_of_a_local_program_is_destroyed(connections):
    ended = end_connections("IPv4", (ENDPOINTS[0], TARGET_PORT), (ADDRESS, PORT))
    assert ended.connections == 1
    lost, kept = (connections[endpoint] for endpoint in ENDPOINTS)
    if ended.problem:
        assert "Operation not supported" in ended.problem and ended.sockets == 0
    else:
        assert ended.sockets == 1
        lost.settimeout(30)
        with pytest.raises(ConnectionAbortedError):
            lost.recv(1)
    kept.setblocking(False)
    with pytest.raises(BlockingIOError):
        kept.recv(1)
    assert kept.send(b"x") == 1
