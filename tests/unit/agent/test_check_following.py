# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Health checks follow the Services that request them, and mark the endpoints that fail."""

from __future__ import annotations

import io
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks import checks as checks_module
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.attempt import Target
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.checks import (
    RETRY_SECONDS,
    CheckFollower,
    Checks,
    choose,
    not_allowed,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.checks.prober import Prober, Verdict, VerdictChange
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import (
    MOST_OF_NAMESPACE,
    LimitedLog,
    Log,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.failures import Steps
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.static import parse_static
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import Failing, NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import HealthChecks
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import Endpoint
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import mark_failing
from tests.unit.agent.reports_in_memory import reports_to


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
    reasons = {name: not_allowed(item, HealthChecks(**settings)) for name, item in state.services.items()}
    found = choose(state, [name for name, reason in reasons.items() if not reason], HealthChecks(**settings), own)
    unchecked = [*filter(None, reasons.values()), *found.unchecked.values()]
    return [f"{target.service.namespace} {target}" for target in found.targets], unchecked


def test_only_listed_namespaces_and_never_own_addresses():
    static = objects("a", "static", ["192.0.2.1", "192.0.2.2"], **{"": "tcp"})
    tenant = objects("bb", "tenant", ["192.0.2.1", "10.244.0.9"], **{"": "tcp"})
    own = {"192.0.2.1"}
    both = ["static 192.0.2.1:8080", "static 192.0.2.2:8080"]
    assert chosen(static, tenant, own) == (
        both,
        ["is not checked: its namespace is not in healthChecks.namespaces"],
    )
    assert chosen(static, tenant, own, namespaces=("tenant",)) == (
        [*both, "tenant 10.244.0.9:8080"],
        ["endpoints at addresses of this node are not checked"],
    )
    with_ca = objects("bb", "tenant", ["10.244.0.9"], **{"": "https", "-ca": "/etc/shadow"})
    assert chosen((), with_ca, own, namespaces=("tenant",)) == (
        [],
        ["is not checked: only a static Service may name a CA file"],
    )


def test_the_excess_is_named():
    static = objects("a", "static", ["192.0.2.1", "192.0.2.2", "192.0.2.3"], **{"": "tcp"})
    assert chosen(static, most_endpoints=2) == (
        ["static 192.0.2.1:8080", "static 192.0.2.2:8080"],
        ["1 of 3 endpoints are not checked: at most 2 are"],
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
    view.dirty |= view.state.set_static(
        parse_static({"f.yaml": objects("a", "static", ["192.0.2.1", "192.0.2.2"], **{"": "tcp"})})
    )
    checks = Checks(
        HealthChecks(**settings),
        deliver=lambda _change: None,
        supervisor=NoThreads(),
        reports=reports_to(),
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
    view.dirty |= view.state.set_static(parse_static({}))
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
    checks._limited = LimitedLog(Log(log))
    view.pop_dirty()
    for number in range(5000):
        service, _slice = objects(f"s{number}", "tenant", (), **{"": "tcp"})
        service["spec"]["clusterIP"] = f"10.97.{number >> 8}.{number & 255}"
        view.dirty |= view.state.upsert(service)
    asked = []

    def own_addresses():
        asked.append(True)
        return ()

    began = time.process_time()
    checks.follow(view, own_addresses)
    checks.follow(view, own_addresses)
    assert time.process_time() - began < 3.0
    # The Services that are checked are not chosen again.
    assert asked == []
    assert len(checks.unchecked) == 5000 and len(log.getvalue().splitlines()) == MOST_OF_NAMESPACE
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
        view.dirty |= view.state.set_static(parse_static({}))
        checks.follow(view, tuple)
        # Without the attempt, the change arrives while the target is omitted.
        checks.changed(view, change)
        view.dirty |= view.state.set_static(parse_static({"f.yaml": manifest}))
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

    def end_connections(self):
        """Nothing has been recorded."""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (checks_module, "choose"),
        (checks_module, "places_of"),
        (Prober, "follow"),
        (Prober, "verdicts"),
        (ClusterState, "set_failing"),
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
    follower = CheckFollower(checks, node, node, timers=timers, steps=Steps(LimitedLog(Log(log))))
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
    follower = CheckFollower(checks, node, node, timers=timers, steps=Steps(LimitedLog(Log(io.StringIO()))))
    with monkeypatch.context() as patched:
        patched.setattr(checks_module, "_words", lambda *_arguments: {}["a defect"])
        follower.changed(change)
    now[0] += RETRY_SECONDS
    timers.run()
    assert checks.count() == (1, 1) and view.state.failing(change.target.service).reasons


def test_connections_to_endpoints_that_failed_meanwhile_are_ended():
    checks, view = followed_checks()
    change = failed(view)
    checks.forget()
    found_by_prober(checks, change)
    checks.changed(view, change)
    checks.follow(view, tuple, everything=True)
    assert checks._newly_failed == [(change.target.service, "192.0.2.1", 8080)]


def test_a_defect_while_connections_are_ended_forgets_nothing(monkeypatch):
    checks, view = followed_checks()
    node = Node(view)
    monkeypatch.setattr(checks, "end_connections", lambda *_arguments: {}["a defect"])
    timers = Timers(lambda: 0.0)
    CheckFollower(checks, node, node, timers=timers, steps=Steps(LimitedLog(Log(io.StringIO())))).end_connections()
    assert checks.count() == (2, 0) and timers.delay() == float("inf")
