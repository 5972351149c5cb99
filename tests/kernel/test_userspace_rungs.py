# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""userspace mode in its intended environments: kernels without netfilter, unprivileged containers, dying endpoints."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import struct
import threading
import time
from typing import Iterator

import pytest

from tests.kernel.agent_node import AgentNode, cluster_ip
from tests.kernel.backends import ADDRESS, PORT, endpoint, manifests, write_manifests
from tests.kernel.backends import Backend as CheckedBackend
from tests.kernel.userspace_node import Backend, answering, ask, endpoints_of, service_of, userspace_node
from tests.lab import system
from tests.waiting import wait_for

FIRST, SECOND, THIRD = "10.244.1.11", "10.244.1.12", "10.244.1.13"
DEVICE = "kube-userspace0"

# linux/filter.h, linux/seccomp.h, linux/prctl.h
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_SYS_SOCKET, _SYS_GETSOCKOPT, _SYS_SETSOCKOPT = 41, 55, 54
_AF_NETLINK, _NETLINK_NETFILTER = 16, 12
_EPROTONOSUPPORT, _ENOPROTOOPT = 93, 92
#: Base of the socket options of iptables-legacy (linux/netfilter_ipv4/ip_tables.h and its IPv6 counterpart).
_XTABLES_OPTION = 64


def _without_netfilter() -> None:
    """Make the kernel appear to this process as one built without netfilter: no nfnetlink, no xtables."""
    program = [
        (_LOAD, 0, 0, 0),  # the system call number
        (_EQUAL, 0, 4, _SYS_SOCKET),
        (_LOAD, 0, 0, 16),
        (_EQUAL, 0, 9, _AF_NETLINK),
        (_LOAD, 0, 0, 32),
        (_EQUAL, 6, 7, _NETLINK_NETFILTER),
        (_EQUAL, 1, 0, _SYS_GETSOCKOPT),
        (_EQUAL, 0, 5, _SYS_SETSOCKOPT),
        (_LOAD, 0, 0, 32),
        (0x35, 0, 3, _XTABLES_OPTION),  # greater or equal
        (0x35, 2, 0, _XTABLES_OPTION + 8),
        (_RETURN, 0, 0, _ERRNO | _ENOPROTOOPT),
        (_RETURN, 0, 0, _ERRNO | _EPROTONOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_program = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, filter_program, 0, 0) == 0, ctypes.get_errno()


@pytest.fixture
def backends() -> Iterator[list[Backend]]:
    servers = [Backend(address) for address in (FIRST, SECOND, THIRD)]
    yield servers
    for item in servers:
        item.close()


@pytest.fixture
def node(tmp_path) -> Iterator[AgentNode]:
    system.ip_batch(["address add 192.0.2.1/32 dev lo"])
    agent_node = userspace_node(tmp_path)
    agent_node.store.put(service_of(1))
    agent_node.store.put(endpoints_of(1, [FIRST, SECOND]))
    yield agent_node
    agent_node.close()


def test_auto_without_netfilter(node, backends):
    node.write_configuration(mode="iptables")
    node.options += ["--mode", "auto"]
    node.before_exec = _without_netfilter
    # A one-shot convergence is refused and names what each mode lacks.
    done = node.converge("--mode", "auto")
    assert done.returncode not in (0, 3)
    for words in ("nftables mode is not possible", "ipvs mode is not possible", "iptables mode is not possible"):
        assert words in done.stderr
    assert "userspace mode needs the agent" in done.stderr
    # The agent serves, with a warning.
    node.start()
    assert answering(cluster_ip(1), 80) == {FIRST, SECOND}
    status = node.status()
    assert status["mode"] == "userspace"
    assert "iptables mode is not possible" in status["modeReason"]
    assert "endpoints see the address of this node" in node.log
    assert status["lastError"] == ""
    assert "level=error" not in node.log
    # The cleanup of other modes' leftovers recognizes that none can exist.
    assert "cannot be removed" not in node.log
    node.stop()
    assert node.run("cleanup", "--state-directory", str(node.scratch / "run")).returncode == 0
    assert DEVICE not in system.run(["ip", "link"])


def test_existing_addresses_are_served_without_privileges(node, backends):
    """As in a container without CAP_NET_ADMIN, where another program has made the addresses local."""
    node.store.put(service_of(2, externalIPs=["198.51.100.9"]))
    node.store.put(endpoints_of(2, [THIRD]))
    system.ip_batch(["route add local 10.96.0.0/12 dev lo"])
    node.prefix = ["setpriv", "--bounding-set", "-net_admin,-net_raw", "--inh-caps", "-net_admin,-net_raw"]
    node.start()
    assert answering(cluster_ip(1), 80) == {FIRST, SECOND}
    assert answering(cluster_ip(2), 80) == {THIRD}
    assert DEVICE not in system.run(["ip", "link"])
    wait_for(lambda: "this node does not have the address" in node.log, 20.0)
    forwarding = node.status()["forwarding"]
    assert forwarding["unbound"] == ["198.51.100.9:80/TCP: this node does not have the address"]
    shown = node.run("status", "--control", str(node.scratch / "agent.sock"))
    assert "cannot listen: 198.51.100.9:80/TCP: this node does not have the address" in shown.stdout
    # Once the address exists it is served.
    system.ip_batch(["address add 198.51.100.9/32 dev lo"])
    wait_for(lambda: node.status()["forwarding"]["unboundCount"] == 0, 20.0)
    assert answering("198.51.100.9", 80) == {THIRD}


def test_connections_to_an_endpoint_that_fails_its_checks_are_reset_at_once(node, backends):
    checked = manifests((1, 2), **{"kubenode.proxy/check": "tcp", "kubenode.proxy/check-interval": "200ms"})
    with contextlib.ExitStack() as stack:
        system.ip_batch([f"address add {endpoint(number)}/32 dev lo" for number in (1, 2)])
        servers = [CheckedBackend(number, hold=True) for number in (1, 2)]
        for server in servers:
            stack.callback(server.close)
        write_manifests(node.services, checked)
        node.start()
        wait_for(lambda: len(node.status()["checks"]) == 2, 30.0)
        found = {}
        while set(found) != {b"1", b"2"}:
            sock = stack.enter_context(socket.create_connection((ADDRESS, PORT), 30.0))
            found[sock.recv(16)] = sock
        servers[0].stop()
        # The client does not send anything, and its endpoint keeps the connection open.
        with pytest.raises(ConnectionResetError):
            found[b"1"].recv(1)
        servers[1].send(b"still here")
        assert found[b"2"].recv(16) == b"still here"
    assert "cannot be ended" not in node.log


def test_random_changes_lose_no_request_of_an_unchanged_service(node, backends):
    chosen = random.Random(11)
    for number in range(2, 12):
        node.store.put(service_of(number))
        node.store.put(endpoints_of(number, [FIRST]))
    node.start()
    stop, failures, requests = threading.Event(), [], [0]

    def client() -> None:
        while not stop.is_set():
            try:
                assert ask(cluster_ip(1), 80).split()[0] in (FIRST, SECOND)
                requests[0] += 1
            except OSError as error:
                failures.append(error)

    def talker() -> None:
        with socket.create_connection((cluster_ip(1), 80)) as sock:
            sock.settimeout(10)
            while not stop.is_set():
                sock.sendall(b"x")
                if not sock.recv(100).endswith(b"x"):
                    failures.append(OSError("not the answer"))

    clients = [threading.Thread(target=body, daemon=True) for body in (client, client, talker)]
    for item in clients:
        item.start()
    served = set(range(2, 12))
    began = time.monotonic()
    try:
        while time.monotonic() - began < 5.0 or requests[0] <= 50:
            assert time.monotonic() - began < 120.0, requests
            number = chosen.randrange(2, 12)
            if number in served and chosen.random() < 0.2:
                node.store.delete("Service", "default", f"svc-{number}")
                served.discard(number)
            else:
                node.store.put(service_of(number))
                node.store.put(endpoints_of(number, chosen.sample([FIRST, SECOND, THIRD], chosen.randrange(1, 4))))
                served.add(number)
            time.sleep(0.01)
    finally:
        stop.set()
        for item in clients:
            item.join(20)
    assert failures == []
    assert node.status()["lastError"] == ""
    assert node.differences()["changed"] is False


def test_a_dead_endpoint_is_not_noticed(node, backends):
    """No kernel mode can retry: a third of the requests would fail until the endpoint is removed."""
    node.store.put(endpoints_of(1, [FIRST, SECOND, THIRD]))
    node.start()
    assert answering(cluster_ip(1), 80, 12) == {FIRST, SECOND, THIRD}
    backends[2].close()
    assert answering(cluster_ip(1), 80, 30) == {FIRST, SECOND}
