# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""TCP connections through the forwarder: real sockets on loopback."""

from __future__ import annotations

import errno
import hashlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding.sockets import (
    hops_of_connection,
    limit_hops,
    save_hops,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.model import ListenerKey
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change
from tests.lab.ports import free_port
from tests.unit.forwarding.conftest import assert_reset, closed_port, named, names, read_all
from tests.waiting import PATIENCE, wait_for


def digest_of_all(sock: socket.socket) -> None:
    """Read to the end, then answer, which requires that each half ends on its own."""
    sock.sendall(hashlib.sha256(read_all(sock)).digest())


@pytest.mark.parametrize("way", ["splice", "no splice", "no pipe"])
def test_a_half_ends_on_its_own_and_every_byte_arrives(start, endpoint, monkeypatch, way):
    running = start()
    if way == "no splice":
        shared = running.forwarder._tcp
        running.forwarder._tcp = shared._replace(context=shared.context._replace(splice=None))
    elif way == "no pipe":
        monkeypatch.setattr(running.forwarder._pipes, "_most", 0)
    key = running.listen(endpoint(digest_of_all).place)
    for size in (0, 1, 70_000, 5_000_000):
        data = random.randbytes(size)
        with running.connect(key) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == hashlib.sha256(data).digest()
    wait_for(lambda: running.status("connections") == 0)
    pipes = running.forwarder._pipes
    assert pipes._made == len(pipes._spare)


def test_both_halves_at_once(start, endpoint):
    running = start()
    key = running.listen(endpoint().place)
    data = random.randbytes(8_000_000)
    with running.connect(key) as sock:
        sender = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        assert read_all(sock) == data
        sender.join()


def test_a_slow_reader_stops_the_writer(start, endpoint):
    sent = []

    def flood(sock: socket.socket) -> None:
        sock.settimeout(0.5)
        try:
            while True:
                sent.append(sock.send(bytes(1 << 16)))
        except socket.timeout:
            sent.append(0)

    running = start()
    key = running.listen(endpoint(flood).place)
    with running.connect(key) as sock:
        wait_for(lambda: sent and sent[-1] == 0, 30)
        # The kernel's buffers of four sockets, and at most one pipe.
        assert sum(sent) < 64 << 20
        assert len(sock.recv(100)) == 100


def test_endpoints_are_used_in_turn(start, endpoint):
    running = start()
    key = running.listen(endpoint(named(b"a")).place, endpoint(named(b"b")).place, endpoint(named(b"c")).place)
    found = names(running, key, 9)
    assert sorted(found) == [b"a"] * 3 + [b"b"] * 3 + [b"c"] * 3


def test_a_failed_connect_is_retried_before_the_client_notices(start, endpoint):
    running = start(avoid_seconds=0.0)
    key = running.listen(endpoint(named(b"a")).place, closed_port(), closed_port())
    assert names(running, key, 9) == [b"a"] * 9
    assert running.status("connectFailures") > 0
    assert running.status("unreachable") == 0


def test_a_silent_endpoint_costs_one_timeout(start, endpoint):
    running = start(connect_seconds=0.3)
    # The queue of a listener that accepts nothing fills up; then it ignores SYNs.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        for _number in range(3):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
            waiting.append(sock)
        key = running.listen(endpoint(named(b"a")).place, full.getsockname())
        # The failed endpoint is avoided from then on.
        assert names(running, key, 6) == [b"a"] * 6
        assert running.status("connectFailures") == 1
        for sock in waiting:
            sock.close()


def test_the_client_is_reset_when_no_endpoint_is_left(start):
    running = start()
    key = running.listen(closed_port(), closed_port())
    assert_reset(running, key)
    assert running.status("unreachable") == 1


def test_connections_are_refused_without_endpoints(start, endpoint):
    running = start()
    key = running.listen()
    with pytest.raises(ConnectionRefusedError):
        running.connect(key)
    running.listen(endpoint(named(b"a")).place, key=key)
    assert names(running, key, 2) == [b"a", b"a"]
    running.listen(key=key)
    with pytest.raises(ConnectionRefusedError):
        running.connect(key)


def test_a_reset_is_forwarded(start, endpoint):
    def reset(sock: socket.socket) -> None:
        sock.recv(10)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    running = start()
    key = running.listen(endpoint(reset).place)
    with running.connect(key) as sock:
        sock.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    wait_for(lambda: running.status("connections") == 0)


def test_a_reset_after_an_orderly_end_is_noticed(start, endpoint):
    seen = threading.Event()

    def end_then_wait(sock: socket.socket) -> None:
        sock.shutdown(socket.SHUT_WR)
        try:
            sock.settimeout(PATIENCE)
            sock.recv(1)
        except ConnectionResetError:
            seen.set()

    running = start()
    key = running.listen(endpoint(end_then_wait).place)
    sock = running.connect(key)
    assert sock.recv(1) == b""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    assert seen.wait(PATIENCE)
    wait_for(lambda: running.status("connections") == 0)


def test_open_connections_survive_a_change_of_endpoints(start, endpoint):
    first, second = endpoint(), endpoint(named(b"b"))
    running = start()
    key = running.listen(first.place)
    with running.connect(key) as sock:
        sock.sendall(b"one")
        assert sock.recv(10) == b"one"
        running.listen(second.place, key=key)
        sock.sendall(b"two")
        assert sock.recv(10) == b"two"
        running.listen(key=key)
        sock.sendall(b"three")
        assert sock.recv(10) == b"three"


def test_removing_the_last_listener_of_an_address_resets_its_connections(start, endpoint):
    running = start()
    place = endpoint().place
    key = running.listen(place)
    other = running.listen(place, key=key._replace(port=closed_port()[1]))
    with running.connect(key) as sock:
        table = running.forwarder.table()
        running.forwarder.apply(Change(removed={key: table[key]}))
        sock.sendall(b"one")
        assert sock.recv(10) == b"one"
        running.forwarder.apply(Change(removed={other: table[other]}))
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    assert running.forwarder.table() == {}


def test_source_ranges(start, endpoint):
    running = start()
    key = running.listen(endpoint(named(b"a")).place, sources=("127.0.0.7/32",))
    assert names(running, key, 2, "127.0.0.7") == [b"a", b"a"]
    assert_reset(running, key, "127.0.0.8")
    assert running.status("refusedBySourceRange") == 1


def test_affinity(start, endpoint):
    running = start()
    places = [endpoint(named(name)).place for name in (b"a", b"b", b"c")]
    key = running.listen(*places, affinity_seconds=60)
    chosen = {source: set(names(running, key, 5, source)) for source in ("127.0.0.7", "127.0.0.8", "127.0.0.9")}
    assert all(len(found) == 1 for found in chosen.values())
    # Three clients, three endpoints, each in its turn.
    assert set.union(*chosen.values()) == {b"a", b"b", b"c"}


def test_an_endpoint_that_is_a_listener_is_refused(start, endpoint):
    running = start()
    first, second = running.listen(closed_port()), running.listen(closed_port())
    running.listen((second.address, second.port), key=first)
    running.listen((first.address, first.port), key=second)
    assert_reset(running, first)
    assert running.status("accepted") == 1


def test_stopping_waits_for_open_connections(start, endpoint):
    running = start(drain_seconds=PATIENCE)
    key = running.listen(endpoint().place)
    sock = running.connect(key)
    sock.sendall(b"x")
    assert sock.recv(1) == b"x"
    stopping = threading.Thread(target=running.forwarder.stop)
    stopping.start()

    def refuses() -> bool:
        with socket.socket() as other:
            return other.connect_ex((key.address, key.port)) == errno.ECONNREFUSED

    wait_for(refuses)
    sock.sendall(b"y")
    assert sock.recv(1) == b"y"
    sock.close()
    stopping.join(PATIENCE / 2)
    assert not stopping.is_alive()


def test_closing_a_listener_resets_no_client(start, endpoint):
    """Clients that connect while a listener is closed are served or refused, some after a second attempt."""
    running = start(drain_seconds=0.0)
    place = endpoint(named(b"a")).place
    key = running.listen(place)
    stop = threading.Event()
    outcomes: Counter[str] = Counter()

    def ask() -> None:
        while not stop.is_set():
            try:
                # A SYN that is ignored would be repeated after a second.
                with socket.create_connection((key.address, key.port), 0.05) as sock:
                    sock.settimeout(PATIENCE)
                    outcomes["answer" if sock.recv(10) else "end"] += 1
            except socket.timeout:
                outcomes["ignored"] += 1
            except OSError as error:
                outcomes[errno.errorcode[error.errno or 0]] += 1

    clients = [threading.Thread(target=ask) for _number in range(4)]
    for client in clients:
        client.start()
    for _round in range(300):
        running.listen(key=key)
        running.listen(place, key=key)
    stop.set()
    for client in clients:
        client.join(PATIENCE)
    assert outcomes["answer"]
    assert set(outcomes) <= {"answer", "ignored", "ECONNREFUSED"}


def test_random_changes_lose_no_request_of_an_unchanged_service(start, endpoint):
    running = start()
    endpoints = [endpoint() for _number in range(4)]
    steady = running.listen(*(item.place for item in endpoints[:2]))
    chosen = random.Random(7)
    stop = threading.Event()
    requests, failures = [0], []

    def client() -> None:
        while not stop.is_set():
            try:
                with running.connect(steady) as sock:
                    sock.sendall(b"ping")
                    if sock.recv(10) != b"ping":
                        raise OSError("not the answer")
                requests[0] += 1
            except OSError as error:
                failures.append(error)

    clients = [threading.Thread(target=client, daemon=True) for _number in range(3)]
    for item in clients:
        item.start()
    others = [running.listen(endpoints[0].place) for _number in range(5)]
    began = time.monotonic()
    while time.monotonic() - began < 2.0 or requests[0] <= 100:
        assert time.monotonic() - began < 60.0, requests
        key = chosen.choice(others)
        table = running.forwarder.table()
        if key in table and chosen.random() < 0.3:
            running.forwarder.apply(Change(removed={key: table[key]}))
        else:
            running.listen(*chosen.sample([item.place for item in endpoints], chosen.randrange(5)), key=key)
    stop.set()
    for item in clients:
        item.join()
    assert failures == []


def test_forwarders_that_forward_to_each_other_end_the_loop(start):
    one, two = start(), start()
    keys = [ListenerKey("tcp", *closed_port()) for _number in range(2)]
    for running, key, other in ((one, keys[0], keys[1]), (two, keys[1], keys[0])):
        running.listen((other.address, other.port), key=key)
    hops = int(Path("/proc/sys/net/ipv4/ip_default_ttl").read_text(encoding="ascii"))
    for attempt in (1, 2):
        assert_reset(one, keys[0])
        wait_for(lambda: one.status("connections") == two.status("connections") == 0)
        assert 2 <= one.status("accepted") + two.status("accepted") <= attempt * hops


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_hop_limit_decreases_as_at_a_router(start, address):
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    save_hops(listening)
    place = listening.getsockname()[:2]
    running = start()
    key = running.listen(place, key=ListenerKey("tcp", address, free_port()))
    with listening, socket.socket(listening.family) as client:
        client.settimeout(PATIENCE)
        limit_hops(client, 17)
        client.connect((key.address, key.port))
        sock, _peer = listening.accept()
        with sock:
            assert hops_of_connection(sock) == 16
