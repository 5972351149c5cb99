# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the helpers for a real API server: writing to it, and the gate before it; here with the test API server."""

from __future__ import annotations

import threading

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import NODES, SERVICES
from tests.apiserver.real import Gate, RealStore
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"namespace": "default", "name": "web", "uid": "u", "resourceVersion": "17"},
    "spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]},
}
EVENT = {"kind": "Event", "metadata": {"namespace": "default", "name": "node1.1"}, "reason": "Starting"}
NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"}, "spec": {}}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server(certificates):
    server = ApiServer(Store(), certificates, token="of-an-administrator")
    yield server
    server.close()


@pytest.fixture
def admin(server, certificates, tmp_path):
    return str(write_kubeconfig(tmp_path / "admin", server.url, certificates.authority, "of-an-administrator"))


@pytest.fixture
def gate(server, admin, certificates):
    gate = Gate(admin, certificates, "of-a-node", ("127.0.0.1", 0))
    yield gate
    gate.close()


def client(gate, certificates, tmp_path, token="of-a-node"):
    url = f"https://127.0.0.1:{gate.port}"
    kubeconfig = write_kubeconfig(tmp_path / f"kubeconfig-{token}", url, certificates.authority, token)
    return ApiClient(ApiConnection(kubeconfig=str(kubeconfig)), timeout=30.0)


def names(server, path):
    return [item["metadata"]["name"] for item in server.store.list(path)[0]]


def test_objects_are_created_replaced_and_deleted(server, admin):
    store = RealStore(admin)
    store.put(SERVICE)
    first = server.store.list("/api/v1/services")[0][0]
    assert first["spec"] == SERVICE["spec"] and "uid" not in first["metadata"]
    store.put({**SERVICE, "spec": {**SERVICE["spec"], "ports": [{"port": 81}]}})
    second = server.store.list("/api/v1/services")[0][0]
    assert second["spec"]["ports"] == [{"port": 81}]
    assert int(second["metadata"]["resourceVersion"]) > int(first["metadata"]["resourceVersion"])
    store.put(NODE)
    store.delete("Service", "default", "web")
    assert names(server, "/api/v1/services") == []
    with pytest.raises(ApiError, match='services "web" not found'):
        store.delete("Service", "default", "web")
    store.close()


def test_close_deletes_every_created_object(server, admin):
    server.store.put({**NODE, "metadata": {"name": "other"}})
    store = RealStore(admin)
    store.put(SERVICE)
    store.put(NODE)
    server.store.delete("Node", "", "node1")
    store.close()
    assert names(server, "/api/v1/services") == []
    assert names(server, "/api/v1/nodes") == ["other"]


def test_gate_passes_lists_and_watches_on_until_it_is_closed(server, gate, certificates, tmp_path):
    server.store.put(SERVICE)
    reader = client(gate, certificates, tmp_path)
    listed = reader.list(SERVICES)
    assert [item["metadata"]["name"] for item in listed.items] == ["web"]
    seen, first, ended = [], threading.Event(), threading.Event()

    def watch():
        try:
            for event in reader.watch(SERVICES, listed.resource_version):
                seen.append(event.type)
                first.set()
        except ApiError:
            seen.append("broken")
        ended.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    server.store.delete("Service", "default", "web")
    assert first.wait(60)
    assert not ended.is_set()
    gate.drop_watches()
    assert ended.wait(60)
    thread.join()
    assert seen[0] == "DELETED"
    assert reader.list(NODES).items == []
    gate.close()
    with pytest.raises(ApiError):
        reader.list(NODES)


def test_gate_requires_the_token(server, gate, certificates, tmp_path):
    with pytest.raises(ApiError, match="401"):
        client(gate, certificates, tmp_path, "another").list(SERVICES)
    assert server.requests == []


def test_events_are_passed_on(server, gate, certificates, tmp_path):
    path = "/apis/events.k8s.io/v1/namespaces/default/events"
    client(gate, certificates, tmp_path).post(path, EVENT, "create an event")
    assert [event["reason"] for event in server.posted] == ["Starting"]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", "/api/v1/namespaces/default/services", 409),
        ("PUT", "/api/v1/namespaces/default/services/web", 409),
        ("PUT", "/api/v1/namespaces/default/services/other", 404),
        ("DELETE", "/api/v1/nodes/other", 404),
    ],
)
def test_test_server_refuses_as_a_real_one(server, admin, method, path, code):
    server.store.put(SERVICE)
    writer = ApiClient(ApiConnection(kubeconfig=admin))
    with pytest.raises(ApiError) as failure:
        writer.send(method, path, SERVICE, "try")
    assert failure.value.code == code
