# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""UDP sessions through the forwarder: real sockets on loopback."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding import udp
from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding.sockets import (
    EXHAUSTED,
    hops_of_datagram,
    limit_hops,
    save_hops,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.model import ListenerKey
from tests.lab.ports import free_port
from tests.unit.forwarding.conftest import closed_port, lacking
from tests.waiting import PATIENCE, wait_for


@contextlib.contextmanager
def client(key, source="127.0.0.1"):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(PATIENCE)
        sock.bind((source, 0))
        sock.connect((key.address, key.port))
        yield sock


def ask(sock, text=b"x"):
    sock.sendall(text)
    return sock.recv(1 << 16)


def ask_until_answered(sock, text=b"x"):
    """Return the answer to the first datagram that gets one; UDP clients send again."""
    sock.settimeout(0.5)
    for _attempt in range(60):
        with contextlib.suppress(socket.timeout):
            return ask(sock, text)
    raise AssertionError("no answer")


def test_a_session_keeps_its_endpoint_and_sessions_take_turns(start, udp_endpoint):
    running = start()
    key = running.listen(udp_endpoint("a").place, udp_endpoint("b").place, protocol="udp")
    found = []
    for _number in range(6):
        with client(key) as sock:
            found.append({ask(sock) for _count in range(5)})
    assert sorted(map(sorted, found)) == [[b"a x"]] * 3 + [[b"b x"]] * 3
    assert running.status("udpSessions") == 6


def test_large_and_empty_datagrams(start, udp_endpoint):
    running = start()
    key = running.listen(udp_endpoint("a").place, protocol="udp")
    with client(key) as sock:
        data = os.urandom(60_000)
        assert ask(sock, data) == b"a " + data
        sock.send(b"")
        assert sock.recv(10) == b"a "


def test_silent_sessions_are_closed_those_without_an_answer_first(start, udp_endpoint):
    running = start(udp_seconds=0.15, udp_stream_seconds=1.0)
    key = running.listen(udp_endpoint("a").place, protocol="udp")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("127.0.0.1", 0))
        other = running.listen(mute.getsockname(), protocol="udp")
        with client(key) as answered, client(other) as unanswered:
            ask(answered)
            unanswered.send(b"x")
            wait_for(lambda: running.status("udpSessions") == 2)
            wait_for(lambda: running.status("sessions") == 1)
            assert ask(answered) == b"a x"
            assert running.status("udpSessions") == 2
            wait_for(lambda: running.status("sessions") == 0)


def test_a_refused_datagram_moves_the_session(start, udp_endpoint):
    running = start()
    first = udp_endpoint("a")
    key = running.listen(first.place, udp_endpoint("b").place, protocol="udp")
    with client(key) as sock, client(key) as second:
        pair = {ask(sock), ask(second)}
        assert pair == {b"a x", b"b x"}
        first.close()
        # The first datagram meets the refusal; UDP clients send again.
        assert [ask_until_answered(item) for item in (sock, second)] == [b"b x"] * 2


def test_a_closed_port_is_noticed_at_once(start, udp_endpoint):
    running = start()
    key = running.listen(udp_endpoint("a").place, closed_port(), protocol="udp")
    for _number in range(6):
        with client(key) as sock:
            assert ask_until_answered(sock) == b"a x"


@pytest.mark.parametrize("number", sorted(EXHAUSTED))
def test_no_endpoint_is_blamed_for_what_the_node_lacks(start, udp_endpoint, monkeypatch, number):
    """An endpoint that counts as failed would get no new clients for a time."""
    running = start()
    key = running.listen(udp_endpoint("a").place, udp_endpoint("b").place, protocol="udp")
    lacking(monkeypatch, udp, number)
    found = []
    for _number in range(6):
        with client(key) as sock:
            found.append(ask(sock))
    assert running.status("connectFailures") == 1
    assert set(found) == {b"a x", b"b x"}


class Failing:
    """A session's socket whose calls fail, each with the next of its errors; a None, and all after them, succeed."""

    def __init__(self, sock, sends, receives):
        self._sock = sock
        self._sends, self._receives = list(sends), list(receives)

    def _fail(self, errors):
        number = errors.pop(0) if errors else None
        if number is not None:
            raise OSError(number, os.strerror(number))

    def send(self, data):
        self._fail(self._sends)
        return self._sock.send(data)

    def recv_into(self, buffer):
        self._fail(self._receives)
        return self._sock.recv_into(buffer)

    def __getattr__(self, name):
        return getattr(self._sock, name)


def fail(running, session, sends=(), receives=()):
    """Make calls of a session's socket fail, once the loop has finished what it does with the socket now."""

    def replace():
        session.sock = Failing(session.sock, sends, receives)

    running.forwarder._loop.call(replace)


def session_of(running, key):
    """Return the only session of a listener."""
    (session,) = running.forwarder._servers[key].sessions.values()
    return session


@pytest.mark.parametrize(
    ("sends", "lost"),
    [
        ([errno.EMSGSIZE], 0),
        ([errno.EMSGSIZE] * 2, 1),
        ([errno.ENOBUFS], 1),
        ([errno.EPERM], 1),
    ],
)
def test_a_datagram_that_cannot_be_sent_leaves_the_session(start, udp_endpoint, sends, lost):
    running = start()
    key = running.listen(udp_endpoint("a").place, udp_endpoint("b").place, protocol="udp")
    with client(key) as sock:
        first = ask(sock)
        session = session_of(running, key)
        fail(running, session, sends)
        sock.send(b"x")
        if not lost:
            assert sock.recv(10) == first
        else:
            wait_for(lambda: running.status("droppedDatagrams") == lost)
        assert ask(sock) == first
        assert session_of(running, key) is session
    assert running.status("droppedDatagrams") == lost
    assert running.status("connectFailures") == 0


def test_a_datagram_too_large_for_the_path_does_not_end_the_session_of_its_endpoint(start, udp_endpoint):
    running = start()
    key = running.listen(udp_endpoint("a").place, udp_endpoint("b").place, protocol="udp")
    with client(key) as sock:
        first = ask(sock)
        session = session_of(running, key)
        fail(running, session, receives=[errno.EMSGSIZE])
        assert ask(sock) == first
        assert session_of(running, key) is session
    assert running.status("connectFailures") == 0


def test_an_error_alone_is_not_an_answer(start):
    running = start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("127.0.0.1", 0))
        key = running.listen(mute.getsockname(), protocol="udp")
        with client(key) as sock:
            sock.send(b"x")
            wait_for(lambda: running.status("sessions") == 1)
            session = session_of(running, key)
            fail(running, session, receives=[errno.EMSGSIZE, errno.EAGAIN])
            running.forwarder._loop.call(lambda: session._readable(select.EPOLLERR))
            assert not session.answered


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES])
@pytest.mark.parametrize("way", ["sends", "receives"])
def test_an_endpoint_that_cannot_be_reached_loses_the_session(start, udp_endpoint, way, number):
    running = start()
    key = running.listen(udp_endpoint("a").place, udp_endpoint("b").place, protocol="udp")
    with client(key) as sock:
        first = ask(sock)
        session = session_of(running, key)
        fail(running, session, **{way: [number]})
        if way == "receives":
            sock.send(b"x")
            wait_for(lambda: running.status("sessions") == 0)
        assert ask(sock) != first
    assert running.status("connectFailures") == 1


@pytest.mark.parametrize("way", ["sends", "receives"])
def test_an_error_of_the_node_ends_the_session_without_blaming_the_endpoint(start, udp_endpoint, way):
    running = start()
    key = running.listen(udp_endpoint("a").place, protocol="udp")
    with client(key) as sock:
        ask(sock)
        session = session_of(running, key)
        fail(running, session, **{way: [errno.EINVAL]})
        sock.send(b"x")
        wait_for(lambda: running.status("sessions") == 0)
        assert ask(sock) == b"a x"
        assert session_of(running, key) is not session
    assert running.status("connectFailures") == 0


def test_sessions_of_a_removed_endpoint_are_closed(start, udp_endpoint):
    running = start()
    first, second = udp_endpoint("a"), udp_endpoint("b")
    key = running.listen(first.place, protocol="udp")
    with client(key) as sock:
        assert ask(sock) == b"a x"
        running.listen(second.place, protocol="udp", key=key)
        assert ask(sock) == b"b x"
        running.listen(protocol="udp", key=key)
        assert running.status("sessions") == 0
        sock.send(b"x")
        with pytest.raises(ConnectionRefusedError):
            sock.recv(10)


def test_too_many_sessions_close_the_longest_silent_one(start, udp_endpoint):
    running = start(sessions=8)
    key = running.listen(udp_endpoint("a").place, protocol="udp")
    with contextlib.ExitStack() as stack:
        for _number in range(20):
            assert ask(stack.enter_context(client(key))) == b"a x"
        assert running.status("sessions") == 8
        assert running.status("evicted") == 12


def test_source_ranges(start, udp_endpoint):
    running = start()
    key = running.listen(udp_endpoint("a").place, protocol="udp", sources=("127.0.0.7/32",))
    with client(key, "127.0.0.8") as refused, client(key, "127.0.0.7") as allowed:
        refused.send(b"x")
        assert ask(allowed) == b"a x"
    wait_for(lambda: running.status("refusedBySourceRange") == 1)


def test_affinity(start, udp_endpoint):
    running = start()
    key = running.listen(*(udp_endpoint(name).place for name in "abc"), protocol="udp", affinity_seconds=60)
    found = set()
    for _number in range(6):
        with client(key) as sock:
            found.add(ask(sock))
    assert len(found) == 1


def test_no_file_is_left_open(start, udp_endpoint):
    running = start(udp_stream_seconds=0.1)
    key = running.listen(udp_endpoint("a").place, protocol="udp")
    before = len(os.listdir("/proc/self/fd"))
    for _number in range(50):
        with client(key) as sock:
            ask(sock)
    wait_for(lambda: running.status("sessions") == 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_forwarders_that_forward_to_each_other_end_the_loop(start):
    one, two = start(), start()
    keys = [ListenerKey("udp", *closed_port()) for _number in range(2)]
    for running, key, other in ((one, keys[0], keys[1]), (two, keys[1], keys[0])):
        running.listen((other.address, other.port), key=key)
    with client(keys[0]) as sock:
        sock.send(b"x")
        # The datagram is dropped by the forwarder at which its hop limit is used up.
        wait_for(lambda: one.status("droppedDatagrams") + two.status("droppedDatagrams") == 1)
    hops = int(Path("/proc/sys/net/ipv4/ip_default_ttl").read_text(encoding="ascii"))
    assert one.status("udpSessions") + two.status("udpSessions") == hops - 1


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_hop_limit_decreases_as_at_a_router(start, address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    running = start()
    with socket.socket(family, socket.SOCK_DGRAM) as server, socket.socket(family, socket.SOCK_DGRAM) as sender:
        server.bind((address, 0))
        server.settimeout(PATIENCE)
        save_hops(server)
        key = running.listen(server.getsockname()[:2], key=ListenerKey("udp", address, free_port()))
        limit_hops(sender, 17)
        sender.sendto(b"x", (key.address, key.port))
        _data, ancillary, _flags, _sender = server.recvmsg(16, 64)
    assert hops_of_datagram(ancillary) == 16
