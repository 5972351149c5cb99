# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The API that the lab serves: selectors, watch events, paths, and requests over a connection."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.conformance.wirelab.api_selectors import fields_match, labels_match
from tests.conformance.wirelab.apiserver import ApiServer, select, watch_event
from tests.conformance.wirelab.store import Event, Store

NOT_OURS = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless"


def service(name, namespace="default", labels=None, port=80):
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {"ports": [{"port": port}]},
    }


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        (None, True),
        ("", True),
        ("app", True),
        ("!app", False),
        ("app=web", True),
        ("app==web", True),
        ("app=db", False),
        ("app!=db", True),
        ("other!=db", True),
        ("app in (db, web)", True),
        ("app notin (db,web)", False),
        ("other notin (db)", True),
        ("other in (db)", False),
        ("app in (db, web),tier=front", True),
        ("app=web,tier=back", False),
        (NOT_OURS, True),
    ],
)
def test_label_selectors(selector, matches):
    assert labels_match(selector, {"app": "web", "tier": "front"}) is matches


def test_a_label_with_an_empty_value_is_there():
    assert not labels_match(NOT_OURS, {"service.kubernetes.io/headless": ""})


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        (None, True),
        ("metadata.name=a", True),
        ("metadata.name==b", False),
        ("metadata.name!=b,metadata.namespace=default", True),
        ("spec.nothing.below=", True),
        ("spec.clusterIP!=None", True),
        ("metadata.name=a,metadata.name=b", False),
    ],
)
def test_field_selectors(selector, matches):
    assert fields_match(selector, service("a")) is matches


def test_paths_name_resources():
    everything = select("/apis/discovery.k8s.io/v1/endpointslices", {})
    assert everything is not None
    assert (everything.kind, everything.namespace, everything.name) == ("EndpointSlice", None, None)
    one = select("/api/v1/namespaces/default/services/a", {})
    assert one is not None
    assert (one.kind, one.namespace, one.name) == ("Service", "default", "a")
    assert select("/api/v1/nodes/node1", {}) is not None
    assert select("/api/v1/namespaces/default/nodes", {}) is None
    assert select("/api/v1/pods", {}) is None


@pytest.mark.parametrize(
    ("what", "before", "after", "told"),
    [
        ("ADDED", None, "web", "ADDED"),
        ("ADDED", None, "db", None),
        ("MODIFIED", "web", "web", "MODIFIED"),
        ("MODIFIED", "db", "web", "ADDED"),
        ("MODIFIED", "web", "db", "DELETED"),
        ("MODIFIED", "db", "db", None),
        ("DELETED", "web", "web", "DELETED"),
        ("DELETED", "db", "db", None),
    ],
)
def test_watches_see_objects_come_into_a_selection_and_leave_it(what, before, after, told):
    selection = select("/api/v1/services", {"labelSelector": "app=web"})
    assert selection is not None
    old = service("a", labels={"app": before}) if before else None
    assert watch_event(selection, Event(7, what, service("a", labels={"app": after}), old)) == told


def test_a_snapshot_becomes_the_events_that_lead_to_it():
    async def run():
        store = Store()
        store.load([service("a"), service("b")])
        start = store.resource_version
        changed = store.next_change()
        store.load([service("b", port=81), service("c")])
        assert changed.is_set()
        assert not store.next_change().is_set()
        return [(event.what, event.item["metadata"]["name"]) for event in store.events_since(start)]

    assert asyncio.run(run()) == [("DELETED", "a"), ("MODIFIED", "b"), ("ADDED", "c")]


def test_an_unchanged_snapshot_makes_no_events():
    async def run():
        store = Store()
        store.load([service("a")])
        start = store.resource_version
        store.load([service("a")])
        return list(store.events_since(start))

    assert asyncio.run(run()) == []


class LocalNamespace:
    """Stands for a network namespace: sockets of this process."""

    def __init__(self) -> None:
        self.made = None

    def socket(self, family, kind, protocol=0):
        import socket

        self.made = socket.socket(family, kind, protocol)
        self.made.setblocking(False)
        return self.made


async def started():
    api, namespace = ApiServer(), LocalNamespace()
    api.start(namespace, 0)
    reader, writer = await asyncio.open_connection(*namespace.made.getsockname())
    return api, reader, writer


async def response(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length"))
    return int(head.split(" ")[1]), json.loads(await reader.readexactly(length))


async def chunk(reader):
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size)
    await reader.readline()
    return json.loads(data) if data else None


def test_lists_objects_and_refusals_over_one_connection():
    async def run():
        api, reader, writer = await started()
        api.store.load([service("a"), service("b", "other")])
        answers = []
        for request in (
            "GET /api/v1/services",
            "GET /api/v1/namespaces/other/services",
            "GET /api/v1/namespaces/default/services/missing",
            "GET /api/v1/pods",
            "DELETE /api/v1/namespaces/default/services/a",
        ):
            writer.write(f"{request} HTTP/1.1\r\nHost: lab\r\n\r\n".encode())
            answers.append(await response(reader))
        writer.close()
        api.close()
        return answers

    listed, inside, missing, unknown, refused = asyncio.run(run())
    assert listed[0] == 200
    assert listed[1]["kind"] == "ServiceList"
    assert [item["metadata"]["name"] for item in listed[1]["items"]] == ["a", "b"]
    assert listed[1]["metadata"]["resourceVersion"] == "1002"
    assert [item["metadata"]["name"] for item in inside[1]["items"]] == ["b"]
    assert (missing[0], missing[1]["reason"]) == (404, "NotFound")
    assert unknown[0] == 404
    assert (refused[0], refused[1]["reason"]) == (405, "MethodNotAllowed")


def test_a_watch_lists_first_and_then_follows_until_its_time_is_over():
    async def run():
        api, reader, writer = await started()
        api.store.load([service("a")])
        target = "/api/v1/services?watch=true&sendInitialEvents=true&timeoutSeconds=0.3"
        writer.write(f"GET {target} HTTP/1.1\r\nHost: lab\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        events = [await chunk(reader), await chunk(reader)]
        api.store.load([service("a", port=81)])
        events += [await chunk(reader), await chunk(reader)]
        writer.close()
        api.close()
        return events

    added, bookmark, modified, end = asyncio.run(run())
    assert added["type"] == "ADDED"
    assert bookmark["type"] == "BOOKMARK"
    assert bookmark["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert (modified["type"], modified["object"]["spec"]["ports"]) == ("MODIFIED", [{"port": 81}])
    assert end is None
