# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The API client against a TLS server that answers as kube-apiserver does."""

from __future__ import annotations

import json
import socket
import threading
import urllib.parse

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError, ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient, list_objects
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.errors import ApiStatusError, Expired
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import (
    ENDPOINT_SLICES,
    NODES,
    SERVICE_CIDRS,
    SERVICES,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.apiserver.wire import Answer


def service(name, labels=None, cluster_ip="10.96.0.1"):
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": name, "labels": labels or {}},
        "spec": {"clusterIP": cluster_ip, "ports": [{"port": 80}]},
    }


def endpoint_slice(name, owner, labels=None):
    labels = {"kubernetes.io/service-name": owner, **(labels or {})}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"namespace": "shop", "name": name, "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}}],
    }


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server(certificates):
    api = ApiServer(Store(), certificates, bookmark_seconds=0.2)
    yield api
    api.close()


@pytest.fixture
def connection(server, certificates, tmp_path):
    return ApiConnection(
        kubeconfig=str(write_kubeconfig(tmp_path / "kubeconfig", server.url, certificates.authority, server.token))
    )


@pytest.fixture
def client(connection):
    opened = ApiClient(connection, timeout=5.0, sleep=lambda seconds: None)
    yield opened
    opened.close()


def test_all_kinds_are_listed_with_the_selectors_of_a_proxy(server, connection):
    server.store.put(service("web"))
    server.store.put(service("of-another-proxy", {"service.kubernetes.io/service-proxy-name": "other"}))
    server.store.put(service("headless", cluster_ip="None"))
    server.store.put(endpoint_slice("web-1", "web"))
    server.store.put(endpoint_slice("headless-1", "headless", {"service.kubernetes.io/headless": ""}))
    server.store.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}})
    objects = list_objects(connection)
    assert sorted((item["kind"], item["metadata"]["name"]) for item in objects) == [
        ("EndpointSlice", "web-1"),
        ("Node", "node-a"),
        ("Service", "web"),
    ]
    state = ClusterState.from_objects(objects)
    assert not state.refusals and len(state.slices) == 1
    assert any("limit=500" in path for path in server.requests)


def test_pages_are_joined(server, client):
    for number in range(1203):
        server.store.put(service(f"web-{number:04d}"))
    result = client.list(SERVICES)
    assert [item["metadata"]["name"] for item in result.items] == [f"web-{number:04d}" for number in range(1203)]
    assert {item["kind"] for item in result.items} == {"Service"}
    assert result.resource_version == str(server.store.resource_version)
    assert len(server.requests) == 3


def test_a_list_whose_pages_expire_starts_again(server, client):
    for number in range(600):
        server.store.put(service(f"web-{number:04d}"))
    original = server.store.list
    calls = []

    def compact_before_the_second_page(path, at=None):
        calls.append(at)
        if len(calls) == 2:
            server.store.put(service("late"))
            server.store.compact()
        return original(path, at)

    server.store.list = compact_before_the_second_page
    result = client.list(SERVICES)
    assert len(result.items) == 601
    assert len(server.requests) == 4


def test_one_object_and_a_field_selector(server, client):
    server.store.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}})
    server.store.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-b"}})
    assert client.get(NODES, "node-a")["metadata"]["name"] == "node-a"
    found = client.list(NODES, field_selector="metadata.name=node-b").items
    assert [item["metadata"]["name"] for item in found] == ["node-b"]
    with pytest.raises(ApiStatusError) as caught:
        client.get(NODES, "node-c")
    assert caught.value.code == 404


def test_a_watch_delivers_changes_and_bookmarks(server, client):
    start = client.list(SERVICES).resource_version
    server.store.put(service("web"))
    server.store.put(service("web", {"service.kubernetes.io/service-proxy-name": "other"}))
    events = client.watch(SERVICES, start, timeout_seconds=5)
    first, second = next(events), next(events)
    assert (first.type, first.object["metadata"]["name"]) == ("ADDED", "web")
    assert second.type == "DELETED"
    bookmark = next(events)
    assert bookmark.type == "BOOKMARK" and bookmark.resource_version == str(server.store.resource_version)
    events.close()


@pytest.mark.parametrize("opts_out", [True, False])
def test_a_server_that_can_leaves_managed_fields_out_of_all_answers(server, client, opts_out):
    """KEP-5958; a server without it, older than Kubernetes 1.38, answers as ever."""
    server.opts_out = opts_out
    bare = service("web")

    def put(cluster_ip):
        metadata = {**bare["metadata"], "uid": "1", "managedFields": [{"manager": "kubectl"}]}
        return server.store.put({**bare, "metadata": metadata, "spec": {**bare["spec"], "clusterIP": cluster_ip}})

    put("10.96.0.1")
    listed = client.list(SERVICES)
    events = client.watch(SERVICES, listed.resource_version, timeout_seconds=5)
    stored = put("10.96.0.2")
    modified = next(events).object
    events.close()
    answers = [listed.items[0], modified, client.get(SERVICES, "web", "shop")]
    assert [("managedFields" in answer["metadata"]) for answer in answers] == [not opts_out] * 3
    for answer in [modified, stored]:
        answer["metadata"].pop("managedFields", None)
    assert modified == stored


def test_an_older_api_server_gets_no_request_for_what_only_later_ones_have(server, connection):
    """As of Kubernetes 1.29: no ServiceCIDRs, no selection of Services by address, no omission of managed fields."""
    server.absent.add(SERVICE_CIDRS.path)
    server.unknown_fields.add("spec.clusterIP")
    server.store.put(service("web"))
    assert [item["metadata"]["name"] for item in list_objects(connection)] == ["web"]
    asked = [urllib.parse.urlsplit(target).path for target in server.requests]
    expected = [NODES.path, SERVICES.path, SERVICES.path, ENDPOINT_SLICES.path, SERVICE_CIDRS.path, "/apis"]
    assert asked[: len(expected)] == expected and all(path.startswith("/apis/") for path in asked[len(expected) :])
    assert len(asked) <= 8 and not any("policy.networking.k8s.io" in path for path in asked)


def test_a_watch_that_the_server_ends_just_ends(server, client):
    start = client.list(SERVICES).resource_version
    threading.Timer(0.3, server.drop_watches).start()
    assert {event.type for event in client.watch(SERVICES, start, timeout_seconds=30)} <= {"BOOKMARK"}


def test_a_watch_from_a_compacted_version_has_expired(server, client):
    server.store.put(service("web"))
    server.store.put(service("web-2"))
    server.store.compact()
    with pytest.raises(Expired, match="watch services"):
        list(client.watch(SERVICES, "1", timeout_seconds=2))


def test_a_silent_watch_counts_as_dead(server, client):
    server.bookmark_seconds = 60.0
    start = client.list(ENDPOINT_SLICES).resource_version
    with pytest.raises(ApiError, match="timed out while waiting for the answer"):
        list(client.watch(ENDPOINT_SLICES, start, timeout_seconds=30, read_timeout=0.3))


def test_bad_credentials_and_missing_rights_give_different_errors(server, connection):
    with pytest.raises(ApiError, match=r"list nodes: the credentials are not accepted \(401 Unauthorized\)"):
        list_objects(connection._replace(api_key="wrong"))
    anonymous = ApiConnection(host=server.url, validate_certs=False)
    with pytest.raises(ApiError, match=r"list nodes: not allowed \(403\)"):
        list_objects(anonymous)


def test_host_and_token_need_no_kubeconfig(server, certificates):
    server.store.put(service("web"))
    connection = ApiConnection(host=server.url + "/", api_key=server.token, ca_cert=str(certificates.authority))
    assert len(list_objects(connection)) == 1


def test_a_certificate_of_an_unknown_authority_is_a_tls_error(server):
    with pytest.raises(ApiError, match=r"list nodes: TLS: .*certificate verify failed") as caught:
        list_objects(ApiConnection(host=server.url, api_key=server.token))
    assert "\n" not in str(caught.value)


def test_an_unreachable_server_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = f"https://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ApiError, match=rf"{host}: list nodes: cannot be reached: .*refused"):
            list_objects(ApiConnection(host=host))


def test_a_proxy_that_cannot_be_reached_is_named(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
        with pytest.raises(ApiError, match=rf"cannot be reached: .*refused \(through the proxy {proxy}\)"):
            list_objects(ApiConnection(host="https://192.0.2.1"))


def test_a_server_that_does_not_answer_times_out():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ApiError, match="timed out"):
            list_objects(ApiConnection(host=f"https://127.0.0.1:{silent.getsockname()[1]}"), timeout=0.3)


def test_a_server_that_hangs_up_is_an_error(server, connection):
    server.down = True
    with pytest.raises(ApiError, match="list nodes: the connection broke"):
        list_objects(connection)


def test_a_request_to_a_busy_server_is_retried_and_then_fails(server, client):
    server.failing["/api/v1/services"] = 503
    with pytest.raises(ApiStatusError, match="the server answered 503: an injected failure"):
        client.list(SERVICES)
    assert len(server.requests) == 3


def test_a_cluster_without_service_cidrs_has_none(server, connection):
    server.absent.add(SERVICE_CIDRS.path)
    assert list_objects(connection) == []
    server.failing[SERVICE_CIDRS.path] = 500
    with pytest.raises(ApiError, match="list servicecidrs: the server answered 500"):
        list_objects(connection)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not valid YAML"),
        ("", "kubeconfig"),
        ("[1, 2]", "kubeconfig"),
        (json.dumps({"clusters": 3, "contexts": [], "users": []}), "kubeconfig"),
        (json.dumps({"current-context": "x", "clusters": [], "contexts": [], "users": []}), "kubeconfig"),
    ],
)
def test_bad_kubeconfigs_are_named(tmp_path, content, reason):
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        list_objects(ApiConnection(kubeconfig=str(path)))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match=rf"{missing}: the kubeconfig does not exist"):
        list_objects(ApiConnection(kubeconfig=missing))
    with pytest.raises(ConfigurationError, match=rf"{missing}: the file cannot be read"):
        list_objects(ApiConnection(host="https://127.0.0.1:1", ca_cert=missing))


def test_every_request_is_observed(server, connection):
    seen = []
    client = ApiClient(connection, timeout=5.0, observe=lambda *item: seen.append(item))
    server.store.put(service("web"))
    found = client.list(SERVICES)
    with pytest.raises(ApiStatusError):
        client.get(NODES, "none")
    next(client.watch(SERVICES, found.resource_version, timeout_seconds=5))
    host = server.url.partition("//")[2]
    server.close()
    with pytest.raises(ApiError):
        client.list(NODES)
    client.close()
    assert [item[:3] for item in seen] == [
        ("GET", host, "200"),
        ("GET", host, "404"),
        ("GET", host, "200"),
        ("GET", host, "<error>"),
    ]
    assert seen[2][3] is None and all(0.0 <= item[3] < 10.0 for item in seen if item is not seen[2])


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (ApiError("refused"), True),
        (ApiStatusError("broken", 500), True),
        (ApiStatusError("overloaded", 503), True),
        (ApiStatusError("gateway", 504), True),
        (ApiStatusError("too many requests", 429), False),
        (ApiStatusError("not allowed", 403), False),
        (Expired("too old", 410), False),
        (ConfigurationError("no file"), False),
    ],
)
def test_errors_that_another_server_may_not_have_are_reported(connection, error, elsewhere):
    reported = []
    client = ApiClient(connection, failed=lambda reason: not reported.append(reason))
    assert client.report(error) is elsewhere
    assert reported == ([str(error)] if elsewhere else [])


@pytest.mark.parametrize("status", [200, 401, 403, 404, 500, 503])
def test_a_server_is_ready_unless_its_status_is_500_or_higher(server, client, status):
    server.wrong = lambda path: answer_with(status) if path == "/readyz" else None
    if status < 500:
        client.ready()
    else:
        with pytest.raises(ApiStatusError, match=f"check: the server answered {status}"):
            client.ready()


def answer_with(status):
    return Answer(f"HTTP/1.1 {status} Status\r\nContent-Length: 2\r\n\r\nok".encode())
