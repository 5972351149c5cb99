# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node that an agent keeps in sync: first, partial, repairing and failing syncs, and their follow-ups."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import stale_flows
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import MOST_OF_NAMESPACE
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads import timers
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from tests.lab import manifests
from tests.unit.agent.sync_bench import RESOURCE, SyncBench, service

IPVS = {"mode": "ipvs", "ipvs": {"syncPeriod": "20s"}}


@pytest.fixture
def bench(monkeypatch):
    synced = SyncBench(monkeypatch)
    synced.put(service("web", 1))
    synced.sync.sync(first=True)
    return synced


def names(bench):
    """Return the ClusterIPs in the table."""
    lines_of = bench.mode.rendering.lines
    lines = [line for key, value in bench.table.items() for line in lines_of("IPv4", RESOURCE, key, value)]
    return set(re.findall(r"10\.96\.0\.\d+", " ".join(lines)))


def test_the_first_sync_programs_everything(bench):
    assert names(bench) == {"10.96.0.1"}
    assert bench.sync.syncer.last_error == "" and bench.sync.last_sync_end > 0


def test_a_start_on_a_programmed_node_reads_the_kernel_once(bench, monkeypatch):
    again = SyncBench(monkeypatch)
    again.put(service("web", 1))
    again.mode.resource.table = dict(bench.table)
    again.mode.resource.failure = "nothing is to be changed"
    again.sync.sync(first=True)
    assert again.mode.resource.observed == 1
    assert again.table == bench.table and again.sync.syncer.last_error == ""


def test_a_change_is_applied_without_observing_the_kernel(bench):
    observed = bench.mode.resource.observed
    bench.put(service("api", 2))
    bench.sync.request_if_needed()
    bench.now += 2
    assert bench.sync.is_due
    bench.sync.sync()
    assert names(bench) == {"10.96.0.1", "10.96.0.2"}
    assert bench.mode.resource.observed == observed


def test_all_udp_services_are_examined_only_when_one_lost_something(bench, monkeypatch):
    examined = []

    def record(_socket, _family, ports, *_rest):
        examined.append(sorted(port.key.name for port in ports))
        return 0

    monkeypatch.setattr(stale_flows, "ConntrackSocket", lambda _progress: contextlib.nullcontext())
    monkeypatch.setattr(stale_flows, "delete_stale", record)
    half_open = []
    monkeypatch.setattr(stale_flows, "delete_half_open", lambda *_words: half_open.append(bench.now) or 0)
    port = manifests.port(53, protocol="UDP")

    def endpoints(name, *addresses):
        return manifests.endpoint_slice(name, [manifests.endpoint(item) for item in addresses], [port], namespace="d")

    def sync(*objects):
        bench.put(*objects)
        bench.sync.request_if_needed()
        bench.now += 2
        bench.sync.sync()
        return [examined.pop() for _ in examined[:]]

    assert sync(endpoints("a", "10.244.1.1"), endpoints("b", "10.244.1.2"), endpoints("none")) == []
    udp = [manifests.service(name, f"10.96.0.1{number}", [port], namespace="d") for number, name in enumerate("abc")]
    assert sync(*udp) == [["a", "b", "c"]]
    assert sync({**udp[0], "spec": {**udp[0]["spec"], "externalIPs": ["192.0.2.9"]}}) == []
    half_open.clear()
    assert sync(service("web", 1), service("api", 2)) == []
    assert half_open == [bench.now], "connections to endpoints that are gone, when Services were added"
    assert sync(endpoints("b", "10.244.1.3")) == [["a", "b", "c"]]
    assert sync(endpoints("b")) == [["a", "b", "c"]]
    assert sync({**udp[0], "spec": {**udp[0]["spec"], "ports": [manifests.port(80)]}}) == [["b", "c"]]
    assert len(half_open) == 1


def test_nothing_is_due_without_a_change(bench):
    bench.now += 2
    bench.sync.request_if_needed()
    assert not bench.sync.is_due


def test_an_external_change_is_repaired_and_counted(bench):
    lost = len(bench.table)
    bench.table.clear()
    bench.sync.syncer.suspects["IPv4"] = "a test"
    bench.sync.sync()
    assert len(bench.table) == lost and bench.sync.syncer.repairs.count == lost
    assert 'msg="repaired external changes"' in bench.text.getvalue()
    assert bench.sync.watching.drift.syncs[-1] == (True, True)
    ((about, _kind, reason, _action, note),) = bench.events
    assert (about, reason) == (None, "DriftRepaired") and note.startswith("IPv4: removed: ")


def test_repairs_that_repeat_are_reported_as_often_as_they_are_logged(bench):
    for _time in range(8):
        bench.table.clear()
        bench.sync.syncer.suspects["IPv4"] = "a test"
        bench.sync.sync()
    assert len(bench.events) == bench.text.getvalue().count("repaired external changes") == 5
    assert bench.other_proxy.text == ""


def test_a_repair_that_fails_is_reported_once_until_it_succeeds(bench):
    bench.table.clear()
    for _time in range(3):
        bench.mode.resource.failure = "the kernel refuses"
        bench.sync.syncer.suspects["IPv4"] = "a test"
        bench.sync.sync()
    bench.sync.sync()
    assert [event[2] for event in bench.events] == ["DriftNotRepaired", "DriftRepaired"]
    assert bench.events[0][4].endswith("(a test): the kernel refuses")


def test_a_refused_object_is_reported_once_while_it_is_refused(bench):
    bad = manifests.service("bad", "10.96.0.400", [manifests.port(80)], namespace="d")
    for _time in range(2):
        bench.put(bad)
        bench.sync.report_refusals()
        bench.sync.sync()
    ((about, _kind, reason, _action, note),) = bench.events
    assert about == {"kind": "Service", "namespace": "d", "name": "bad"}
    assert reason == "ObjectRefused" and note.startswith("skipped: Service d/bad: spec.clusterIP")
    bench.put(service("bad", 9))
    bench.sync.sync()
    bench.put(bad)
    bench.sync.sync()
    assert [event[2] for event in bench.events] == ["ObjectRefused"] * 2
    for _time in range(MOST_OF_NAMESPACE):
        for item in (service("bad", 9), bad):
            bench.put(item)
            bench.sync.report_refusals()
    assert len(bench.events) == MOST_OF_NAMESPACE


def test_of_many_refused_objects_some_are_reported(bench):
    bench.put(*(manifests.service(f"bad-{number}", "x", [], namespace="d") for number in range(100)))
    bench.sync.sync()
    assert len(bench.events) == MOST_OF_NAMESPACE


def test_after_a_failure_the_next_sync_observes_everything(bench):
    bench.put(service("api", 2))
    bench.mode.resource.failure = "the kernel refuses"
    bench.sync.sync()
    assert bench.sync.syncer.last_error == "the kernel refuses"
    assert bench.sync.schedule.delay(bench.now) <= 30
    observed = bench.mode.resource.observed
    bench.sync.sync()
    assert bench.mode.resource.observed > observed
    assert names(bench) == {"10.96.0.1", "10.96.0.2"} and bench.sync.syncer.last_error == ""


ENDPOINTS = {"IPv4": "10.0.0.1", "IPv6": "fd00::1"}


@pytest.fixture
def dual(monkeypatch):
    """Return a node that serves both families and a Service of both."""
    synced = SyncBench(monkeypatch, families=("IPv4", "IPv6"))
    synced.put(manifests.service("web", ["10.96.0.1", "fd00::96"], [manifests.port(80)], namespace="d"))
    synced.sync.sync(first=True)
    return synced


def put_triggered(bench, *families):
    """Deliver a slice of each family that was triggered just now; return the families concerned."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 1))
    common = {
        "ports": [manifests.port(80)],
        "namespace": "d",
        "metadata": {"annotations": {"endpoints.kubernetes.io/last-change-trigger-time": now}},
    }
    ends = {family: [manifests.endpoint(ENDPOINTS[family])] for family in families}
    return bench.put(*(manifests.endpoint_slice("web", ends[family], name=family.lower(), **common) for family in ends))


def gauge(bench, name, family):
    """Return the value of a series of a family, None if it is not shown."""
    found = re.search(rf'^{name}{{ip_family="{family}"}} (\S+)$', bench.metrics.text().decode(), re.MULTILINE)
    return found and float(found[1])


def programmed(bench):
    """Return how many latencies each family has observed."""
    name = "kubeproxy_network_programming_duration_seconds_count"
    return {family: gauge(bench, name, family) or 0 for family in ENDPOINTS}


def test_each_family_observes_the_latency_of_its_own_changes(dual):
    put_triggered(dual, "IPv4")
    dual.sync.sync()
    assert programmed(dual) == {"IPv4": 1, "IPv6": 0}


def test_a_failing_family_does_not_hide_the_latency_of_the_other(dual):
    put_triggered(dual, "IPv4", "IPv6")
    dual.mode.resources["IPv6"].failure = "the kernel refuses"
    dual.sync.sync()
    assert dual.sync.syncer.last_error and programmed(dual) == {"IPv4": 1, "IPv6": 0}
    dual.sync.sync()
    assert not dual.sync.syncer.last_error and programmed(dual) == {"IPv4": 1, "IPv6": 1}


def test_only_the_families_that_a_change_concerns_are_queued(dual):
    name = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"
    queued = {family: gauge(dual, name, family) for family in ENDPOINTS}
    assert all(queued.values())
    dual.sync.note_queued(put_triggered(dual, "IPv4"))
    assert dual.sync.schedule.requested
    assert gauge(dual, name, "IPv4") > queued["IPv4"] and gauge(dual, name, "IPv6") == queued["IPv6"]
    dual.mode.resources["IPv6"].failure = "the kernel refuses"
    dual.sync.syncer.suspects["IPv6"] = "a test"
    dual.mode.resources["IPv6"].table.clear()
    dual.sync.sync()
    assert dual.sync.syncer.last_error == "the kernel refuses"
    # Nothing that the cluster has requested is missing in IPv6.
    dual.now += 3600
    assert dual.health.healthy
    dual.sync.note_queued(put_triggered(dual, "IPv6"))
    dual.now += 3600
    assert not dual.health.healthy
    dual.sync.sync()
    assert dual.health.healthy


def test_a_new_configuration_closes_the_drift_watch_and_applies_every_service_again(bench):
    drift = bench.sync.watching.drift
    bench.sync.rebuild(bench.request())
    assert drift.closed and bench.sync.watching.drift is None
    bench.now += 2
    assert bench.sync.is_due
    bench.sync.sync()
    assert names(bench) == {"10.96.0.1"} and bench.sync.watching.drift is not drift


@pytest.mark.parametrize(
    ("configuration", "seconds", "pause"),
    [({"configSyncPeriod": "40s"}, 0.0, 40.0), (IPVS, 0.0, 20.0), (IPVS, 2.0, 200.0)],
)
def test_everything_is_checked_after_the_period_and_not_before(monkeypatch, configuration, seconds, pause):
    bench = SyncBench(monkeypatch, configuration)
    bench.put(service("web", 1))
    bench.table["left"] = "by an earlier agent"
    bench.mode.resource.seconds = seconds
    bench.sync.sync(first=True)
    for _check in range(2):
        bench.now += pause - 5
        bench.timers.run()
        assert bench.sync.syncer.suspects == {} and not bench.sync.schedule.requested
        assert bench.timers.delay() <= 10
        bench.now += 10
        bench.timers.run()
        assert bench.sync.syncer.suspects == {"IPv4": "regular check"} and bench.sync.schedule.requested
        bench.table.popitem()
        bench.sync.sync()
    assert bench.sync.syncer.repairs.count == 2


def test_an_empty_node_that_was_filled_is_checked_as_well(monkeypatch):
    bench = SyncBench(monkeypatch, {"configSyncPeriod": "40s"})
    bench.put(service("web", 1))
    bench.sync.sync(first=True)
    bench.now += 41
    bench.timers.run()
    assert bench.sync.syncer.suspects == {"IPv4": "regular check"}


def test_changes_in_between_do_not_postpone_the_check(monkeypatch):
    bench = SyncBench(monkeypatch, {"configSyncPeriod": "40s"})
    bench.put(service("web", 1))
    bench.sync.sync(first=True)
    observed = bench.mode.resource.observed
    for number in range(3):
        bench.now += 15
        bench.timers.run()
        bench.put(service("web", 2 + number))
        bench.sync.sync()
    assert bench.mode.resource.observed == observed + 1


def dns(number):
    """Return the EndpointSlice of a UDP Service with a new endpoint."""
    ports = [manifests.port(53, protocol="UDP")]
    return manifests.endpoint_slice("dns", [manifests.endpoint(f"10.244.1.{number}", "n2")], ports, namespace="d")


def test_changed_udp_endpoints_read_connections_a_tenth_of_the_time(monkeypatch):
    bench = SyncBench(monkeypatch)
    for clock in ("monotonic", "thread_time"):
        monkeypatch.setattr(timers.time, clock, lambda: bench.now)
    examined = []
    monkeypatch.setattr(
        stale_flows, "delete_stale", lambda *_words: examined.append(bench.now) or bench.pass_time(1.0) or 0
    )
    bench.put(
        manifests.service("dns", "10.96.0.10", [manifests.port(53, protocol="UDP")], namespace="d"), service("w", 1)
    )
    bench.put(dns(1))
    bench.sync.sync(first=True)
    examined.clear()
    started = bench.now
    for number in range(2, 42):
        bench.put(dns(number))
        bench.sync.sync()
        bench.now += 0.5
    assert 1 <= len(examined) <= (bench.now - started) / 10 + 1
    bench.now += 10
    bench.timers.run()
    bench.sync.sync()
    assert examined[-1] >= bench.now - 1, "the last change is examined without another one"


def test_annotations_without_effect_are_reported_once_each(bench):
    wrong, impossible = service("wrong", 2), service("impossible", 3)
    wrong["metadata"]["annotations"] = {"kubenode.proxy/scheduler": "bogus"}
    impossible["metadata"]["annotations"] = {"kubenode.proxy/scheduler": "fo"}
    for _repetition in range(2):
        bench.put(wrong, impossible)
        bench.sync.sync()
    assert names(bench) == {"10.96.0.1", "10.96.0.2", "10.96.0.3"}
    about = {event[0]["name"]: event for event in bench.events}
    assert len(bench.events) == 2 and set(about) == {"wrong", "impossible"}
    assert {event[1:4] for event in bench.events} == {("Warning", "AnnotationIgnored", "Sync")}
    assert 'metadata.annotations[kubenode.proxy/scheduler]: "bogus" is not one of rr' in about["wrong"][4]
    assert about["impossible"][4].startswith("Service d/impossible (80/TCP): nftables mode has no scheduler fo")
    line = 'msg="an annotation has no effect"'
    assert bench.text.getvalue().count(line) == 2
    impossible["metadata"]["annotations"] = {}
    bench.put(impossible)
    bench.sync.sync()
    (proxier,) = bench.sync.proxiers.families
    assert proxier.ignored == {} and len(bench.events) == 2
    # A user who may write the annotation may do so again and again.
    for number in range(MOST_OF_NAMESPACE):
        wrong["metadata"]["annotations"] = {"kubenode.proxy/scheduler": f"bogus-{number}"}
        bench.put(wrong)
        bench.sync.sync()
    assert len(bench.events) == bench.text.getvalue().count(line) == MOST_OF_NAMESPACE


def in_slow_start(*addresses):
    """Return the Service in slow start, and its slice with these endpoints ready."""
    web = service("web", 1)
    web["metadata"]["annotations"] = {"kubenode.proxy/slow-start": "40s"}
    listed = [manifests.endpoint(address) for address in addresses]
    return web, manifests.endpoint_slice("web", listed, [manifests.port(80)], namespace="d")


def places(bench):
    """Return how often each endpoint is among those that are drawn."""
    (listed,) = [value for key, value in bench.table.items() if getattr(key, "kind", "") == "list"]
    return Counter(".".join(map(str, place[:4])) for place in listed)


def test_the_share_of_a_new_endpoint_rises(bench):
    for item in in_slow_start("10.0.0.1", "10.0.0.2"):
        bench.put(item)
    bench.sync.sync()
    assert places(bench) == {"10.0.0.1": 1, "10.0.0.2": 1}
    bench.put(in_slow_start("10.0.0.1", "10.0.0.2", "10.0.0.3")[1])
    bench.sync.sync()
    seen = []
    # An eighth each five seconds; the timer requests the sync of each step, and none after the last one.
    for _second in range(60):
        shares = places(bench)
        if not seen or seen[-1] != shares["10.0.0.3"] / shares["10.0.0.1"]:
            seen.append(shares["10.0.0.3"] / shares["10.0.0.1"])
        bench.now += 1
        bench.timers.run()
        bench.sync.request_if_needed()
        if bench.sync.is_due:
            bench.sync.sync()
    assert seen == [count / 8 for count in range(1, 9)]
    assert places(bench) == {"10.0.0.1": 1, "10.0.0.2": 1, "10.0.0.3": 1}

    # One that was not ready for a while begins again; without the annotation, or the Service, nothing rises.
    bench.put(in_slow_start("10.0.0.1", "10.0.0.2")[1])
    bench.sync.sync()
    bench.put(in_slow_start("10.0.0.1", "10.0.0.2", "10.0.0.3")[1])
    bench.sync.sync()
    assert places(bench)["10.0.0.1"] == 8 and places(bench)["10.0.0.3"] == 1
    bench.put(service("web", 1))
    bench.sync.sync()
    assert set(places(bench).values()) == {1}
    assert bench.view.state.rising(NamespacedName("d", "web")) == {}
