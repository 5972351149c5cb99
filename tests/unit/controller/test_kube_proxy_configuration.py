# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-proxy's configuration in the cluster, read from the test API server, and the text of its differences."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.client import ApiClient
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection
from ansible_collections.kubenode.proxy.plugins.module_utils.controller.kube_proxy_configuration import (
    ConfigMap,
    compared,
    find_configuration,
)
from tests.apiserver.daemonsets import kube_proxy_daemon_set
from tests.apiserver.server import ApiServer
from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig

PLACE = ConfigMap()
TEXT = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nclusterCIDR: 10.244.0.0/16\n"
KUBECONFIG = "apiVersion: v1\nkind: Config\n"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Provide a client, and the store of its server."""
    scratch, store = tmp_path_factory.mktemp("api"), Store()
    certificates = make_certificates(scratch / "tls")
    server = ApiServer(store, certificates)
    path = write_kubeconfig(scratch / "kubeconfig", server.url, certificates.authority, server.token)
    with contextlib.closing(server), contextlib.closing(ApiClient(ApiConnection(kubeconfig=str(path)))) as made:
        yield made, store


def put(store: Store, data: dict[str, str], name: str = "kube-proxy") -> None:
    metadata = {"namespace": "kube-system", "name": name}
    store.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def test_without_a_config_map_of_its_name_one_that_the_daemon_set_mounts_is_found(client):
    assert find_configuration(client[0], PLACE) is None
    volumes = [{"name": "lib", "hostPath": {"path": "/lib"}}, *({"configMap": {"name": name}} for name in "abc")]
    client[1].put(kube_proxy_daemon_set(volumes=volumes))
    assert find_configuration(client[0], PLACE) is None
    put(client[1], {"kubeconfig": KUBECONFIG}, "a")
    put(client[1], {"config": TEXT}, "b")
    found = find_configuration(client[0], PLACE)
    assert str(found.place) == "ConfigMap kube-system/b" and found.fields["clusterCIDR"] == "10.244.0.0/16"


@pytest.mark.parametrize("key", ["config.conf", "kube-proxy-config.yaml"])
def test_the_configuration_is_found_beside_a_kubeconfig(client, key):
    put(client[1], {"kubeconfig.conf": KUBECONFIG, key: TEXT})
    assert find_configuration(client[0], PLACE).fields["clusterCIDR"] == "10.244.0.0/16"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"kubeconfig.conf": KUBECONFIG}, "has no KubeProxyConfiguration; its entries are kubeconfig.conf"),
        ({"a": TEXT, "b": TEXT}, "has several (a, b)"),
        ({"config.conf": KUBECONFIG}, "config.conf: "),
        ({}, "its entries are empty"),
    ],
)
def test_other_contents_are_named(client, data, reason):
    put(client[1], data)
    with pytest.raises(ConfigurationError) as raised:
        find_configuration(client[0], PLACE)
    assert str(raised.value).startswith("ConfigMap kube-system/kube-proxy: ") and reason in str(raised.value)


def test_hosts_with_the_same_configuration_are_named_once():
    theirs: dict[str, Any] = {"clusterCIDR": "10.244.0.0/16", "iptables": {"masqueradeAll": True}}
    own = {f"n{number}": {} for number in range(5)}
    chosen = {"iptables": {"masqueradeAll": False}}
    first, second = compared(theirs, {**own, "other": chosen})
    text = "clusterCIDR: kube-proxy has 10.244.0.0/16, the host none"
    assert first.text(chosen=False) == (
        f"n0, n1, n2 and 2 more: iptables.masqueradeAll: kube-proxy has true, the host none; {text}"
    )
    assert (second.text(chosen=False), second.text(chosen=True)) == (
        f"other: {text}",
        "other: iptables.masqueradeAll: kube-proxy has true, the host false",
    )
    with pytest.raises(ConfigurationError, match=r"^n9: KubeProxyConfiguration: mode: "):
        compared(theirs, {"n9": {"mode": "carrier-pigeon"}})
