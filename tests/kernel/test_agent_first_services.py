# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""On a node that serves nothing, the API server and DNS are served before the whole cluster is listed."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
import urllib.parse
from typing import Iterator, Optional

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import read_cache
from tests.apiserver.wire import Answer
from tests.kernel.agent_node import AgentNode, Object, cluster_ip, endpoint_ip, endpoint_slice, service, service_manager
from tests.kernel.backends import ADDRESS, write_manifests
from tests.kernel.backends import manifests as static_manifests
from tests.lab import manifests
from tests.waiting import wait_for

LISTS = ("/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices")
API, DNS = ("default", "kubernetes", "10.111.7.1"), ("kube-system", "kube-dns", "10.111.8.2")
API_ENDPOINT, DNS_ENDPOINT, NEW_DNS_ENDPOINT = "10.110.1.1", "10.110.2.2", "10.110.3.3"
FROM_DISK = "starting from the cluster state kept on disk"


def first_service(place: tuple[str, str, str], endpoint: str) -> Iterator[Object]:
    """Yield one of the first Services, and its EndpointSlice with one endpoint."""
    namespace, name, address = place
    port = manifests.port(53, name="dns")
    yield manifests.service(name, address, [port], namespace=namespace)
    yield manifests.endpoint_slice(name, [manifests.endpoint(endpoint, "node2")], [port], namespace=namespace)


class Gate:
    """Withholds the answers to requests for whole collections; a hook of the API server.

    ``asked``: all paths. ``dead``: every request ends without an answer.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.dead = False
        self.opened = threading.Event()

    def __call__(self, target: str) -> Optional[Answer]:
        """Return None when the server may answer the request."""
        path = urllib.parse.urlsplit(target).path
        self.asked.append(path)
        if path in LISTS and "watch=true" not in target:
            self.opened.wait(120)
        return Answer() if self.dead else None

    def die(self) -> None:
        """End all requests without an answer, those that wait included."""
        self.dead = True
        self.opened.set()

    @property
    def first(self) -> list[str]:
        """The requests for the first Services."""
        return [path for path in self.asked if "/namespaces/" in path]


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.die()


@pytest.fixture(params=["nftables", "iptables"])
def node(request, tmp_path, gate) -> Iterator[AgentNode]:
    """Provide a cluster with the first Services and another one, whose whole lists wait for the gate."""
    agent_node = AgentNode(tmp_path, request.param, variant="" if request.param == "nftables" else "nft")
    items = (*first_service(API, API_ENDPOINT), *first_service(DNS, DNS_ENDPOINT), service(1), endpoint_slice(1))
    for item in items:
        agent_node.store.put(item)
    agent_node.api.wrong = gate
    yield agent_node
    agent_node.close()


only_nftables = pytest.mark.parametrize("node", ["nftables"], indirect=True)


def text(node: AgentNode) -> str:
    """Return the rules of the kernel, without the counters."""
    return node.kernel_text("nft")


def start_with_first_services(node: AgentNode) -> None:
    node.start(wait=False)
    wait_for(lambda: node.status().get("syncs", 0) > 0)
    assert API_ENDPOINT in text(node) and DNS_ENDPOINT in text(node)
    assert cluster_ip(1) not in text(node)


def wait_for_cluster(node: AgentNode) -> None:
    wait_for(lambda: node.status().get("clusterKnown") and endpoint_ip(1, 0) in text(node))
    wait_for(lambda: not node.differences()["changed"], 30.0, 0.5)


def test_nothing_takes_the_first_services_for_the_cluster(node, gate):
    start_with_first_services(node)
    assert node.status()["clusterKnown"] is False
    assert '"nodeEligible":false' in node.fetch("/healthz", node.health_port)
    assert '"ready":false' in node.fetch("/readyz", node.health_port) and node.status()["ready"] is False
    gate.opened.set()
    wait_for_cluster(node)
    assert API_ENDPOINT in text(node) and DNS_ENDPOINT in text(node)
    assert '"nodeEligible":true' in node.fetch("/healthz", node.health_port)
    assert '"ready":true' in node.fetch("/readyz", node.health_port) and node.status()["ready"] is True
    assert node.metric("kubenode_proxy_endpoint_loss_events_total") == 0 and node.status()["driftRepaired"] == 0
    assert node.stop() == 0
    kept = read_cache(str(node.scratch / "cache.gz"))
    services = {item["metadata"]["name"] for item in kept if item["kind"] == "Service"}
    assert services == {"kubernetes", "kube-dns", "svc-1"}


@only_nftables
def test_a_warning_about_the_node_is_logged_once_although_it_is_set_up_twice(node, gate):
    gate.opened.set()
    node.write_configuration(clusterCIDR="fd00:10:244::/56")
    node.start()
    assert node.log.count("clusterCIDR: fd00:10:244::/56 has no CIDR of the primary IP family") == 1


@only_nftables
def test_an_agent_that_is_stopped_before_the_lists_saves_no_state(node):
    start_with_first_services(node)
    assert node.stop() == 0
    assert not (node.scratch / "cache.gz").exists()
    assert API_ENDPOINT in text(node)


def test_an_agent_that_is_killed_before_the_lists_leaves_what_it_serves_to_the_next(node, gate):
    start_with_first_services(node)
    asked = gate.first
    node.stop(signal.SIGKILL)
    node.start(wait=False)
    wait_for(lambda: gate.asked.count(LISTS[0]) == 2)
    # This kernel serves something, which the whole state replaces in one step.
    assert gate.first == asked
    assert API_ENDPOINT in text(node) and DNS_ENDPOINT in text(node) and cluster_ip(1) not in text(node)
    gate.opened.set()
    wait_for_cluster(node)
    assert API_ENDPOINT in text(node) and DNS_ENDPOINT in text(node)


def test_changes_between_the_first_services_and_the_lists_are_applied(node, gate):
    start_with_first_services(node)
    for item in first_service(DNS, NEW_DNS_ENDPOINT):
        node.store.put(item)
    for item in first_service(API, API_ENDPOINT):
        node.store.delete(item["kind"], API[0], item["metadata"]["name"])
    gate.opened.set()
    wait_for_cluster(node)
    assert NEW_DNS_ENDPOINT in text(node) and DNS_ENDPOINT not in text(node)
    assert API[2] not in text(node) and API_ENDPOINT not in text(node)


def test_the_first_services_are_served_while_the_api_server_is_away(node, gate):
    start_with_first_services(node)
    gate.die()
    wait_for(lambda: any(node.status()["apiServer"].values()) and "list services" in node.log)
    assert node.status()["clusterKnown"] is False
    assert API_ENDPOINT in text(node) and DNS_ENDPOINT in text(node)
    gate.dead = False
    wait_for_cluster(node)


@only_nftables
def test_the_state_on_disk_completes_them_if_the_api_server_fails_before_the_lists(node, gate):
    """Of the first Services themselves the disk has an older state, which does not come back."""
    gate.opened.set()
    node.start()
    assert node.stop() == 0
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    gate.opened.clear()
    for item in first_service(DNS, NEW_DNS_ENDPOINT):
        node.store.put(item)
    node.start(wait=False)
    wait_for(lambda: NEW_DNS_ENDPOINT in text(node))
    assert FROM_DISK not in node.log
    gate.die()
    wait_for(lambda: endpoint_ip(1, 0) in text(node))
    assert FROM_DISK in node.log
    assert API_ENDPOINT in text(node) and NEW_DNS_ENDPOINT in text(node) and DNS_ENDPOINT not in text(node)
    gate.dead = False
    wait_for_cluster(node)


@only_nftables
def test_static_services_are_served_before_the_first_request_and_kept(node, gate):
    write_manifests(node.services, static_manifests())
    seen = []
    node.api.wrong = lambda target: seen.append(text(node)) or gate(target)
    node.start(wait=False)
    wait_for(lambda: seen)
    assert ADDRESS in seen[0] and API_ENDPOINT not in seen[0]
    wait_for(lambda: DNS_ENDPOINT in text(node))
    assert ADDRESS in text(node) and cluster_ip(1) not in text(node)
    gate.opened.set()
    wait_for_cluster(node)
    assert ADDRESS in text(node)


@only_nftables
def test_a_static_service_that_appears_while_the_api_server_is_away_is_served(node):
    node.stop_api()
    node.start(wait=False)
    wait_for(lambda: "cannot be reached" in node.log)
    assert ADDRESS not in text(node)
    write_manifests(node.services, static_manifests())
    wait_for(lambda: ADDRESS in text(node))
    assert node.status()["clusterKnown"] is False
    # Whether the host has a Node is not known.
    assert node.status()["ignored"] == []


@only_nftables
def test_a_server_that_refuses_the_first_services_is_listed(node, gate):
    gate.opened.set()
    for namespace in ("default", "kube-system"):
        node.api.failing[f"/api/v1/namespaces/{namespace}/services"] = 403
    node.start()
    wait_for_cluster(node)
    assert "API server and DNS are served" in node.log


@only_nftables
def test_the_service_manager_is_notified_of_everything_or_after_ten_seconds(node, gate):
    with service_manager(node) as sent:

        def is_ready(times: int = 1) -> bool:
            """Return whether the agent has said that it is ready, as often as it was started."""
            return sent().count("READY=1") >= times

        started = time.monotonic()
        start_with_first_services(node)
        assert not is_ready() or time.monotonic() - started >= 10.0
        wait_for(is_ready)
        assert time.monotonic() - started >= 10.0
        # The next one is ready as soon as everything is served.
        node.stop(signal.SIGKILL)
        gate.opened.set()
        node.start()
        wait_for(lambda: is_ready(2))
