# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's smaller components: log lines, systemd, the cluster view, drift, events, surface."""

from __future__ import annotations

import io
import json
import resource
import socket
import time

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent import forwarding
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.http import connections
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.surface import parse_address
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.first_services import cold_batches
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.packed import text_in
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView, by_kind
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.systemd import Systemd
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.inbox import Inbox
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.prune import prune
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.forwarding.limits import MOST_PIPES
from tests.lab import manifests


def endpoints(trigger="", address="10.244.1.1", version="5"):
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": "default",
            "name": "web-1",
            "resourceVersion": version,
            "managedFields": [{"manager": "x"}],
            "labels": {"kubernetes.io/service-name": "web"},
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": trigger} if trigger else {},
        },
        "addressType": "IPv4",
        "ports": [{"name": "", "protocol": "TCP", "port": 80}],
        "endpoints": [{"addresses": [address]}],
    }


@pytest.mark.parametrize(
    ("as_json", "priorities", "expected"),
    [
        (False, False, 'level=info msg="it is done" count=3 seconds=0.25 text="a b\\"c" empty=""\n'),
        (False, True, '<6>level=info msg="it is done" count=3 seconds=0.25 text="a b\\"c" empty=""\n'),
    ],
)
def test_log_lines(as_json, priorities, expected):
    stream = io.StringIO()
    log = Log(stream, as_json, priorities)
    log.info("it is done", count=3, seconds=0.25, text='a b"c', empty="")
    log.debug("not shown")
    assert stream.getvalue() == expected


def test_log_lines_in_json_and_without_line_breaks():
    stream = io.StringIO()
    Log(stream, as_json=True, clock=lambda: 12.5).error("bad", error=ValueError("x\ny"))
    assert json.loads(stream.getvalue()) == {"ts": 12.5, "level": "error", "msg": "bad", "error": "x\ny"}
    stream = io.StringIO()
    Log(stream).warning("two\nlines", value="a\nb\x1b[1m")
    assert stream.getvalue() == 'level=warning msg="two lines" value="a b?[1m"\n'


def test_lines_that_clients_can_cause_are_limited_and_the_rest_counted():
    now = [100.0]
    stream = io.StringIO()
    limited = LimitedLog(Log(stream), burst=2, seconds=60.0, clock=lambda: now[0])
    written = [limited.warning("a", "repaired", number=number) for number in range(800)]
    assert written == [True, True] + [False] * 798
    assert limited.once("b", "other") and not limited.once("b", "other")
    assert limited.pending
    limited.report()
    assert len(stream.getvalue().splitlines()) == 3
    now[0] += 60.0
    assert not limited.warning("a", "repaired", number=800), "until the count is written the key stays limited"
    limited.report()
    assert stream.getvalue().splitlines()[3:] == [
        "level=warning msg=repaired suppressed=799 seconds=60",
        "level=warning msg=other suppressed=1 seconds=60",
    ]
    assert not limited.pending and limited.warning("a", "repaired") and limited.warning("b", "other")
    now[0] += 60.0
    limited.report()
    assert len(stream.getvalue().splitlines()) == 7, "nothing suppressed, nothing to say"
    limited.warning("a", "repaired")
    limited.warning("a", "repaired")
    limited.warning("a", "repaired")
    limited.report(everything=True)
    assert stream.getvalue().splitlines()[-1] == "level=warning msg=repaired suppressed=1 seconds=60"


def test_keys_of_limited_lines_are_bounded():
    limited = LimitedLog(Log(io.StringIO()), burst=1)
    for number in range(5000):
        limited.warning(number, "text")
        limited.warning(number, "text")
    assert len(limited._keys) <= 1000


class Gone(io.StringIO):
    """A stream whose reader is gone while ``failure`` is set."""

    failure = None

    def flush(self):
        if self.failure is not None:
            self.truncate(0)
            self.seek(0)
            raise self.failure


def test_a_log_that_cannot_be_written_stops_nothing_and_is_reported_when_it_can():
    stream = Gone()
    log = Log(stream)
    for stream.failure in (BrokenPipeError(), OSError(28, "No space left on device"), ValueError("closed")):
        log.info("lost")
    stream.failure = None
    log.info("again")
    log.info("more")
    assert stream.getvalue().splitlines() == [
        'level=warning msg="lines of the log were lost" lines=3',
        "level=info msg=again",
        "level=info msg=more",
    ]


def test_the_watchdog_is_fed_without_a_free_file_descriptor(tmp_path):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(path)
        sock.settimeout(2)
        manager = Systemd({"NOTIFY_SOCKET": path})
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            manager.alive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert sock.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_notified(tmp_path, abstract):
    path = f"@kubenode-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + path[1:] if abstract else path)
        sock.settimeout(2)
        manager = Systemd({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "4000000"})
        assert manager.watchdog_seconds == 4.0
        manager.ready()
        manager.status("good")
        manager.status("good")
        manager.alive()
        manager.reloading()
        manager.stopping()
        assert [sock.recv(100).split(b"\n")[0] for _ in range(5)] == [
            b"READY=1",
            b"STATUS=good",
            b"WATCHDOG=1",
            b"RELOADING=1",
            b"STOPPING=1",
        ]
    manager.ready()
    Systemd({}).ready()
    assert Systemd({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}).watchdog_seconds == 0.0


def test_the_view_counts_real_changes_and_keeps_small_objects():
    view = ClusterView()
    assert view.apply(Batch("EndpointSlice", [prune(endpoints())], [], True)) == (0, 1, {"IPv4"})
    assert view.apply(Batch("EndpointSlice", [prune(endpoints(version="6"))], [])) == (0, 0, set())
    assert view.revision == 1 and view.listed == {"EndpointSlice"}
    assert view.pop_dirty() == {NamespacedName("default", "web")} and view.pop_dirty() == set()
    text = text_in(*view.objects())
    assert b"managedFields" not in text and b"resourceVersion" not in text
    assert view.apply(Batch("EndpointSlice", [], [endpoints()])) == (0, 1, {"IPv4"})
    assert view.objects() == [] and view.revision == 2 and view.pending_slices == 2
    view.synced()
    assert view.pending_slices == 0


def test_latency_counts_from_trigger_times_after_the_start():
    view = ClusterView()
    now = time.time()
    future = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now + 5)) + ".5Z"
    view.apply(Batch("EndpointSlice", [endpoints("2020-01-01T00:00:00Z")], []))
    view.apply(Batch("EndpointSlice", [endpoints("not a time", "10.244.1.2")], []))
    assert view.triggers.pop("IPv4", now) == []
    view.apply(Batch("EndpointSlice", [endpoints(future, "10.244.1.3")], []))
    (latency,) = view.triggers.pop("IPv4", now + 10)
    assert 3.0 < latency < 6.0
    view.apply(Batch("EndpointSlice", [endpoints(future, "10.244.1.4")], []))
    view.apply(Batch("EndpointSlice", [], [endpoints()]))
    assert view.triggers.pop("IPv4", now + 10) == []


def test_each_family_has_its_own_trigger_times():
    """As in kube-proxy; the removal of a slice forgets those of its family only."""
    view = ClusterView()
    now = time.time()
    future = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + 5))
    v4, v6 = endpoints(future), endpoints(future, "fd00::1")
    v6["metadata"]["name"], v6["addressType"] = "web-2", "IPv6"
    view.apply(Batch("EndpointSlice", [v4], []))
    assert view.triggers.pop("IPv6", now + 10) == [] and len(view.triggers.pop("IPv4", now + 10)) == 1
    v4["endpoints"], v6["endpoints"] = [], [{"addresses": ["fd00::2"]}]
    view.apply(Batch("EndpointSlice", [v4, v6], []))
    view.apply(Batch("EndpointSlice", [], [v4]))
    assert view.triggers.pop("IPv4", now + 10) == [] and len(view.triggers.pop("IPv6", now + 10)) == 1
    view.apply(Batch("EndpointSlice", [], [v6]))
    view.apply(Batch("EndpointSlice", [v6], []))
    view.synced()
    assert view.triggers.pop("IPv6", now + 10) == []


def test_a_change_concerns_the_families_of_its_object():
    view = ClusterView()

    def families(kind, changed=(), gone=()):
        return set(view.apply(Batch(kind, list(changed), list(gone))).families)

    v4, both = manifests.service("a", "10.96.0.1", []), manifests.service("b", ["10.96.0.2", "fd00::2"], [])
    v6 = manifests.service("c", "fd00::3", [])
    assert families("Service", [v4]) == {"IPv4"} and families("Service", [v4]) == set()
    assert families("Service", [v6]) == {"IPv6"} and families("Service", [both]) == {"IPv4", "IPv6"}
    assert families("Service", gone=[v4, v4]) == {"IPv4"} and families("Service", gone=[v4]) == set()
    # A Service that loses a family concerns it once more.
    assert families("Service", [manifests.service("b", "10.96.0.2", [])]) == {"IPv4", "IPv6"}
    slice4 = manifests.endpoint_slice("b", [manifests.endpoint("10.0.0.1", "n1")], [])
    slice6 = manifests.endpoint_slice("b", [manifests.endpoint("fd00::9", "n1")], [], name="b-2")
    assert families("EndpointSlice", [slice4]) == {"IPv4"} and families("EndpointSlice", [slice6]) == {"IPv6"}
    assert families("EndpointSlice", gone=[slice6]) == {"IPv6"} and families("EndpointSlice", gone=[slice6]) == set()
    weight = {"annotations": {"kubenode.proxy/weight": "3"}}
    assert families("Node", [manifests.node("n1", "192.0.2.1", "10.0.0.0/24", metadata=weight)]) == {"IPv4", "IPv6"}
    assert families("Node", [manifests.node("n2", "192.0.2.2", "10.0.1.0/24")]) == set()


def test_a_claim_that_becomes_free_concerns_the_families_of_its_next_owner():
    view = ClusterView()
    node_port = {"type": "NodePort", "ports": [manifests.port(80, nodePort=30001)]}
    first = manifests.service("a", "10.96.0.1", [], metadata={"creationTimestamp": "2026-01-01T00:00:00Z"})
    second = manifests.service("b", ["10.96.0.2", "fd00::2"], [])
    for raw in (first, second):
        raw["spec"].update(node_port)
    view.apply(Batch("Service", [first, second], []))
    assert view.apply(Batch("Service", [], [first])).families == {"IPv4", "IPv6"}


@pytest.mark.parametrize(
    "trigger",
    [
        "9999-12-31T23:59:59.999Z",
        "2030-01-01T00:00:00.1e999Z",
        "2030-01-01T00:00:00.nanZ",
        "2030-01-01T00:00:00.-9Z",
        "99999-01-01T00:00:00Z",
        f"2030-01-01T00:00:00.{'9' * 5000}Z",
    ],
)
def test_no_trigger_time_spoils_the_sum_of_latencies(trigger):
    view = ClusterView()
    view.apply(Batch("EndpointSlice", [endpoints(trigger)], []))
    assert all(0 <= latency < 60 for latency in view.triggers.pop("IPv4", time.time()))


def test_refused_objects_are_counted_by_kind():
    view = ClusterView()
    raw = endpoints()
    raw["endpoints"] = "nonsense"
    view.apply(Batch("EndpointSlice", [raw], []))
    assert by_kind(view.state.refusals)["EndpointSlice"] == 1


def test_an_empty_node_is_filled_in_the_order_of_importance():
    services = [NamespacedName("shop", f"s{number}") for number in range(5)]
    services += [NamespacedName("kube-system", "kube-dns"), NamespacedName("default", "kubernetes")]
    batches = list(cold_batches(services, 3))
    assert batches[0] == []
    assert batches[1] == [NamespacedName("default", "kubernetes"), NamespacedName("kube-system", "kube-dns")]
    assert [len(batch) for batch in batches[2:]] == [3, 2]
    assert sorted(name for batch in batches for name in batch) == sorted(services)


def test_a_node_whose_filling_was_begun_keeps_what_it_has_in_the_first_batch():
    """The first batch is compared with the kernel, so whatever it lacks is removed."""
    services = [NamespacedName("shop", f"s{number}") for number in range(5)]
    services.append(NamespacedName("kube-system", "kube-dns"))
    begun = {NamespacedName("default", "kubernetes"), NamespacedName("kube-system", "kube-dns"), services[3]}
    batches = list(cold_batches(services, 3, begun))
    assert batches[0] == [NamespacedName("kube-system", "kube-dns"), services[3]]
    assert [len(batch) for batch in batches[1:]] == [3, 1]
    assert sorted(name for batch in batches for name in batch) == sorted(services)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.0.0.0:10256", ("0.0.0.0", 10256)), ("[::1]:80", ("::1", 80)), (":81", ("::", 81)), ("", None), ("x:0", None)],
)
def test_addresses_to_listen_on(text, expected):
    assert parse_address(text) == expected


@pytest.mark.parametrize("files", [8192, 65536, 1 << 20])
def test_the_forwarder_leaves_files_to_the_http_server(files):
    limits = forwarding.limits_of(KubeProxyConfiguration(), files)
    used = 2 * limits.connections + limits.sessions + limits.listeners + 2 * MOST_PIPES
    assert used + connections.limits_of(files).connections + connections.OTHER_FILES <= files


def test_the_inbox_waits_for_any_descriptor():
    assert connections.raise_open_files() > 1200
    inbox = Inbox()
    held = []
    try:
        while not held or held[-1].fileno() < 1100:
            held.append(socket.socket())
        reader, writer = socket.socketpair()
        held += [reader, writer]
        assert reader.fileno() >= 1024
        started = time.monotonic()
        inbox.wait([reader.fileno()], 0.05)
        assert 0.04 < time.monotonic() - started < 20.0
        writer.send(b"x")
        started = time.monotonic()
        inbox.wait([reader.fileno()], 60.0)
        inbox.deliver("item")
        inbox.wait([], 60.0)
        assert time.monotonic() - started < 30.0 and list(inbox.items()) == ["item"]
    finally:
        for item in held:
            item.close()
