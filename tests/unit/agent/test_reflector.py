# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reflectors against the test API server: only differences are delivered, and every failure of a watch is handled."""

from __future__ import annotations

import io
import queue

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Known
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.reflector import Reflector
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.supervision import (
    LONGEST_PAUSE_SECONDS,
    Backoff,
    Supervisor,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import (
    NODES,
    SERVICE_CIDRS,
    SERVICES,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.objects import ObjectKey
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.lab.ports import free_port
from tests.waiting import wait_for


def service(name, port=80, **labels):
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "default", "name": name, "labels": labels},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": port}]},
    }


def names(items):
    return sorted(item["metadata"]["name"] for item in items)


class Setup:
    def __init__(self, scratch, first_version=1):
        self.certificates = make_certificates(scratch / "tls")
        self.store = Store(first_version)
        self.port = free_port()
        self.batches = queue.SimpleQueue()
        self.stream = io.StringIO()
        self.supervisor = Supervisor(Log(self.stream))
        self.reflectors = []
        self.kubeconfig = write_kubeconfig(
            scratch / "kubeconfig", f"https://127.0.0.1:{self.port}", self.certificates.authority, "test-token"
        )
        self.api = None
        self.up()

    def up(self):
        self.api = ApiServer(self.store, self.certificates, address=("127.0.0.1", self.port), bookmark_seconds=0.3)

    def down(self):
        self.api.close()
        self.api = None

    @property
    def said(self):
        return self.stream.getvalue().splitlines()

    def follow(self, resource, **options):
        reflector = Reflector(
            resource,
            lambda expect: ApiClient(ApiConnection(kubeconfig=str(self.kubeconfig)), timeout=5.0, expect=expect),
            self.batches.put,
            Log(self.stream),
            backoff=lambda: Backoff(lambda: -0.9),
            **options,
        )
        self.reflectors.append(reflector)
        self.supervisor.start(resource.name, reflector.run, reflector.interrupt)
        return reflector

    def next(self, seconds=10.0):
        return self.batches.get(timeout=seconds)

    def close(self):
        for reflector in self.reflectors:
            reflector.stop()
        if self.api is not None:
            self.down()


@pytest.fixture
def setup(tmp_path):
    followed = Setup(tmp_path)
    yield followed
    followed.close()


def test_lists_then_follows_every_kind_of_event(setup):
    setup.store.put(service("a"))
    setup.follow(SERVICES)
    first = setup.next()
    assert (names(first.changed), first.gone, first.listed) == (["a"], [], True)
    setup.store.put(service("b"))
    setup.store.put(service("a", 81))
    setup.store.delete("Service", "default", "b")
    assert names(setup.next().changed) == ["b"]
    assert setup.next().changed[0]["spec"]["ports"] == [{"port": 81}]
    last = setup.next()
    assert (last.changed, names(last.gone), last.listed) == ([], ["b"], False)
    wait_for(lambda: setup.reflectors[0].connected)


def test_selectors_are_sent_and_an_object_that_stops_matching_is_deleted(setup):
    setup.store.put(service("ours"))
    setup.store.put(service("theirs", **{"service.kubernetes.io/service-proxy-name": "other"}))
    setup.follow(SERVICES)
    assert names(setup.next().changed) == ["ours"]
    setup.store.put(service("ours", **{"service.kubernetes.io/service-proxy-name": "other"}))
    assert names(setup.next().gone) == ["ours"]


def test_only_the_own_node_is_followed(setup):
    for name in ("node1", "node2"):
        setup.store.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    setup.follow(NODES, field_selector="metadata.name=node1")
    assert names(setup.next().changed) == ["node1"]


def test_an_expired_version_causes_a_list_and_only_differences_are_delivered(setup):
    for name in "abc":
        setup.store.put(service(name))
    reflector = setup.follow(SERVICES)
    assert names(setup.next().changed) == ["a", "b", "c"]
    setup.down()
    wait_for(lambda: reflector.error)
    setup.store.put(service("b", 81))
    setup.store.delete("Service", "default", "c")
    setup.store.put(service("d"))
    setup.store.compact()
    setup.up()
    again = setup.next(20)
    assert (names(again.changed), names(again.gone), again.listed) == (["b", "d"], ["c"], True)
    wait_for(lambda: setup.said and setup.said[-1].startswith("level=info") and "can be read again" in setup.said[-1])


def test_a_dropped_watch_resumes_without_a_list(setup):
    setup.store.put(service("a"))
    setup.follow(SERVICES)
    setup.next()
    lists = sum("watch=true" not in path for path in setup.api.requests)
    for number in range(3):
        setup.api.drop_watches()
        setup.store.put(service(f"n{number}"))
        assert names(setup.next().changed) == [f"n{number}"]
    assert sum("watch=true" not in path for path in setup.api.requests) == lists


def test_a_server_with_another_history_is_noticed_by_its_bookmarks(tmp_path):
    setup = Setup(tmp_path, first_version=5000)
    try:
        setup.store.put(service("a"))
        setup.follow(SERVICES)
        setup.next()
        setup.down()
        setup.store = Store(10)
        setup.store.put(service("b"))
        setup.up()
        batch = setup.next(20)
        assert (names(batch.changed), names(batch.gone)) == (["b"], ["a"])
    finally:
        setup.close()


@pytest.mark.parametrize("code", [403, 500, 504])
def test_an_error_is_logged_once_and_the_request_retried(setup, code):
    setup.api.failing["/api/v1/services"] = code
    setup.follow(SERVICES)
    wait_for(lambda: setup.said)
    with pytest.raises(queue.Empty):
        setup.next(1.0)
    assert len(setup.said) == 1 and str(code) in setup.said[0]
    assert setup.reflectors[0].error
    setup.api.failing.clear()
    assert setup.next().listed
    # The state is delivered first.
    wait_for(lambda: setup.reflectors[0].error == "")


def test_a_collection_that_the_server_does_not_know_is_empty_where_it_is_optional(setup):
    setup.api.absent.add(SERVICE_CIDRS.path)
    setup.follow(SERVICE_CIDRS, optional=True)
    batch = setup.next()
    assert (names(batch.changed), batch.gone, batch.listed) == ([], [], True)
    wait_for(lambda: setup.reflectors[0].connected)
    assert setup.reflectors[0].error == "" and setup.said == []


def test_cached_objects_that_the_list_lacks_are_removed():
    known = Known("Service")
    known.assume([ObjectKey("Service", "default", "a"), ObjectKey("Service", "default", "gone")])
    raw = service("a")
    batch = known.replace([known.listed(raw)])
    assert names(batch.changed) == ["a"]
    assert batch.gone == [{"kind": "Service", "metadata": {"namespace": "default", "name": "gone"}}]
    again = known.listed(raw)
    assert again.item is None and not known.replace([again]).changed


def test_objects_are_compared_by_content_and_not_by_version():
    """After a restore of etcd, or in a cluster created again, another object may have the version of a known one."""
    known = Known("Service")

    def version(number, port=80):
        raw = service("a", port)
        raw["metadata"]["resourceVersion"] = number
        return raw

    known.replace([known.listed(version("7"))])
    assert known.listed(version("8")).item is None
    other = known.listed(version("7", port=81))
    assert other.item is not None
    known.replace([other])
    # An event is compared with nothing, so the next list delivers the object once more.
    known.put(version("9"))
    assert known.listed(version("9")).item is not None


def test_backoff_grows_to_half_a_minute_and_is_reset_by_success():
    backoff = Backoff(lambda: 0.0)
    pauses = [backoff.pause() for _ in range(8)]
    assert pauses[:3] == [0.8, 1.6, 3.2] and pauses[-1] == LONGEST_PAUSE_SECONDS
    backoff.reset()
    assert backoff.pause() == 0.8
    assert 0.8 <= Backoff().pause() <= 1.6


def test_outage_counts_from_the_first_failure_to_the_next_success(setup):
    reflector = setup.follow(SERVICES)
    setup.next()
    wait_for(lambda: reflector.connected)
    assert reflector.lost_for == 0.0
    setup.down()
    wait_for(lambda: reflector.lost_for > 0.0)
    first = reflector.lost_for
    wait_for(lambda: reflector.lost_for > first + 0.5)
    setup.up()
    wait_for(lambda: reflector.connected and not reflector.error)
    assert reflector.lost_for == 0.0
