# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the test API server as the conformance lab uses it: selectors, snapshots, plain HTTP."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any, Iterator, Optional

import pytest

from tests.apiserver.accept import omits_managed_fields
from tests.apiserver.failures import Failure
from tests.apiserver.selectors import field_predicate, label_predicate
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store

SERVICES = "/api/v1/services"
NOT_OURS = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless"


def service(name: str, namespace: str = "default", labels: Optional[dict[str, str]] = None, port: int = 80):
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {"ports": [{"port": port}]},
    }


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
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
    assert label_predicate(selector)(service("a", labels={"app": "web", "tier": "front"})) is matches


def test_a_label_with_an_empty_value_exists():
    assert not label_predicate(NOT_OURS)(service("a", labels={"service.kubernetes.io/headless": ""}))


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("", True),
        ("metadata.name=a", True),
        ("metadata.name==b", False),
        ("metadata.name!=b,metadata.namespace=default", True),
        ("spec.nothing.below=", True),
        ("spec.clusterIP!=None", True),
        ("metadata.name=a,metadata.name=b", False),
    ],
)
def test_field_selectors(selector, matches):
    assert field_predicate(selector)(service("a")) is matches


@pytest.mark.parametrize(
    ("header", "omits"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/json;drop=metadata.managedFields", True),
        ("application/json; q=0.9; drop=metadata.managedFields", True),
        ("application/json;drop=metadata.managedFields, application/json", True),
        ("application/json;drop=spec, application/json", False),
        ("application/vnd.kubernetes.protobuf, application/json;drop=metadata.managedFields", True),
    ],
)
def test_a_client_that_asks_for_it_gets_no_managed_fields(header, omits):
    assert omits_managed_fields(header) is omits


@pytest.mark.parametrize("header", ["application/json;drop=spec", "application/vnd.kubernetes.protobuf"])
def test_a_client_that_accepts_nothing_that_is_served_gets_406(header):
    with pytest.raises(Failure) as caught:
        omits_managed_fields(header)
    assert caught.value.code == 406


def test_a_snapshot_becomes_the_events_that_lead_to_it():
    store = Store(1000)
    store.replace_all([service("a"), service("b")])
    start = store.resource_version
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}
    store.replace_all([service("c"), node, service("b", port=81)])
    names = [(event.before or event.after or {})["metadata"]["name"] for event in store.events(SERVICES, start)]
    assert names == ["a", "c", "b"]
    (created,) = store.events("/api/v1/nodes", start)
    assert created.resource_version == start + 3, "changes are in the order of the snapshot, across kinds"
    store.replace_all([service("c"), node, service("b", port=81)])
    assert store.resource_version == start + 4, "an unchanged snapshot makes no events"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = ApiServer(Store(1000), None, listener=listener)
    yield server
    server.close()


def connection(server: ApiServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.rpartition("/")[2], timeout=10)


def test_lists_objects_and_errors_over_one_connection(server):
    server.store.replace_all([service("a"), service("b", "other")])
    client = connection(server)

    def ask(method: str, path: str, body: Optional[bytes] = None) -> Any:
        client.request(method, path, body)
        answer = client.getresponse()
        text = answer.read()
        return answer.status, text if path == "/healthz" else json.loads(text)

    status, found = ask("GET", SERVICES)
    assert (status, found["kind"], found["metadata"]["resourceVersion"]) == (200, "ServiceList", "1002")
    assert [item["metadata"]["name"] for item in found["items"]] == ["a", "b"]
    _status, found = ask("GET", "/api/v1/namespaces/other/services")
    assert [item["metadata"]["name"] for item in found["items"]] == ["b"]
    status, found = ask("GET", "/api/v1/namespaces/default/services/missing")
    assert (status, found["reason"]) == (404, "NotFound")
    assert ask("GET", "/api/v1/nonsense")[0] == 404
    assert ask("GET", "/healthz") == (200, b"ok")
    status, found = ask("POST", "/apis/events.k8s.io/v1/namespaces/default/events", b"k8s\x00protobuf")
    assert (status, found["reason"]) == (415, "UnsupportedMediaType")
    client.close()


def test_a_watch_begins_with_a_list_and_ends_after_its_timeout(server):
    server.store.replace_all([service("a")])
    client = connection(server)
    client.request("GET", f"{SERVICES}?watch=true&sendInitialEvents=true&allowWatchBookmarks=true&timeoutSeconds=0.5")
    answer = client.getresponse()
    added, bookmark = (json.loads(answer.readline()) for _event in range(2))
    server.store.replace_all([service("a", port=81)])
    modified = json.loads(answer.readline())
    assert added["type"] == "ADDED"
    assert bookmark["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert (modified["type"], modified["object"]["spec"]["ports"]) == ("MODIFIED", [{"port": 81}])
    assert answer.read() == b""
    client.close()
