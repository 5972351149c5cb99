# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The test API server answers as a real kube-apiserver 1.36.2 did: same requests, same bodies, same events."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import urllib.parse
from pathlib import Path

import pytest

from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates

TRANSCRIPTS = Path(__file__).parents[2] / "data" / "api-transcripts"


def transcript(name):
    return json.loads((TRANSCRIPTS / f"{name}.json").read_text())


def listed(name):
    body = transcript(name)["response"]["body"]
    kind = body["kind"][: -len("List")]
    return [{"kind": kind, "apiVersion": body["apiVersion"], **item} for item in body["items"]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def api(certificates):
    store = Store()
    names = ("list-services-rv0", "list-endpointslices", "list-servicecidrs", "get-node-list-field")
    store.restore([item for name in names for item in listed(name)], 231)
    server = ApiServer(store, certificates, bookmark_seconds=60.0)
    yield server
    server.close()


def request(api, certificates, path, token="test-token"):
    url = urllib.parse.urlsplit(api.url)
    context = ssl.create_default_context(cafile=str(certificates.authority))
    connection = http.client.HTTPSConnection(url.hostname, url.port, context=context, timeout=10)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


@pytest.mark.parametrize(
    "name",
    [
        "error-not-found",
        "get-node-list-field",
        "list-endpointslices",
        "list-servicecidrs",
        "list-services-limit-page1",
        "list-services-limit-page2",
        "list-services-rv0",
        "list-services-selector",
    ],
)
def test_the_body_is_the_recorded_one(api, certificates, name):
    recorded = transcript(name)
    response = request(api, certificates, recorded["request"]["path"])
    assert response.status == recorded["response"]["status"]
    assert json.load(response) == recorded["response"]["body"]
    assert response.headers["Content-Type"] == recorded["response"]["headers"]["Content-Type"]


@pytest.mark.parametrize(("name", "token"), [("error-unauthorized", "wrong"), ("error-forbidden", "")])
def test_a_forbidden_request_gets_403(api, certificates, name, token):
    recorded = transcript(name)["response"]
    response = request(api, certificates, transcript(name)["request"]["path"], token)
    assert (response.status, json.load(response)) == (recorded["status"], recorded["body"])


def test_a_malformed_continue_token_is_a_bad_request(api, certificates):
    recorded = transcript("error-bad-continue")["response"]["body"]
    body = json.load(request(api, certificates, transcript("error-bad-continue")["request"]["path"]))
    prefix = "invalid continue token: continue key is not valid: "
    assert recorded.pop("message").startswith(prefix)
    assert body.pop("message").startswith(prefix)
    assert body == recorded


def test_an_expired_continue_token_gets_410_and_a_new_token(api, certificates):
    recorded = transcript("list-expired-continue")
    api.store.resource_version = 250
    api.store.compact()
    response = request(api, certificates, recorded["request"]["path"])
    body = json.load(response)
    assert (response.status, body) == (410, recorded["response"]["body"])
    token = body["metadata"]["continue"]
    rest = json.load(request(api, certificates, f"/api/v1/services?limit=3&continue={token}"))
    assert [item["metadata"]["name"] for item in rest["items"]] == ["shop-0", "shop-1", "shop-2"]


def test_a_future_version_is_refused_for_now(api, certificates):
    recorded = transcript("watch-future-rv")
    api.store.resource_version = 403
    response = request(api, certificates, recorded["request"]["path"])
    assert (response.status, response.headers["Retry-After"]) == (504, "1")
    assert json.load(response) == recorded["response"]["body"]


def events(response):
    return [json.loads(line) for line in response]


def test_a_watch_from_a_compacted_version_is_an_error_event(api, certificates):
    api.store.resource_version = 261
    api.store.compact()
    recorded = transcript("watch-too-old")
    lines = events(request(api, certificates, recorded["request"]["path"]))
    assert lines == [event["line"] for event in recorded["response"]["events"]]


def test_a_streaming_list_ends_with_an_annotated_bookmark(api, certificates):
    recorded = transcript("watch-sendinitialevents")
    wanted = [event["line"] for event in recorded["response"]["events"]]
    store = Store()
    store.restore([line["object"] for line in wanted if line["type"] == "ADDED"], 242)
    api.store = store
    path = recorded["request"]["path"].replace("timeoutSeconds=3", "timeoutSeconds=1")
    assert events(request(api, certificates, path)) == wanted


def test_a_watch_sees_writes_through_its_selector_as_recorded(api, certificates):
    recorded = transcript("watch-services")
    lines = [event["line"] for event in recorded["response"]["events"] if event["line"]["type"] != "BOOKMARK"]
    added, modified, hidden, shown, deleted = lines
    received = []

    def read():
        path = recorded["request"]["path"].replace("timeoutSeconds=8", "timeoutSeconds=3")
        received.extend(events(request(api, certificates, path)))

    reader = threading.Thread(target=read)
    reader.start()
    deadline = time.monotonic() + 60
    while not any("watch=true" in path for path in api.requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)

    def write(version, line, **labels):
        api.store.resource_version = version - 1
        item = json.loads(json.dumps(line["object"]))
        if labels:
            item["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": labels["proxy"]}
        api.store.put(item)

    write(233, added)
    write(235, modified)
    write(236, hidden, proxy="other")
    write(237, shown)
    api.store.delete("Service", "default", "shop-2")
    reader.join()
    kinds = [(line["type"], line["object"]["metadata"]["name"]) for line in received]
    assert kinds == [(line["type"], line["object"]["metadata"]["name"]) for line in lines]
    assert received[0] == added
    assert received[1] == modified
    assert received[2]["object"]["metadata"]["resourceVersion"] == hidden["object"]["metadata"]["resourceVersion"]
    assert "labels" not in received[2]["object"]["metadata"]
    assert "labels" not in hidden["object"]["metadata"]
    assert received[3] == shown
    assert received[4] == deleted


def test_an_idle_watch_gets_bookmarks(api, certificates):
    api.bookmark_seconds = 0.3
    path = "/api/v1/services?watch=true&allowWatchBookmarks=true&resourceVersion=231&timeoutSeconds=1"
    lines = events(request(api, certificates, path))
    assert len(lines) >= 2
    assert all(line["type"] == "BOOKMARK" for line in lines)
    recorded = next(event["line"] for event in transcript("watch-services")["response"]["events"][::-1])
    recorded["object"]["metadata"]["resourceVersion"] = "231"
    assert lines[0] == recorded


def test_dropped_watches_end_and_a_server_that_is_down_closes_connections(api, certificates):
    path = "/api/v1/services?watch=true&resourceVersion=231&timeoutSeconds=30"
    response = request(api, certificates, path)
    api.drop_watches()
    assert events(response) == []
    api.down = True
    with pytest.raises((http.client.HTTPException, OSError)):
        request(api, certificates, "/api/v1/services")
