# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A 404 means that a collection or an object is absent only if it is an API server's, not that of a load balancer."""

from __future__ import annotations

import urllib.parse

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient, list_objects
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.errors import (
    ApiStatusError,
    concerns_server,
    unless_absent,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.resource_types import (
    CLUSTER_NETWORK_POLICIES,
    ENDPOINT_SLICES,
    NODES,
    SERVICE_CIDRS,
)
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.wire import Answer, response

NO_BACKEND = response(b"default backend - 404", "404 Not Found", {"Content-Type": "text/plain", "Connection": "close"})
POLICY = {"kind": "ClusterNetworkPolicy", "metadata": {"name": "deny-all"}, "spec": {}}
CIDR = {"kind": "ServiceCIDR", "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12"]}}
OTHERS = (CLUSTER_NETWORK_POLICIES,)


@pytest.fixture
def server():
    store = Store()
    for item in (POLICY, CIDR):
        store.put(item)
    made = ApiServer(store, None)
    yield made
    made.close()


def misdirect(server, beginning, but=()):
    """Let a load balancer answer requests for paths that begin so, except some."""

    def wrong(target):
        path = urllib.parse.urlsplit(target).path
        return Answer(NO_BACKEND) if path.startswith(beginning) and not path.startswith(but) else None

    server.wrong = wrong


def kinds(server):
    return sorted(item["kind"] for item in list_objects(ApiConnection(host=server.url), others=OTHERS))


def test_collections_that_the_server_does_not_have_are_empty(server):
    assert kinds(server) == ["ClusterNetworkPolicy", "ServiceCIDR"]
    # Its group has no other collection, so kube-apiserver answers without a Status.
    for each in CLUSTER_NETWORK_POLICIES.versions:
        assert kinds(server) == ["ClusterNetworkPolicy", "ServiceCIDR"], "each version is read"
        server.absent.add(each.path)
    assert kinds(server) == ["ServiceCIDR"]
    server.absent.add(SERVICE_CIDRS.path)
    assert kinds(server) == []


@pytest.mark.parametrize("resource", [SERVICE_CIDRS, CLUSTER_NETWORK_POLICIES])
def test_a_misdirected_list_is_an_error(server, resource):
    misdirect(server, resource.path)
    with pytest.raises(ApiStatusError, match=f"list {resource.name}: the server answered 404: default backend"):
        kinds(server)


@pytest.mark.parametrize("resource", [SERVICE_CIDRS, CLUSTER_NETWORK_POLICIES])
def test_a_misdirected_list_and_its_proof_are_an_error_of_the_server(server, resource):
    others = {each.path.rpartition("/")[0] for each in (SERVICE_CIDRS, CLUSTER_NETWORK_POLICIES, ENDPOINT_SLICES)}
    others.discard(resource.path.rpartition("/")[0])
    misdirect(server, "/apis", but=tuple(others))
    with pytest.raises(ApiError, match=r"list the API groups: .* 404: .*; an API server has groups") as caught:
        list_objects(ApiConnection(host=server.url), others=OTHERS)
    assert concerns_server(caught.value)


@pytest.mark.parametrize("code", [403, 404])
def test_a_server_that_shows_no_groups(server, code):
    server.absent.add(SERVICE_CIDRS.path)
    server.failing["/apis/networking.k8s.io/v1"] = code
    if code == 403:
        assert kinds(server) == ["ClusterNetworkPolicy"], "its own statement suffices"
    else:
        with pytest.raises(ApiStatusError, match="list servicecidrs: the server answered 404"):
            kinds(server)


def test_an_object_is_only_missing_if_an_api_server_says_so(server):
    client = ApiClient(ApiConnection(host=server.url))
    assert unless_absent(lambda: client.get(NODES, "node1")) is None
    misdirect(server, NODES.path)
    with pytest.raises(ApiStatusError, match="404: default backend"):
        unless_absent(lambda: client.get(NODES, "node1"))
    client.close()


def test_the_documents_of_the_test_server_are_those_of_an_api_server(server):
    client = ApiClient(ApiConnection(host=server.url))
    groups = client.send("GET", "/apis", None, "list")
    assert "discovery.k8s.io" in [group["name"] for group in groups["groups"]]
    found = client.send("GET", "/apis/networking.k8s.io/v1", None, "list")
    assert [item["name"] for item in found["resources"]] == ["servicecidrs", "networkpolicies"]
    with pytest.raises(ApiStatusError) as caught:
        client.send("GET", "/apis/networking.k8s.io/v9", None, "list")
    assert caught.value.says_not_found
    client.close()
