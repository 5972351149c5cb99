# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Health checks: which are allowed, attempts over real sockets and TLS, rise and fall, and the panic threshold."""

from __future__ import annotations

import contextlib
import io
import queue
import socket
import ssl
import threading
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks import checks as checks_module
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.attempt import Target
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.checks import Checks
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.follower import RETRY_SECONDS, CheckFollower
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.prober import Prober, Verdict, VerdictChange
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.targets import choose
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.surface.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.surface.metrics import Metrics
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import (
    Failing,
    HealthCheck,
    NamespacedName,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.sections.health_checks import HealthChecks
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.endpoints import mark_failing
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import Endpoint
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
        assert (found.passing, found.error) == (False, "No such file or directory")


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


def objects(name, namespace, addresses, **annotations):
    annotations = {f"kubenode.proxy/check{key}": value for key, value in annotations.items()}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": namespace, "annotations": annotations},
            "spec": {"clusterIP": f"10.96.0.{len(name)}", "ports": [{"port": 80}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4",
            "ports": [{"name": "", "port": 8080}],
            "endpoints": [{"addresses": [address]} for address in addresses],
        },
    ]


def chosen(static=(), cluster=(), own=(), **settings):
    state = ClusterState.from_objects(cluster)
    state.set_static(parse_static({"f.yaml": static}))
    found = choose(state, state.services, HealthChecks(**settings), own)
    return [f"{target.service.namespace} {target}" for target in found.targets], list(found.unchecked)


def test_only_listed_namespaces_and_never_own_addresses():
    static = objects("a", "static", ["192.0.2.1", "192.0.2.2"], **{"": "tcp"})
    tenant = objects("bb", "tenant", ["192.0.2.1", "10.244.0.9"], **{"": "tcp"})
    own = {"192.0.2.1"}
    both = ["static 192.0.2.1:8080", "static 192.0.2.2:8080"]
    assert chosen(static, tenant, own) == (
        both,
        ["Service tenant/bb: is not checked: its namespace is not in healthChecks.namespaces"],
    )
    assert chosen(static, tenant, own, namespaces=("tenant",)) == (
        [*both, "tenant 10.244.0.9:8080"],
        ["Service tenant/bb: endpoints at addresses of this node are not checked"],
    )
    with_ca = objects("bb", "tenant", ["10.244.0.9"], **{"": "https", "-ca": "/etc/shadow"})
    assert chosen((), with_ca, own, namespaces=("tenant",)) == (
        [],
        ["Service tenant/bb: is not checked: only a static Service may name a CA file"],
    )


def test_the_excess_is_named():
    static = objects("a", "static", ["192.0.2.1", "192.0.2.2", "192.0.2.3"], **{"": "tcp"})
    assert chosen(static, most_endpoints=2) == (
        ["static 192.0.2.1:8080", "static 192.0.2.2:8080"],
        ["Service static/a: 1 of 3 endpoints are not checked: at most 2 are"],
    )


@pytest.mark.parametrize(
    ("failed", "panic", "served"),
    [
        ((), 0, [1, 2, 3, 4]),
        ((1,), 0, [2, 3, 4]),
        ((1, 2, 3), 0, [4]),
        ((1, 2, 3, 4), 0, [1, 2, 3, 4]),
        ((1, 2), 50, [1, 2, 3, 4]),
        ((1, 2), 49, [3, 4]),
    ],
)
def test_panic_threshold(failed, panic, served):
    endpoints = tuple(Endpoint(f"10.0.0.{number}", 80) for number in (1, 2, 3, 4))
    reasons = {(f"10.0.0.{number}", 80 if number % 2 else 0): "failed" for number in failed}
    found = mark_failing(endpoints, Failing(reasons, panic))
    assert [int(item.ip[-1]) for item in found if item.ready and item.serving] == served
    assert [int(item.ip[-1]) for item in found if item.failed] == list(failed)


class NoThreads:
    """A stand-in for the supervisor: the test provides the results of checks."""

    def start(self, _name, _body, _interrupt):
        pass


def followed_checks(**settings):
    """Return the checks of one static Service, and the view that contains it."""
    view = ClusterView()
    view.set_static(parse_static({"f.yaml": objects("a", "static", ["192.0.2.1", "192.0.2.2"], **{"": "tcp"})}))
    checks = Checks(
        HealthChecks(**settings),
        deliver=lambda _change: None,
        supervisor=NoThreads(),
        log=Log(io.StringIO()),
        metrics=Metrics(),
        post=lambda *_event: None,
    )
    checks.follow(view, tuple)
    return checks, view


def failed(view):
    check = view.state.services[NamespacedName("static", "a")].check
    target = Target(NamespacedName("static", "a"), "192.0.2.1", 8080, check)
    return VerdictChange(target, Verdict(False, 3, "Connection refused", 3))


def found_by_prober(checks, change):
    """Record a verdict as the thread of the checks does before it delivers the change."""
    with checks._prober._lock:
        checks._prober._verdicts[change.target] = change.verdict


def test_a_result_of_a_service_that_is_deleted_meanwhile_is_dropped():
    checks, view = followed_checks()
    change = failed(view)
    view.set_static(parse_static({}))
    checks.changed(view, change)
    checks.follow(view, tuple)
    assert checks.count() == (0, 0) and view.state.failing(change.target.service) is None


def test_another_panic_threshold_applies_to_endpoints_that_fail_already():
    checks, view = followed_checks()
    change = failed(view)
    found_by_prober(checks, change)
    checks.changed(view, change)
    view.pop_dirty()
    checks.settings = HealthChecks(panic_percent=50)
    checks.follow(view, tuple, everything=True)
    assert view.state.failing(change.target.service).panic_threshold == 50
    assert view.dirty == {change.target.service}


def test_requests_of_tenants_that_are_not_allowed_cost_little():
    checks, view = followed_checks()
    log = io.StringIO()
    checks._log = Log(log)
    for number in range(5000):
        service, _slice = objects(f"s{number}", "tenant", (), **{"": "tcp"})
        service["spec"]["clusterIP"] = f"10.97.{number >> 8}.{number & 255}"
        view.dirty |= view.state.upsert(service)
    began = time.process_time()
    checks.follow(view, tuple)
    checks.follow(view, tuple)
    assert time.process_time() - began < 3.0
    assert len(checks.unchecked) == 5000 and len(log.getvalue().splitlines()) == 21
    assert checks.count() == (2, 0)


def test_a_target_that_is_omitted_for_a_moment_still_fails():
    """An endpoint may move from one slice to another, and the thread of the checks need not notice the gap."""
    checks, view = followed_checks()
    change = failed(view)
    found_by_prober(checks, change)
    manifest = objects("a", "static", ["192.0.2.1", "192.0.2.2"], **{"": "tcp"})
    for attempt in (True, False):
        if attempt:
            checks.changed(view, change)
        assert checks.count() == (1, 1)
        view.set_static(parse_static({}))
        checks.follow(view, tuple)
        # Without the attempt, the change arrives while the target is omitted.
        checks.changed(view, change)
        view.set_static(parse_static({"f.yaml": manifest}))
        checks.follow(view, tuple)
        assert checks.count() == (1, 1) and view.state.failing(change.target.service).reasons


def test_connections_are_ended_even_if_the_verdict_was_known_before_its_change_arrived():
    checks, view = followed_checks()
    change = failed(view)
    found_by_prober(checks, change)
    # The Service changes before the loop reads the inbox.
    view.dirty.add(change.target.service)
    checks.follow(view, tuple)
    view.pop_dirty()
    checks.changed(view, change)
    assert view.dirty == {change.target.service} and checks._newly_failed


class Node:
    """What the follower asks of the node's sync and of the views."""

    def __init__(self, view):
        self.current = view
        self.proxiers = self.node_view = self
        self.addresses = ()
        self.families = []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (checks_module, "choose"),
        (checks_module, "places_of"),
        (Prober, "follow"),
        (Prober, "verdicts"),
        (ClusterView, "set_failing"),
    ],
)
def test_a_defect_does_not_end_the_agent_and_everything_is_followed_again(monkeypatch, module, name):
    checks, view = followed_checks()
    change = failed(view)
    found_by_prober(checks, change)
    now = [0.0]
    timers = Timers(lambda: now[0])
    log = io.StringIO()
    node = Node(view)
    follower = CheckFollower(checks, node, node, timers=timers, limited=LimitedLog(Log(log)))
    checks.forget()
    with monkeypatch.context() as patched:

        def fail(*_arguments):
            raise KeyError("a defect")

        patched.setattr(module, name, fail)
        follower.follow(everything=True)
        assert "KeyError: 'a defect'" in log.getvalue()
        follower.changed(change)
        follower.end_connections()
    assert checks.count() == (0, 0)
    now[0] += RETRY_SECONDS
    timers.run()
    assert checks.count() == (1, 1) and view.state.failing(change.target.service).reasons
    assert timers.delay() == float("inf")


def test_a_defect_in_a_verdict_does_not_end_the_agent(monkeypatch):
    checks, view = followed_checks()
    change = failed(view)
    found_by_prober(checks, change)
    now = [0.0]
    timers = Timers(lambda: now[0])
    node = Node(view)
    follower = CheckFollower(checks, node, node, timers=timers, limited=LimitedLog(Log(io.StringIO())))
    with monkeypatch.context() as patched:
        patched.setattr(checks_module, "_words", lambda *_arguments: {}["a defect"])
        follower.changed(change)
    now[0] += RETRY_SECONDS
    timers.run()
    assert checks.count() == (1, 1) and view.state.failing(change.target.service).reasons
