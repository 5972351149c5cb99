# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands without an agent read the cluster from the first API server that answers, of those that the agent knows."""

from __future__ import annotations

import json
import socket

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ApiError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.servers import named_servers
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import write_cache
from ansible_collections.kubenode.proxy.plugins.module_utils.command import cluster_source
from ansible_collections.kubenode.proxy.plugins.module_utils.command.cluster_source import Sources, read_objects
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import ApiServerSettings
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, make_server_certificate, write_kubeconfig
from tests.lab import manifests

NAME = "kubernetes.default.svc"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    authority = make_certificates(directory).authority
    return make_server_certificate(directory, authority, ["127.0.0.1"], ["localhost", NAME])


@pytest.fixture
def server(certificates):
    store = Store()
    store.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}})
    api = ApiServer(store, certificates)
    yield api
    api.close()


@pytest.fixture
def dead():
    """Provide the URL of a port that refuses connections and that no other program can use."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"https://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def sources(server, certificates, dead, tmp_path):
    """Provide sources whose kubeconfig names a server that is dead."""
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", dead, certificates.authority, server.token)
    return Sources(str(kubeconfig), ApiServerSettings(), str(tmp_path / "cache.gz"))


def port_of(server):
    return int(server.url.rpartition(":")[2])


def cached(server):
    """Return the content of the agent's cache for a cluster whose only API server is this one."""
    item = manifests.api_servers(["192.0.2.11"], port_of(server))
    return [json.dumps(item).encode()]


def names(objects):
    return [item["metadata"]["name"] for item in objects]


def test_without_another_server_the_error_is_that_of_the_kubeconfigs(sources, dead):
    with pytest.raises(ApiError, match=f"API server {dead}: list nodes: .*refused"):
        read_objects(sources, ())


def test_a_server_of_the_configuration_is_used_and_named(sources, server, dead):
    alternatives = (("127.0.0.1", int(dead.rpartition(":")[2])), ("127.0.0.1", port_of(server)))
    objects, warnings = read_objects(sources._replace(settings=ApiServerSettings(alternatives)), ())
    assert names(objects) == ["node-a"]
    # The second one is the kubeconfig's again.
    (warning,) = warnings
    assert warning.startswith(f"API server {dead}: check: ") and warning.endswith(f"; using API server {server.url}")


def test_a_server_that_refuses_the_credentials_is_not_left(sources, server, certificates, dead, tmp_path):
    alternatives = (("127.0.0.1", port_of(server)),)
    wrong = write_kubeconfig(tmp_path / "wrong", dead, certificates.authority, "wrong-token")
    with pytest.raises(ApiError, match="the credentials are not accepted"):
        read_objects(Sources(str(wrong), ApiServerSettings(alternatives), sources.cache), ())


def test_all_failures_are_named(sources, dead):
    with pytest.raises(ApiError, match=rf"{dead}: check: .*; API server https://localhost:1: check: "):
        read_objects(sources._replace(settings=ApiServerSettings((("localhost", 1),))), ())


@pytest.mark.parametrize("discover", [True, False])
def test_servers_that_the_cluster_has_named_to_the_agent_are_used(sources, server, discover, monkeypatch):
    def here(found):
        """Return the servers that the cluster names, at the address of the test: loopback endpoints are invalid."""
        return [item._replace(url=item.url.replace("192.0.2.11", "127.0.0.1")) for item in named_servers(found)]

    monkeypatch.setattr(cluster_source.servers, "named_servers", here)
    write_cache(sources.cache, cached(server), {"Service", "EndpointSlice"})
    chosen = sources._replace(settings=ApiServerSettings((), discover))
    if discover:
        assert names(read_objects(chosen, ())[0]) == ["node-a"]
    else:
        with pytest.raises(ApiError, match="refused"):
            read_objects(chosen, ())
