# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The event source agent_events as ansible-rulebook runs it, against the tests' API server; and the rulebooks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import runpy
import subprocess
import sys

import jinja2
import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.events import (
    NORMAL,
    WARNING,
    Content,
    make_event,
    node_reference,
    service_reference,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.agent_events import (
    KINDS,
    described,
    is_where_agents_post,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.border import harmless
from ansible_collections.kubenode.proxy.plugins.module_utils.event_reasons import Reason, Subject
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.border.forms import ACTION, LITERALS, RARE, TEMPLATES
from tests.conftest import ROOT
from tests.lab.manifests import node

EDA = ROOT / "extensions" / "eda"
SOURCE = EDA / "plugins" / "event_source" / "agent_events.py"
SECONDS = 30.0


def event(reason, regarding=None, note="a note", kind=WARNING, **more):
    """Return an Event as the agent of worker-1 posts it."""
    content = Content(regarding or node_reference("worker-1"), kind, Reason.STARTING, "A", note)
    found = make_event("host-1", content)
    return {**found, "reason": reason, **more}


def reasons(events):
    return [item["agent_event"]["reason"] for item in events]


class Rulebook:
    """The source as ansible-rulebook runs it: the file alone, its main() as a task, and the queue."""

    def __init__(self, api, size=0, **options):
        self.queue = asyncio.Queue(size)
        module = runpy.run_path(str(SOURCE))
        self.task = asyncio.ensure_future(module["main"](self.queue, {"host": api.url, "api_timeout": 5.0, **options}))

    async def take(self, number):
        """Return the next events; an error of the source is raised here."""
        found = []
        while len(found) < number:
            getter = asyncio.ensure_future(self.queue.get())
            done, _pending = await asyncio.wait(
                {getter, self.task}, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            assert done, f"only {reasons(found)}"
            if self.task in done:
                self.task.result()
            found.append(await getter)
        return found

    async def end(self):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(self.task, SECONDS)


@pytest.fixture
def api(monkeypatch):
    """Provide an API server with one Node and without any Event, and no connection in the environment."""
    for name in ("K8S_AUTH_KUBECONFIG", "KUBECONFIG", "K8S_AUTH_CONTEXT", "K8S_AUTH_HOST"):
        monkeypatch.delenv(name, raising=False)
    server = ApiServer(Store(), None)
    server.store.put(node("worker-1", "192.0.2.11", "10.1.1.0/24"))
    yield server
    server.close()


def run(api, steps, **options):
    """Run the source while ``steps``, a coroutine function, uses it.

    Steps that wait for a source which has ended fail after some seconds.
    """

    async def both():
        rulebook = Rulebook(api, **options)
        try:
            return await asyncio.wait_for(steps(rulebook), 3 * SECONDS)
        finally:
            await rulebook.end()

    return asyncio.run(both())


async def watching(api):
    """Wait until the source watches."""
    await requested(api, "watch=true")


async def requested(api, part):
    """Wait until the source has requested a path with this part."""
    for _attempt in range(int(SECONDS / 0.02)):
        if any(part in path for path in api.requests):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"nothing with {part} was requested")


def test_new_events_of_agents_are_emitted_once(api):
    api.store.put(event("DriftRepaired", note="before"))

    async def steps(rulebook):
        await watching(api)
        other = {**event("Starting"), "reportingController": "scheduler"}
        for item in (other, event("DriftRepaired", note="after"), event("ModeChanged")):
            api.store.put(item)
        return await rulebook.take(2)

    repaired, changed = (item["agent_event"] for item in run(api, steps))
    assert (repaired["kind"], repaired["note"], repaired["node"]) == ("repair", "after", "worker-1")
    assert changed["kind"] == "mode_changed"
    assert any("fieldSelector=reportingController%3Dkube-proxy" in path for path in api.requests)


def test_existing_events_are_emitted_on_request_and_kinds_select(api):
    for reason in ("DriftRepaired", "EndpointFailing", "Starting"):
        api.store.put(event(reason))

    async def steps(rulebook):
        return await rulebook.take(2)

    found = run(api, steps, replay=True, kinds=["repair", "check_failed"])
    assert reasons(found) == ["DriftRepaired", "EndpointFailing"]


def test_a_series_is_emitted_when_its_count_rises(api):
    first = event("DriftRepaired")

    async def steps(rulebook):
        await watching(api)
        api.store.put(first)
        api.store.put({**first, "note": "the same count"})
        api.store.put({**first, "series": {"count": 5, "lastObservedTime": "2026-11-23T00:00:00.000000Z"}})
        return await rulebook.take(2)

    once, again = (item["agent_event"] for item in run(api, steps))
    assert (once["count"], again["count"], again["last_seen"]) == (1, 5, "2026-11-23T00:00:00.000000Z")


def test_nothing_is_lost_or_repeated_after_outages_and_a_forgotten_version(api):
    async def steps(rulebook):
        await watching(api)
        api.store.put(event("DriftRepaired", note="1"))
        found = await rulebook.take(1)
        api.drop_watches()
        api.store.put(event("DriftRepaired", note="2"))
        found += await rulebook.take(1)
        api.down = True
        api.drop_watches()
        api.store.put(event("DriftRepaired", note="3"))
        # The version that the source knows is gone, as after the API server's compaction.
        api.store.compact()
        await asyncio.sleep(0.1)
        api.down = False
        found += await rulebook.take(1)
        api.store.put(event("DriftRepaired", note="4"))
        return found + await rulebook.take(1)

    assert [item["agent_event"]["note"] for item in run(api, steps)] == ["1", "2", "3", "4"]


def test_the_reader_waits_for_a_full_queue(api):
    async def steps(rulebook):
        await watching(api)
        for number in range(20):
            api.store.put(event("DriftRepaired", note=str(number)))
        while not rulebook.queue.full():
            await asyncio.sleep(0.02)
        return await rulebook.take(20)

    assert [item["agent_event"]["note"] for item in run(api, steps, size=1)] == [str(number) for number in range(20)]


def test_an_api_server_that_refuses_is_tried_again(api):
    api.failing["/apis/events.k8s.io/v1/events"] = 403

    async def steps(rulebook):
        while len(api.requests) < 2:
            await asyncio.sleep(0.02)
        api.failing.clear()
        await watching(api)
        api.store.put(event("DrainStarted", kind=NORMAL))
        return await rulebook.take(1)

    assert run(api, steps)[0]["agent_event"]["kind"] == "drain_started"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kind": ["drift"]}, ValueError, "unknown options: kind"),
        ({"kinds": ["drifted"]}, ValueError, "drifted"),
        ({"kinds": "drift"}, ValueError, "drift"),
        ({"kubeconfig": "/nonexistent/kubeconfig"}, Exception, "does not exist"),
    ],
)
def test_wrong_options_end_the_source(api, options, error, words):
    async def steps(rulebook):
        return await rulebook.take(1)

    with pytest.raises(error, match=words):
        run(api, steps, **options)


def test_an_event_about_a_service_names_the_node_of_its_agent():
    about = service_reference("shop", "web")
    found = described(event("EndpointFailing", about, related=node_reference("worker-1")))["agent_event"]
    assert (found["node"], found["kind"]) == ("worker-1", "check_failed")
    assert found["object"] == {"kind": "Service", "namespace": "shop", "name": "web"}
    assert described(event("EndpointFailing", about))["agent_event"]["node"] == "host-1"


@pytest.mark.parametrize("raw", [{}, {"regarding": "x", "series": [1], "metadata": None, "reason": 7, "note": {}}])
def test_an_event_with_wrong_types_is_described(raw):
    found = described(raw)["agent_event"]
    assert (found["kind"], found["count"], found["node"], found["note"]) == ("other", 1, "", "")


@pytest.mark.parametrize("text", [*TEMPLATES.values(), *RARE.values(), *LITERALS.values()])
def test_no_text_of_an_event_is_passed_on_as_it_would_be_evaluated(text):
    text = text.replace(ACTION, "6 * 7")
    found = described(event(text, {"kind": text, "name": text, "namespace": text}, note=text, action=text, type=text))
    texts = [item for item in found["agent_event"].values() if isinstance(item, str)]
    texts += found["agent_event"]["object"].values()
    assert texts.count(harmless(text)) == 7 and text not in texts


@pytest.mark.parametrize("name", ["all", "ungrouped", "ready", "localhost", "127.0.0.1", "worker-2"])
def test_an_event_names_only_a_node_that_exists_and_means_nothing_else(api, name):
    if name != "worker-2":
        api.store.put(node(name, "192.0.2.12", "10.1.2.0/24"))

    async def steps(rulebook):
        await watching(api)
        for number, claimed in enumerate((name, "worker-1")):
            api.store.put(event("DriftNotRepaired", node_reference(claimed), note=str(number)))
        return await rulebook.take(2)

    found = [item["agent_event"] for item in run(api, steps)]
    assert [item["node"] for item in found] == [item["object"]["name"] for item in found] == ["", "worker-1"]


def test_an_account_that_may_not_read_nodes_is_told_once_and_gets_no_names(api, caplog):
    api.failing["/api/v1/nodes/worker-1"] = 403

    async def steps(rulebook):
        await watching(api)
        for number in range(3):
            api.store.put(event("DriftNotRepaired", note=str(number)))
        return await rulebook.take(3)

    assert [item["agent_event"]["node"] for item in run(api, steps)] == ["", "", ""]
    assert [record.message.count("get nodes worker-1: not allowed (403)") for record in caplog.records] == [1]


def test_no_event_is_lost_while_nodes_cannot_be_read(api):
    async def steps(rulebook):
        await watching(api)
        api.failing["/api/v1/nodes/worker-1"] = 500
        for number in range(3):
            api.store.put(event("DriftNotRepaired", note=str(number)))
        await requested(api, "/api/v1/nodes/worker-1")
        api.failing.clear()
        return await rulebook.take(3)

    found = [item["agent_event"] for item in run(api, steps)]
    assert [(item["note"], item["node"]) for item in found] == [(str(number), "worker-1") for number in range(3)]


@pytest.mark.parametrize("reason", Reason)
def test_events_are_those_of_agents_only_in_their_namespaces(reason):
    node_too = {} if reason.subject is Subject.NODE else {"related": node_reference("worker-1")}
    about = service_reference("shop", "web") if node_too else node_reference("worker-1")
    posted = event(reason.value, about, **node_too)
    assert is_where_agents_post(posted)
    forged = [
        {"metadata": {**posted["metadata"], "namespace": "tenant"}},
        {"metadata": {**posted["metadata"], "namespace": "tenant"}, "regarding": node_reference("worker-1")},
        {"metadata": {}},
    ]
    if reason.subject is Subject.NODE:
        about = service_reference("tenant", "web")
        forged.append({**forged[0], "regarding": about, "related": node_reference("worker-1")})
        forged.append({**forged[0], "regarding": {**posted["regarding"], "namespace": "tenant"}})
    assert [item for item in forged if is_where_agents_post({**posted, **item})] == []


def test_a_flood_of_forged_events_costs_one_look_up_and_one_line(api, caplog):
    about = {"kind": "Service", "namespace": "tenant", "name": "web"}

    async def steps(rulebook):
        await watching(api)
        for number in range(20):
            drift = event("DriftNotRepaired")
            api.store.put({**drift, "metadata": {**drift["metadata"], "namespace": "tenant"}})
            api.store.put(event("EndpointFailing", about, note=str(number), related=node_reference("worker-1")))
        api.store.put(event("DriftNotRepaired"))
        return await rulebook.take(21)

    assert reasons(run(api, steps)) == ["EndpointFailing"] * 20 + ["DriftNotRepaired"]
    assert [path for path in api.requests if "/nodes/" in path] == ["/api/v1/nodes/worker-1"]
    assert [record.message for record in caplog.records] == [
        "Events in namespace tenant are ignored: agents post those in another one"
    ]


@pytest.mark.parametrize("name", ["worker-1,all", "*", "worker-1 worker-2", "{{ x }}", "@/etc/hosts", "!worker-1", ""])
def test_an_event_with_an_invalid_name_of_a_node_names_none(name):
    web = service_reference("shop", "web")
    assert described(event("DriftNotRepaired", {"kind": "Node", "name": name}))["agent_event"]["node"] == ""
    related = {"kind": "Node", "name": name}
    assert described(event("DriftNotRepaired", web, related=related))["agent_event"]["node"] == ""
    instance = f"kube-proxy-{name}"
    assert described(event("DriftNotRepaired", web, reportingInstance=instance))["agent_event"]["node"] == ""


def test_the_documentation_names_all_kinds():
    options = yaml.safe_load(runpy.run_path(str(SOURCE))["DOCUMENTATION"])["options"]
    assert tuple(options["kinds"]["choices"]) == KINDS
    page = (ROOT / "docs" / "automation.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []


@pytest.mark.parametrize(
    ("reason", "rules"),
    [
        ("DriftRepaired", ["Repairs of a node repeat"]),
        ("ObjectRefused", ["Agents refuse an object"]),
        # The Service is served.
        ("AnnotationIgnored", []),
    ],
)
def test_tickets_are_opened_for_what_agents_skip(reason, rules):
    (ruleset,) = yaml.safe_load((EDA / "rulebooks" / "open_ticket.yml").read_text(encoding="utf-8"))
    conditions = {rule["name"]: jinja2.Environment().compile_expression(rule["condition"]) for rule in ruleset["rules"]}
    assert [name for name, holds in conditions.items() if holds(event=described(event(reason)))] == rules


@pytest.mark.parametrize("path", sorted((EDA / "rulebooks").glob("*.yml")), ids=lambda path: path.stem)
def test_rulebooks_use_kinds_and_playbooks_that_exist(path):
    page = (ROOT / "docs" / "automation.md").read_text(encoding="utf-8")
    assert f"kubenode.proxy.{path.stem}" in page
    for ruleset in yaml.safe_load(path.read_text(encoding="utf-8")):
        options = ruleset["sources"][0]["kubenode.proxy.agent_events"]
        assert set(options["kinds"]) <= set(KINDS)
        for rule in ruleset["rules"]:
            playbook = rule["action"].get("run_playbook", {}).get("name", "kubenode.proxy.agent")
            assert (ROOT / "playbooks" / f"{playbook.rpartition('.')[2]}.yml").exists()
            # Without a limit, a playbook runs on all hosts.
            assert "run_playbook" not in rule["action"] or 'event.agent_event.node != ""' in rule["condition"]


def test_the_node_of_an_event_is_not_the_group_of_that_name(tmp_path):
    """ansible-rulebook passes the node as a limit, and the event as a variable. On a host, the role would fail."""
    inventory = {"k8s_cluster": {"hosts": {"w1": {}, "w2": {}}}, "workers": {"hosts": {"w1": {}, "w2": {}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    variables = {"ansible_eda": {"event": {"agent_event": {"node": "workers"}}}}
    argv = [sys.executable, "-m", "ansible.cli.playbook", "-i", str(tmp_path / "hosts.yml"), "--limit", "workers"]
    argv += ["-e", json.dumps(variables), str(ROOT / "playbooks" / "agent.yml")]
    environment = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
