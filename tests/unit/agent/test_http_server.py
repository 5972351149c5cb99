# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's HTTP server: one thread, bounded connections, and no client that can stop it from answering others."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import struct
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http.connections import (
    Limits,
    limits_of,
    raise_open_files,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http.message import (
    MOST_HEAD_BYTES,
    BadRequest,
    HttpRequest,
    head_length,
    parse_head,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http.server import DEADLINE, EVICTED
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from tests.lab.idle import hold_idle
from tests.unit.agent.http_bench import GET, HERE, OTHER, ask, connect, read_all, respond, running
from tests.waiting import PATIENCE, wait_for


@pytest.fixture(autouse=True)
def enough_files():
    assert raise_open_files() >= 16384


def threads():
    """Return the numbers of the threads: one of an earlier test may end meanwhile, but a new one is always noticed."""
    return set(os.listdir("/proc/self/task"))


def test_answers_and_closes():
    with running() as found:
        answer = ask(found.port)
        head, _blank, body = answer.partition(b"\r\n\r\n")
        assert head.split(b"\r\n")[0] == b"HTTP/1.1 200 OK"
        assert b"Content-Length: 12" in head and b"Connection: close" in head and b"Date: " in head
        assert body == b"GET /healthz"
        assert b"Server:" not in head and b"Python" not in answer


@pytest.mark.parametrize(
    ("request_bytes", "start", "end"),
    [
        (b"HEAD /x HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK", b"\r\n\r\n"),
        (b"GET /x?y=z HTTP/1.1\nHost: n\n\n", b"HTTP/1.1 200 OK", b"GET /x"),
        (b"DELETE /x HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK", b"DELETE /x"),
        (b"GET http://n:80/x HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK", b"GET /x"),
        # As kube-proxy, whose handlers do not look at the method; HAProxy's checks send OPTIONS by default.
        (b"OPTIONS /x HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK", b"OPTIONS /x"),
        (b"POST /x HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"HTTP/1.1 200 OK", b"POST /x"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"HTTP/1.1 505 ", b"served\n"),
        (b"GET  /x HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request", b"not valid\n"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"HTTP/1.1 400 Bad Request", b"not valid\n"),
        (b"GET x HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request", b"not a path\n"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", b"HTTP/1.1 431 ", b"bytes\n"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20000, b"HTTP/1.1 431 ", b"bytes\n"),
        (b"GET /broken HTTP/1.1\r\n\r\n", b"HTTP/1.1 500 ", b"internal error\n"),
    ],
)
def test_every_request_gets_its_answer_and_the_next_one_too(request_bytes, start, end):
    with running() as found:
        answer = ask(found.port, request_bytes)
        assert answer.startswith(start) and answer.endswith(end), answer
        assert ask(found.port).endswith(b"GET /healthz")


def test_a_request_may_arrive_byte_by_byte_and_the_answer_be_read_slowly():
    with running() as found, connect(found.port) as sock:
        for number in range(len(GET)):
            sock.sendall(GET[number : number + 1])
        assert read_all(sock).endswith(b"GET /healthz")
        with connect(found.port) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
            slow.sendall(b"GET /large HTTP/1.1\r\n\r\n")
            assert ask(found.port).endswith(b"GET /healthz")
            assert len(read_all(slow)) > 1 << 22


def test_heads_are_parsed_as_they_are_written():
    head = b"GET /a HTTP/1.1\r\nAccept: text/plain\r\naccept : b\r\nHost: n\r\n\r\n"
    assert head_length(head + b"rest") == len(head) and head_length(head[:-1]) == 0
    assert parse_head(head) == HttpRequest("GET", "/a", "text/plain, b")
    with pytest.raises(BadRequest):
        head_length(b"a" * MOST_HEAD_BYTES)


def test_random_bytes_do_no_harm():
    generator = random.Random(7)
    with running(Limits(seconds=0.5)) as found:
        for _round in range(300):
            data = bytearray(GET * generator.randint(1, 3))
            for _change in range(generator.randint(1, 10)):
                data[generator.randrange(len(data))] = generator.randrange(256)
            with connect(found.port) as sock, contextlib.suppress(OSError):
                sock.sendall(data)
                if generator.random() < 0.3:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert ask(found.port).endswith(b"GET /healthz")
        wait_for(lambda: found.server.connections == 0)
        assert "traceback" not in found.log.getvalue()


def test_the_deadline_covers_the_whole_request_however_slowly_it_arrives():
    with running(Limits(seconds=0.3)) as found, connect(found.port) as idle, connect(found.port) as slow:
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < PATIENCE:
                slow.sendall(b"G")
                time.sleep(0.02)
        assert time.monotonic() - started < PATIENCE
        assert read_all(idle) == b""
        wait_for(lambda: found.server.closed[DEADLINE] == 2)


def test_the_oldest_idle_connections_make_room_before_requests():
    with running(Limits(connections=8, seconds=PATIENCE)) as found, contextlib.ExitStack() as stack:
        begun = stack.enter_context(connect(found.port))
        begun.sendall(GET[:10])
        idle = [stack.enter_context(connect(found.port)) for _number in range(7)]
        wait_for(lambda: found.server.connections == 8)
        assert ask(found.port).endswith(b"GET /healthz")
        assert read_all(idle[0]) == b"" and found.server.closed[EVICTED] == 1
        begun.sendall(GET[10:])
        assert read_all(begun).endswith(b"GET /healthz")
        idle[1].sendall(GET)
        assert read_all(idle[1]).endswith(b"GET /healthz")


def test_a_client_that_takes_everything_loses_its_own_connections():
    with running(Limits(connections=6, seconds=PATIENCE)) as found, contextlib.ExitStack() as stack:
        other = stack.enter_context(connect(found.port, OTHER))
        wait_for(lambda: found.server.connections == 1)
        begun = [stack.enter_context(connect(found.port)) for _number in range(5)]
        # Before they send anything: it is the order in which the server last read from them that counts.
        wait_for(lambda: found.server.connections == 6)
        for sock in begun:
            sock.sendall(b"G")
        assert ask(found.port).endswith(b"GET /healthz")
        for number in range(2):
            assert ask(found.port, source=f"127.0.0.{number + 3}").endswith(b"GET /healthz")
        assert read_all(begun[0]) == b"" and found.server.closed == {DEADLINE: 0, EVICTED: 1}
        other.sendall(GET)
        assert read_all(other).endswith(b"GET /healthz")
        begun[4].sendall(GET[1:])
        assert read_all(begun[4]).endswith(b"GET /healthz")


def test_thousands_of_ports_and_connections_need_one_thread():
    with running() as found:
        before = threads()
        opened = [found.server.open(HERE, 0, respond) for _number in range(1000)]
        socks = [connect(port.port) for port in opened[:300]]
        assert not threads() - before
        for sock in socks:
            sock.sendall(GET)
        assert all(read_all(sock).endswith(b"GET /healthz") for sock in socks)
        for sock in socks:
            sock.close()


def test_a_closed_port_refuses_at_once_and_can_be_opened_again():
    with running() as found:
        for _round in range(50):
            port = found.server.open(HERE, 0, respond)
            with connect(port.port) as sock:
                wait_for(lambda: found.server.connections == 1)
                port.close()
                with socket.socket() as late:
                    assert late.connect_ex((HERE, port.port)) == errno.ECONNREFUSED
                sock.sendall(GET)
                assert read_all(sock).endswith(b"GET /healthz")
            again = found.server.open(HERE, port.port, respond)
            assert ask(again.port).endswith(b"GET /healthz")
            again.close()
        wait_for(lambda: found.server.connections == 0)


def test_a_port_in_use_affects_no_other_port():
    with running() as found, socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        with pytest.raises(KernelError, match=r"cannot listen on 127.0.0.1 port .*: Address already in use"):
            found.server.open(HERE, taken.getsockname()[1], respond)
        with pytest.raises(KernelError, match="port 70000"):
            found.server.open(HERE, 70000, respond)
        assert ask(found.port).endswith(b"GET /healthz")


def test_the_number_of_ports_is_bounded_by_the_files_that_are_left():
    with running(Limits(ports=3)) as found:
        opened = [found.server.open(HERE, 0, respond) for _number in range(2)]
        with pytest.raises(KernelError, match="LimitNOFILE"):
            found.server.open(HERE, 0, respond)
        opened[0].close()
        found.server.open(HERE, 0, respond)


@pytest.mark.parametrize("files", [64, 1024, 20000, 65536, 1 << 20])
def test_limits_leave_files_for_the_rest_of_the_agent(files):
    limits = limits_of(files)
    assert limits.connections <= 2048 and limits.ports <= 16384
    if files >= 1024:
        assert limits.connections + limits.ports + 256 <= files


@pytest.mark.parametrize("address", ["::", "0.0.0.0"])
def test_both_families_share_a_port_on_unspecified_addresses(address):
    with running() as found:
        port = found.server.open(address, 0, respond, both_families=True)
        assert ask(port.port).endswith(b"GET /healthz")
        with socket.create_connection(("::1", port.port), timeout=PATIENCE) as sock:
            sock.sendall(GET)
            assert read_all(sock).endswith(b"GET /healthz")
        alone = found.server.open(address, 0, respond)
        other = (socket.AF_INET, HERE) if address == "::" else (socket.AF_INET6, "::1")
        with socket.socket(other[0]) as sock:
            assert sock.connect_ex((other[1], alone.port)) == errno.ECONNREFUSED


def test_a_kernel_without_ipv6_serves_ipv4(monkeypatch):
    create = socket.socket

    def without_ipv6(family=socket.AF_INET, *arguments, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return create(family, *arguments, **options)

    with running() as found:
        monkeypatch.setattr(socket, "socket", without_ipv6)
        port = found.server.open("0.0.0.0", 0, respond, both_families=True)
        monkeypatch.undo()
        assert ask(port.port).endswith(b"GET /healthz")


def test_thousands_of_idle_connections_of_one_client_delay_no_other_client():
    """Each request is answered within its deadline, or not at all."""
    probes = []
    with running() as found:

        def probed():
            assert ask(found.port).endswith(b"GET /healthz")
            probes.append(1)
            return len(probes) >= 100

        assert hold_idle((HERE, found.port), OTHER, 5000, probed) >= 5000
        assert found.server.connections <= 2048
        assert len(found.log.getvalue().splitlines()) < 20
