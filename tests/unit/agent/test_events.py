# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Events of many agents at an API server: how many they post, under which names, and what users cannot prevent."""

from __future__ import annotations

import io
import random
import re

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.events import (
    BURST,
    MOST_NOTE_BYTES,
    POSTERS,
    SECONDS_OF_ONE,
    WARNING,
    Content,
    EventPoster,
    make_event,
    node_reference,
    service_reference,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metrics import Metrics
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.event_reasons import OTHER, Reason, Subject
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.conftest import ROOT


class Still:
    """The task of a thread that is not supervised."""

    def idle(self):
        pass

    def busy(self, seconds):
        pass


class Agent:
    """The Events of one agent; its queue is emptied by :meth:`send`."""

    def __init__(self, api, name="n1", chance=random.random):
        self.now = 0.0
        self.node = node_reference(name)
        self.stream = io.StringIO()
        self.metrics = Metrics()
        log = Log(self.stream)
        self._poster = EventPoster(
            lambda expect: ApiClient(ApiConnection(host=api.url)),
            name,
            log=log,
            limited=LimitedLog(log),
            metrics=self.metrics,
            clock=lambda: self.now,
            chance=chance,
        )

    def post(self, reason, about=None, note="a note"):
        related = self.node if about else None
        self._poster.post(Content(about or self.node, WARNING, reason, "Sync", note, related))

    def send(self):
        self._poster.close()
        self._poster.run(Still())

    def dropped(self, reason):
        return self.metrics.events_dropped.labels(reason.value)._value.get()


@pytest.fixture
def api(monkeypatch):
    for name in ("KUBECONFIG", "K8S_AUTH_KUBECONFIG", "K8S_AUTH_HOST"):
        monkeypatch.delenv(name, raising=False)
    server = ApiServer(Store(), None)
    yield server
    server.close()


def stored(api):
    return list(api.store.list("/apis/events.k8s.io/v1/events")[0])


def add_nodes(api, number):
    for index in range(number):
        api.store.put({"kind": "Node", "metadata": {"name": f"n{index}"}})


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.subject is Subject.OBJECT])
def test_what_all_agents_would_post_alike_is_posted_by_a_few_and_kept_once(api, reason):
    agents, chance = 60, random.Random(1)
    add_nodes(api, agents)
    fleet = [Agent(api, f"n{index}", chance.random) for index in range(agents)]
    for agent in fleet:
        agent.post(reason, service_reference("tenant", "web"), "metadata.annotations: is not valid")
        agent.send()
    assert 1 <= len(api.posted) <= 2 * POSTERS
    (found,) = stored(api)
    assert found["reason"] == reason.value and found["regarding"]["name"] == "web"
    # Each counts the nodes once; after that, an Event costs only what the few take.
    before = len(api.requests) + len(api.posted)
    for agent in fleet:
        agent.post(reason, service_reference("tenant", "other"))
        agent.send()
    assert len(api.requests) + len(api.posted) - before <= 4 * POSTERS < agents


def test_in_a_small_cluster_and_without_the_right_to_read_nodes_every_agent_posts(api):
    add_nodes(api, 3)
    for failing in (False, True):
        api.failing = {"/api/v1/nodes": 403} if failing else {}
        agent = Agent(api, chance=lambda: 0.999)
        agent.post(Reason.OBJECT_REFUSED, service_reference("a", f"web-{failing}".lower()))
        agent.send()
    assert len(stored(api)) == 2


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.subject is not Subject.NODE])
def test_a_flood_of_one_namespace_takes_nothing_from_others_and_from_the_node(api, reason):
    agent = Agent(api)
    for index in range(400):
        agent.post(reason, service_reference("tenant", f"x{index}"))
    agent.post(reason, service_reference("other", "web"))
    agent.post(Reason.DRIFT_REPAIRED)
    agent.send()
    found = stored(api)
    assert sum(item["metadata"]["namespace"] == "tenant" for item in found) == BURST
    assert {item["metadata"]["namespace"] for item in found} == {"tenant", "other", "default"}
    # Those about the node come first, however many others wait.
    assert api.posted[0]["reason"] == "DriftRepaired"
    assert agent.dropped(reason) == 400 - BURST
    assert len(agent.stream.getvalue().splitlines()) == 1 and "namespace=tenant" in agent.stream.getvalue()
    agent.now += 2 * SECONDS_OF_ONE
    for index in range(3):
        agent.post(reason, service_reference("tenant", f"y{index}"))
    agent.send()
    assert len(stored(api)) == len(found) + 2


def test_many_namespaces_together_are_limited_and_take_nothing_from_the_node(api):
    agent = Agent(api)
    for index in range(2000):
        agent.post(Reason.OBJECT_REFUSED, service_reference(f"tenant-{index}", "x"))
    for _index in range(400):
        agent.post(Reason.DRIFT_REPAIRED)
    agent.post(Reason.DRAIN_STARTED)
    agent.send()
    reasons = [item["reason"] for item in api.posted]
    assert reasons.count("ObjectRefused") <= 100
    assert reasons.count("DriftRepaired") == BURST and reasons.count("DrainStarted") == 1


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_name_that_a_user_took_before_does_not_keep_an_event_away(api, is_readable):
    about = service_reference("tenant", "web")
    event = make_event("h", Content(about, WARNING, Reason.OBJECT_REFUSED, "Sync", "is not valid"))
    api.store.put({**event, "note": "all is well"})
    if not is_readable:
        api.failing[f"/apis/events.k8s.io/v1/namespaces/tenant/events/{event['metadata']['name']}"] = 403
    agent = Agent(api)
    agent.post(Reason.OBJECT_REFUSED, about, "is not valid")
    agent.send()
    assert sorted(item["note"] for item in stored(api)) == ["all is well", "is not valid"]


@pytest.mark.parametrize("note", ["é" * 2000, "x" + "字" * 2000, "\ud800" * 400, "x" * 1024])
def test_a_long_note_is_cut_to_the_bytes_that_the_api_server_accepts(api, note):
    agent = Agent(api)
    agent.post(Reason.OBJECT_REFUSED, service_reference("tenant", "w" * 235 + "." + "w" * 17), note)
    agent.send()
    (found,) = stored(api)
    raw = found["note"].encode()
    assert MOST_NOTE_BYTES - 4 <= len(raw) <= MOST_NOTE_BYTES
    assert not agent.stream.getvalue()


def test_an_event_has_the_shape_that_the_api_wants():
    event = make_event("host", Content(node_reference("n1"), WARNING, Reason.STARTING, "Start", ""))
    assert event["metadata"]["namespace"] == "default"
    assert event["reportingController"] == "kube-proxy" and event["reportingInstance"] == "kube-proxy-host"


def test_every_reason_is_documented_with_its_kind():
    text = (ROOT / "docs" / "automation.md").read_text()
    rows = re.findall(r"^\| (`[A-Z].*?) \| (.*?) \|", text, re.MULTILINE)
    documented = {}
    for reasons, kinds in rows:
        names, values = re.findall("`(.*?)`", reasons), re.findall("`(.*?)`", kinds)
        documented.update(zip(names, values if len(values) == len(names) else values * len(names)))
    assert documented == {reason.value: reason.kind for reason in Reason if reason.kind != OTHER}
