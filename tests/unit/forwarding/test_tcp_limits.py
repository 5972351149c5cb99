# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of TCP connections, and faults of the system and the forwarder: each costs at most one connection."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding import tcp
from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding.sockets import EXHAUSTED
from tests.unit.forwarding.conftest import assert_reset, closed_port, lacking, named, names
from tests.waiting import PATIENCE, wait_for


def test_silent_connections_are_closed(start, endpoint):
    running = start(idle_seconds=1.0)
    key = running.listen(endpoint().place)
    with running.connect(key) as sock:
        started = time.monotonic()
        while time.monotonic() - started < 2.0:
            time.sleep(0.02)
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_half_closed_connections_are_closed_sooner(start, endpoint):
    running = start(half_closed_seconds=0.3)
    key = running.listen(endpoint(lambda sock: time.sleep(PATIENCE)).place)
    with running.connect(key) as silent, running.connect(key) as sock:
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.recv(1)


def fill(sock):
    """Send until neither the forwarder nor the kernel takes more, because the other side does not read."""
    sock.settimeout(0.3)
    with contextlib.suppress(socket.timeout):
        while True:
            sock.send(bytes(1 << 20))


def end_with_reset(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_reset_by_a_client_ends_a_connection_whose_endpoint_does_not_read(start, endpoint, monkeypatch):
    monkeypatch.setattr(tcp, "RESET_SECONDS", 0.3)
    running = start()
    done = threading.Event()
    key = running.listen(endpoint(lambda sock: done.wait(PATIENCE)).place)
    with running.connect(key) as steady:
        sock = running.connect(key)
        fill(sock)
        assert running.status("connections") == 2
        end_with_reset(sock)
        wait_for(lambda: running.status("connections") == 1, 5.0)
        steady.setblocking(False)
        with pytest.raises(BlockingIOError):
            steady.recv(1)
    done.set()


def test_a_reset_by_an_endpoint_ends_a_connection_whose_client_does_not_read(start, endpoint, monkeypatch):
    monkeypatch.setattr(tcp, "RESET_SECONDS", 0.3)

    def flood_then_reset(sock):
        fill(sock)
        end_with_reset(sock)

    running = start()
    key = running.listen(endpoint(flood_then_reset).place)
    with running.connect(key):
        wait_for(lambda: running.status("connections") == 1)
        wait_for(lambda: running.status("connections") == 0, 5.0)


def test_a_slow_reader_still_gets_what_an_endpoint_sent_before_its_reset(start, endpoint, monkeypatch):
    monkeypatch.setattr(tcp, "RESET_SECONDS", 1.0)
    reset = threading.Event()

    def flood_then_reset(sock):
        fill(sock)
        end_with_reset(sock)
        reset.set()

    running = start()
    key = running.listen(endpoint(flood_then_reset).place)
    with running.connect(key) as sock:
        assert reset.wait(PATIENCE)
        received = 0
        with pytest.raises(ConnectionResetError):
            while True:
                data = sock.recv(1 << 20)
                assert data
                received += len(data)
        # More than the forwarder and the client's socket held before the reset.
        assert received > 1 << 16
    wait_for(lambda: running.status("connections") == 0)


def test_one_client_cannot_block_others(start, endpoint):
    running = start(connections=20)
    key = running.listen(endpoint().place)
    hoard = [running.connect(key, "127.0.0.66") for _number in range(20)]
    wait_for(lambda: running.status("connections") == 20)
    # They stay open: the end of the first one would make room for the second.
    served = [running.connect(key, client) for client in ("127.0.0.66", "127.0.0.7")]
    for sock in served:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
    for number, closed in enumerate(hoard[:2], 1):
        with pytest.raises(ConnectionResetError):
            closed.recv(1)
        assert number <= running.status("evicted") <= 2
    for item in (*hoard, *served):
        item.close()


def test_at_the_limit_a_client_with_as_many_as_all_others_is_refused(start, endpoint):
    running = start(connections=8)
    key = running.listen(endpoint().place)
    held = [running.connect(key, f"127.0.0.{number}") for number in range(2, 10)]
    wait_for(lambda: running.status("connections") == 8)
    assert_reset(running, key, "127.0.0.66")
    assert running.status("refusedByLimit") == 1 and not running.status("evicted")
    for item in held:
        item.close()


def test_no_file_is_left_open(start, endpoint):
    running = start()
    key = running.listen(endpoint(named(b"a")).place, closed_port())

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    names(running, key, 5)
    wait_for(lambda: running.status("connections") == 0)
    before = files()
    names(running, key, 200)
    wait_for(lambda: running.status("connections") == 0)
    wait_for(lambda: files() <= before + 1)


def test_running_out_of_descriptors_only_delays(start, endpoint, monkeypatch):
    running = start()
    monkeypatch.setattr(tcp, "PAUSE_SECONDS", 0.05)
    key = running.listen(endpoint(named(b"a")).place)
    server = running.forwarder._servers[key]
    real, failures = server._socket, []

    class Exhausted:
        def accept(self):
            if len(failures) < 3:
                failures.append(1)
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

        def __getattr__(self, name):
            return getattr(real, name)

    server._socket = Exhausted()
    assert names(running, key, 2) == [b"a", b"a"]
    assert len(failures) == 3


def test_a_defect_costs_one_connection(start, endpoint, monkeypatch):
    running = start()
    key = running.listen(endpoint().place)
    real = tcp.Connection._pump

    def broken(self):
        if self.client == "127.0.0.66":
            raise ValueError("a defect")
        return real(self)

    monkeypatch.setattr(tcp.Connection, "_pump", broken)
    assert_reset(running, key, "127.0.0.66")
    with running.connect(key) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
    assert [str(error) for error in running.errors] == ["a defect"]
    running.errors.clear()


def test_a_port_in_use_is_tried_again(start, endpoint, monkeypatch):
    running = start()
    place = endpoint(named(b"a")).place
    tried = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        address, port = other.getsockname()
        key = running.listen(place)._replace(address=address, port=port)
        running.listen(place, key=key)
        assert running.forwarder.unbound() == {key: "another program uses this address and port"}

        class Tried(tcp.TcpServer):
            """Notes what other threads see while the forwarder tries to open the port."""

            def __init__(self, *arguments):
                tried.append(list(running.forwarder.unbound()))
                super().__init__(*arguments)

        monkeypatch.setattr(tcp, "TcpServer", Tried)
        wait_for(lambda: len(tried) > 2)
    wait_for(lambda: not running.forwarder.unbound())
    assert all(seen == [key] for seen in tried)
    assert names(running, key, 1) == [b"a"]


@pytest.mark.parametrize("number", sorted(EXHAUSTED))
def test_no_endpoint_is_blamed_for_what_the_node_lacks(start, endpoint, monkeypatch, number):
    """An endpoint that counts as failed would get no new clients for a time."""
    running = start()
    key = running.listen(endpoint(named(b"a")).place, endpoint(named(b"b")).place)
    lacking(monkeypatch, tcp, number)
    found = names(running, key, tries=6)
    assert running.status("connectFailures") == 1
    assert set(found) == {b"a", b"b"}
