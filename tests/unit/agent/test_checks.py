# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Health checks of endpoints: attempts over real sockets and TLS, rise and fall."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.attempt import Target
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.prober import Prober, Verdict
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import HealthCheck, NamespacedName
from tests.apiserver.tls import make_certificates

NAME = NamespacedName("static", "web")
FAST = HealthCheck(interval=0.1, timeout=20.0)


class Task:
    """A stand-in for the supervised thread."""

    def busy(self, _seconds):
        pass


class Server:
    """A server that sends ``answer`` to each connection, or nothing if it is None; over TLS with a context."""

    def __init__(self, answer, context=None):
        self.answer, self.context, self.requests = answer, context, []
        self._open = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _peer = self.socket.accept()
                self._open.append(connection)
                if self.answer is None:
                    continue
                with contextlib.suppress(OSError):
                    if self.context is not None:
                        connection = self.context.wrap_socket(connection, server_side=True)
                    self.requests.append(connection.recv(4096))
                    connection.sendall(self.answer)
                    connection.close()

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@contextlib.contextmanager
def running(**words):
    """Provide a prober that runs in a thread."""
    changes = queue.Queue()
    started = Prober(changes.put, **words)
    started.changes = changes
    thread = threading.Thread(target=started.run, args=(Task(),))
    thread.start()
    yield started
    started.stop()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def prober():
    with running() as started:
        yield started


def verdict(prober, target, seconds=10.0):
    """Return the first verdict of a target."""
    prober.follow([target])
    done = threading.Event()
    for _step in range(int(seconds / 0.02)):
        if target in prober.verdicts():
            return prober.verdicts()[target]
        done.wait(0.02)
    raise AssertionError("no verdict")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


def tls(certificates):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    return context


OK, UNAUTHORIZED = b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 401 Unauthorized\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "settings", "error"),
    [
        (OK, {}, ""),
        (OK, {"scheme": "http", "path": "/readyz"}, ""),
        (UNAUTHORIZED, {"scheme": "http"}, "HTTP status 401"),
        (UNAUTHORIZED, {"scheme": "http", "statuses": ((200, 200), (401, 403))}, ""),
        (b"SSH-2.0-OpenSSH\r\n", {"scheme": "http"}, "no HTTP answer"),
        (b"", {"scheme": "http"}, "the connection was closed without an answer"),
        (None, {"scheme": "http", "timeout": 0.5}, "no answer within 0.5 s"),
    ],
)
def test_tcp_and_http(prober, answer, settings, error):
    server = Server(answer)
    with contextlib.closing(server):
        found = verdict(prober, Target(NAME, "127.0.0.1", server.port, FAST._replace(**settings)))
        assert (found.passing, found.error) == (not error, error)
        if answer and settings.get("path"):
            assert server.requests[0].startswith(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1:")


def test_tls_is_verified_by_authority_and_name(prober, certificates):
    server = Server(OK, tls(certificates))
    check = FAST._replace(scheme="https")
    with contextlib.closing(server):
        trusted = check._replace(ca=str(certificates.authority))
        assert verdict(prober, Target(NAME, "127.0.0.1", server.port, trusted)).passing
        assert verdict(prober, Target(NAME, "127.0.0.1", server.port, check)).passing
        other = trusted._replace(server_name="other.example")
        found = verdict(prober, Target(NAME, "127.0.0.1", server.port, other))
        assert not found.passing and "certificate: " in found.error and "other.example" in found.error
        missing = trusted._replace(ca="/nowhere/ca.crt")
        found = verdict(prober, Target(NAME, "127.0.0.1", server.port, missing))
        assert (found.passing, found.error) == (False, "/nowhere/ca.crt: No such file or directory")
        found = verdict(prober, Target(NAME, "127.0.0.1", server.port, trusted._replace(ca=__file__)))
        assert (found.passing, found.error) == (False, f"{__file__}: holds no certificate")


@pytest.mark.parametrize("setting", [{"server_name": "a" * 64}, {"ca": "/a\0b"}, {"ca": "/a\ud800b"}])
def test_a_value_that_cannot_be_encoded_fails_only_its_own_target(prober, setting):
    server = Server(OK)
    with contextlib.closing(server):
        target = Target(NAME, "127.0.0.1", server.port, FAST._replace(scheme="https", **setting))
        found = verdict(prober, target)
        assert not found.passing and found.error
        assert verdict(prober, Target(NAME, "127.0.0.1", server.port, FAST)).passing


def test_fall_and_rise(prober):
    server = Server(OK)
    target = Target(NAME, "127.0.0.1", server.port, FAST._replace(fall=3, rise=2))
    assert verdict(prober, target).passing and prober.changes.empty()
    server.close()
    change = prober.changes.get(timeout=60)
    assert (change.target, change.verdict.passing, change.verdict.failures) == (target, False, 3)
    assert change.verdict.error == "Connection refused"
    checks = change.verdict.checks
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", target.port))
        again.listen(64)
        change = prober.changes.get(timeout=60)
        assert change.verdict.passing and change.verdict.checks >= checks + 2


@pytest.fixture
def timed():
    """Provide a prober without jitter whose clock stands still until a test moves it."""
    now = [1000.0]
    with running(clock=lambda: now[0], jitter=lambda: 0.0) as started:

        def advance(seconds):
            now[0] += seconds
            started.interrupt()

        started.advance = advance
        yield started


def await_checks(prober, target, number):
    """Wait until a target has been checked this often; return its verdict."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = prober.verdicts().get(target, Verdict())
        if found.checks >= number:
            assert found.checks == number
            return found
        time.sleep(0.01)
    raise AssertionError(f"fewer than {number} checks")


def test_after_a_result_that_contradicts_the_verdict_the_next_check_follows_sooner(timed):
    server = Server(OK)
    target = Target(NAME, "127.0.0.1", server.port, HealthCheck(interval=100.0, timeout=50.0, fast_interval=5.0))
    timed.follow([target])
    await_checks(timed, target, 1)
    server.close()
    # The second check is due after the interval; it fails, and the third decides.
    timed.advance(100.0)
    assert await_checks(timed, target, 2).passing
    timed.advance(5.0)
    assert not await_checks(timed, target, 3).passing
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", target.port))
        again.listen(64)
        # A result that agrees with the verdict changes nothing: the next check waits for the interval.
        timed.advance(99.0)
        timed.advance(1.0)
        assert not await_checks(timed, target, 4).passing
        timed.advance(5.0)
        assert await_checks(timed, target, 5).passing


def test_the_first_failed_check_of_a_new_target_counts(prober):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        target = Target(NAME, "127.0.0.1", closed.getsockname()[1], FAST._replace(fall=3))
        found = verdict(prober, target)
        assert (found.passing, found.failures, found.checks) == (False, 1, 1)
    prober.follow([])


def test_silent_targets_do_not_delay_others(prober):
    silent, server = Server(None), Server(OK)
    with contextlib.closing(silent), contextlib.closing(server):
        slow = FAST._replace(scheme="http", timeout=30.0)
        targets = [Target(NAME, f"127.0.0.{number}", silent.port, slow) for number in range(1, 2)]
        good = Target(NAME, "127.0.0.1", server.port, FAST)
        prober.follow([*targets, good])
        done = threading.Event()
        for _step in range(500):
            if prober.verdicts().get(good, None) and prober.verdicts()[good].checks >= 5:
                break
            done.wait(0.02)
        assert prober.verdicts()[good].checks >= 5 and targets[0] not in prober.verdicts()
