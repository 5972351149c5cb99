# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which API server the agent uses: one move per failure, random among those that have not failed recently."""

from __future__ import annotations

import io
import threading

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.api.servers import ApiServers
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.access.servers import (
    CLUSTER,
    CONFIGURATION,
    KUBECONFIG,
    SERVER_NAME,
    Candidate,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.api.connection import ApiConnection, resolve
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState

OWN = Candidate("", KUBECONFIG)
FIRST, SECOND = "https://192.0.2.11:6443", "https://192.0.2.12:6443"


def kubernetes(*addresses, name="kubernetes", namespace="default", port=6443, ready=True):
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"namespace": namespace, "name": name, "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": "IPv6" if any(":" in address for address in addresses) else "IPv4",
        "ports": [{"name": "https", "protocol": "TCP", "port": port}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": ready}} for address in addresses],
    }


class Setup:
    def __init__(self):
        self.now = 1000.0
        self.stream = io.StringIO()
        self.offered = []
        self.servers = ApiServers(Log(self.stream), choose=self._choose, clock=lambda: self.now)
        self.servers.opened(OWN, FIRST)

    def _choose(self, candidates):
        self.offered.append([item.url for item in candidates])
        return candidates[0]

    @property
    def urls(self):
        return [item["server"] for item in self.servers.status()]

    @property
    def in_use(self):
        return [item["server"] for item in self.servers.status() if item["inUse"]]


@pytest.fixture
def setup():
    return Setup()


def test_alone_a_server_that_fails_stays_in_use(setup):
    assert not setup.servers.several
    assert not setup.servers.failed(OWN, "refused")
    assert setup.in_use == [FIRST] and setup.servers.changes == 0
    assert setup.servers.status()[0]["lastError"] == "refused"


def test_clients_that_fail_together_move_once(setup):
    setup.servers.configure([("192.0.2.12", 6443), ("192.0.2.13", 6443)], True)
    setup.servers.answered(OWN)
    assert all(setup.servers.failed(OWN, "refused") for _client in range(4))
    assert setup.in_use == [SECOND] and setup.servers.changes == 1
    assert setup.stream.getvalue().count("using another API server") == 1
    assert setup.offered == [[SECOND, "https://192.0.2.13:6443"]]


def test_servers_that_have_failed_lately_are_avoided(setup):
    setup.servers.configure([("192.0.2.12", 6443), ("192.0.2.13", 6443)], True)
    setup.servers.failed(OWN, "refused")
    setup.now += 1
    setup.servers.failed(setup.servers.current(), "refused")
    assert setup.in_use == ["https://192.0.2.13:6443"] and setup.offered[-1] == ["https://192.0.2.13:6443"]
    # All have failed: the one whose failure is the longest ago.
    setup.now += 1
    setup.servers.failed(setup.servers.current(), "refused")
    assert setup.in_use == [FIRST]
    setup.now += 100
    setup.servers.failed(setup.servers.current(), "refused")
    assert setup.offered[-1] == [SECOND, "https://192.0.2.13:6443"]


def test_an_outage_of_all_is_logged_once(setup):
    setup.servers.configure([("192.0.2.12", 6443)], True)
    setup.servers.answered(OWN)
    for _attempt in range(20):
        setup.servers.failed(setup.servers.current(), "refused")
    assert setup.stream.getvalue().count("using another API server") == 1
    setup.servers.answered(setup.servers.current())
    setup.servers.failed(setup.servers.current(), "refused")
    assert setup.stream.getvalue().count("using another API server") == 2


def test_an_answer_forgets_the_failure(setup):
    setup.servers.failed(OWN, "refused")
    setup.servers.answered(OWN)
    assert setup.servers.status()[0]["lastError"] == ""


def test_the_cluster_names_further_servers(setup):
    state = ClusterState.from_objects([kubernetes("192.0.2.11", "192.0.2.12")])
    setup.servers.learn(state)
    assert setup.urls == [FIRST, SECOND] and setup.servers.several
    assert [item["from"] for item in setup.servers.status()] == [KUBECONFIG, CLUSTER]
    # An absent slice and one without servers leave those known before.
    setup.servers.learn(ClusterState())
    setup.servers.learn(ClusterState.from_objects([kubernetes("192.0.2.11", ready=False)]))
    assert setup.urls == [FIRST, SECOND]
    setup.servers.learn(ClusterState.from_objects([kubernetes("fd00::1", port=443)]))
    assert setup.urls == [FIRST, "https://[fd00::1]:443"]
    setup.servers.configure([], False)
    assert setup.urls == [FIRST]


@pytest.mark.parametrize("more", [{"name": "kubernetes-2"}, {"namespace": "tenant"}])
def test_other_slices_name_no_servers(setup, more):
    setup.servers.learn(ClusterState.from_objects([kubernetes("192.0.2.66", **more)]))
    assert setup.urls == [FIRST]


def test_a_server_in_use_that_is_no_longer_named_is_used_until_it_fails(setup):
    setup.servers.configure([("192.0.2.12", 6443)], True)
    setup.servers.failed(OWN, "refused")
    setup.servers.configure([], True)
    assert setup.in_use == [SECOND]
    assert setup.servers.failed(setup.servers.current(), "refused")
    assert setup.in_use == [FIRST]


KUBECONFIG_TEXT = """
current-context: c
contexts: [{name: c, context: {cluster: k, user: u}}]
clusters: [{name: k, cluster: {server: "https://api.example.com", insecure-skip-tls-verify: true%s}}]
users: [{name: u, user: {token: t}}]
"""


@pytest.mark.parametrize(
    ("candidate", "more", "server", "name", "verify"),
    [
        (OWN, "", "https://api.example.com", "", False),
        (Candidate(SECOND, CONFIGURATION), "", SECOND, "", False),
        (Candidate(SECOND, CONFIGURATION), ", tls-server-name: apiserver", SECOND, "apiserver", False),
        # An address of the cluster's data must prove that it is an API server.
        (Candidate(SECOND, CLUSTER), "", SECOND, SERVER_NAME, True),
        (Candidate(SECOND, CLUSTER), ", tls-server-name: apiserver", SECOND, "apiserver", True),
    ],
)
def test_what_is_verified(tmp_path, candidate, more, server, name, verify):
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG_TEXT % more)
    access = resolve(candidate.connection(str(path)))
    assert (access.server, access.server_name, access.verify) == (server, name, verify)
    assert access.credentials.headers() == [("Authorization", "Bearer t")]


def test_without_a_kubeconfig_the_pod_decides():
    assert OWN.connection(None) == ApiConnection()


@pytest.mark.parametrize(
    "call",
    [
        lambda servers: servers.answered(OWN),
        lambda servers: servers.failed(OWN, "refused"),
        lambda servers: servers.opened(OWN, SECOND),
        lambda servers: servers.configure([], True),
        lambda servers: servers.learn(ClusterState.from_objects([kubernetes("192.0.2.11")])),
        lambda servers: servers.status(),
        lambda servers: servers.count(),
        lambda servers: servers.current(),
    ],
    ids=["answered", "failed", "opened", "configure", "learn", "status", "count", "current"],
)
def test_a_thread_waits_while_another_one_changes_the_servers(setup, call):
    thread = threading.Thread(target=call, args=(setup.servers,))
    with setup.servers._lock:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join()
