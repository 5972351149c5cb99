# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading the Services that a node needs first: the requests, and what follows when the API server refuses them."""

from __future__ import annotations

import threading

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.first_services import FirstServices
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ListResult
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.errors import ApiStatusError


class Client:
    """A client of an API server that has one object for each of these paths."""

    def __init__(self, *paths, error=None):
        self.paths, self.error = paths, error
        self.asked = []

    def list(self, resource, field_selector, version, reduce):
        self.asked.append((resource.path, field_selector or resource.label_selector))
        assert version == "0"
        if self.error is not None:
            raise self.error
        raw = {"kind": resource.kind, "metadata": {"namespace": "n", "name": field_selector.rpartition("=")[2] or "s"}}
        found = [raw, {"kind": resource.kind, "metadata": {}}] if resource.path in self.paths else []
        return ListResult([item for item in map(reduce, found) if item is not None], "5")


def read(client, node_name="n1"):
    """Return what is delivered; nothing more is done until it is served."""
    delivered = []
    first = FirstServices(delivered.append)
    first.node_name = node_name
    thread = threading.Thread(target=first.read, args=(client,), daemon=True)
    thread.start()
    while not delivered and thread.is_alive():
        thread.join(0.01)
    assert thread.is_alive()
    first.release()
    thread.join(10)
    assert not thread.is_alive()
    (found,) = delivered
    return found


def test_each_service_is_selected_by_name_and_its_endpoints_by_their_label():
    client = Client("/api/v1/nodes", "/api/v1/namespaces/default/services")
    found = read(client)
    assert client.asked == [
        ("/api/v1/nodes", "metadata.name=n1"),
        ("/api/v1/namespaces/default/services", "metadata.name=kubernetes"),
        (
            "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
            "kubernetes.io/service-name=kubernetes,!service.kubernetes.io/headless",
        ),
        ("/api/v1/namespaces/kube-system/services", "metadata.name=kube-dns"),
        ("/api/v1/namespaces/kube-system/services", "metadata.name=coredns"),
    ]
    names = {batch.kind: [raw["metadata"]["name"] for raw in batch.changed] for batch in found.batches}
    assert names == {"Node": ["n1"], "Service": ["kubernetes"], "EndpointSlice": []}
    assert not any(batch.listed for batch in found.batches)


def test_a_host_without_a_node_asks_for_none():
    client = Client()
    read(client, node_name="")
    assert all(path != "/api/v1/nodes" for path, _selector in client.asked)


def test_a_refusal_is_left_to_the_lists():
    assert read(Client(error=ApiStatusError("not allowed", 403))).batches == ()


def test_a_server_that_does_not_answer_is_asked_again():
    delivered = []
    first = FirstServices(delivered.append)
    with pytest.raises(ApiError):
        first.read(Client(error=ApiError("cannot be reached")))
    assert delivered == []


def test_nothing_is_read_once_the_collections_are_followed():
    client = Client()
    first = FirstServices(lambda found: None)
    first.release()
    first.read(client)
    assert client.asked == []
