# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An agent whose API server is suddenly that of another cluster, of an empty one, or refuses its credentials.

What is programmed stays, the status and the log name the reason, and the agent follows its own cluster again.
"""

from __future__ import annotations

import json
from typing import Iterator

import pytest

from tests.apiserver.store import Store
from tests.apiserver.tls import make_certificates, write_kubeconfig
from tests.kernel.agent_node import HastyNode, cluster_ip, endpoint_ip, endpoint_slice, node_object, service
from tests.lab import manifests
from tests.lab.manifests import Object
from tests.waiting import wait_for

OWN, OTHER = "2024-01-01T00:00:00Z", "2026-01-01T00:00:00Z"
ACCEPTED = ("--ignore", "other-cluster")


def api_service(created: str) -> Object:
    """Return the Service of the API servers of a cluster that was created at this time."""
    ports = [manifests.port(443, name="https")]
    return manifests.service("kubernetes", "10.96.0.1", ports, metadata={"creationTimestamp": created})


def cluster(created: str, *numbers: int) -> list[Object]:
    """Return the objects of a cluster with these Services; without a time it has no Service of the API servers."""
    found = [node_object(), *map(service, numbers), *map(endpoint_slice, numbers)]
    return [*found, api_service(created), manifests.api_servers(["192.0.2.1"], 6443)] if created else found


def fill(store: Store, items: list[Object]) -> Store:
    for item in items:
        store.put(item)
    return store


@pytest.fixture
def node(tmp_path) -> Iterator[HastyNode]:
    agent_node = HastyNode(tmp_path, "nftables")
    yield agent_node
    agent_node.close()


def serves(node: HastyNode, number: int) -> bool:
    return f"{cluster_ip(number)} ." in node.kernel_text("") and endpoint_ip(number, 0) in node.kernel_text("")


def errors(node: HastyNode) -> str:
    return " ".join(node.status().get("apiServer", {}).values())


def move(node: HastyNode, store: Store) -> None:
    """Let the address of the API server lead to another cluster."""
    node.stop_api()
    node.store = store
    node.start_api()


OTHERS = {
    "another cluster": cluster(OTHER, 1, 7),
    "an empty cluster": cluster(OTHER),
    "nothing": [],
}


@pytest.mark.parametrize(
    ("other", "restart"),
    [
        ("another cluster", False),
        ("an empty cluster", True),
        *(
            pytest.param(other, restart, marks=pytest.mark.full)
            for other, restart in (
                ("another cluster", True),
                ("an empty cluster", False),
                ("nothing", False),
                ("nothing", True),
            )
        ),
    ],
)
def test_another_cluster_removes_nothing(node, other, restart):
    own = fill(node.store, cluster(OWN, 1, 2, 3))
    node.start()
    before = node.kernel_text("")
    if restart:
        node.stop()
    move(node, fill(Store(), OTHERS[other]))
    if restart:
        node.start()
    wait_for(lambda: errors(node).count("another cluster") >= 3, 30.0, 0.05)
    assert node.kernel_text("") == before
    assert "another cluster" in node.log
    assert node.status()["lastError"] == ""
    # Its own cluster is followed again without a restart.
    move(node, own)
    node.store.put(service(4))
    node.store.put(endpoint_slice(4))
    wait_for(lambda: serves(node, 4), 60.0, 0.1)
    wait_for(lambda: "another cluster" not in errors(node), 60.0, 0.1)
    assert serves(node, 1)


def test_what_a_run_has_programmed_is_of_its_cluster_and_what_the_agent_has_of_its_own(node):
    """The record of what is programmed says whose it is: neither replaces Services of another cluster unasked."""
    fill(node.store, cluster(OWN, 1, 2, 3))
    assert node.converge().returncode == 0
    before = node.kernel_text("")
    move(node, fill(Store(), cluster(OTHER, 1, 7)))
    node.start(wait=False)
    wait_for(lambda: "another cluster" in errors(node), 30.0, 0.05)
    assert node.kernel_text("") == before
    # Nothing is in sync yet, so load balancers go elsewhere.
    assert json.loads(node.fetch("/healthz", node.health_port))["nodeEligible"] is False
    node.stop()
    refused = node.converge()
    assert refused.returncode and "[other-cluster]" in refused.stderr
    assert node.kernel_text("") == before
    node.options = [*ACCEPTED]
    node.start()
    wait_for(lambda: serves(node, 7) and not serves(node, 2), 30.0, 0.05)
    assert json.loads(node.fetch("/healthz", node.health_port))["nodeEligible"] is True
    node.stop()
    assert node.converge().returncode == 0
    move(node, fill(Store(), cluster(OWN, 1)))
    assert node.converge().returncode
    assert node.converge(*ACCEPTED).returncode == 0
    assert not serves(node, 7)


def test_a_cluster_that_was_made_again_is_accepted_on_request(node):
    fill(node.store, cluster(OWN, 1, 2, 3))
    node.start()
    node.stop()
    move(node, fill(Store(), cluster(OTHER, 7)))
    node.options = [*ACCEPTED]
    node.start()
    wait_for(lambda: serves(node, 7) and not serves(node, 1), 30.0, 0.05)


@pytest.mark.parametrize("kind", ["Service", pytest.param("EndpointSlice", marks=pytest.mark.full)])
def test_a_list_that_shares_nothing_with_what_is_known_is_refused(node, kind):
    """Without the Service of the API servers one cluster differs from another only in what they hold."""
    fill(node.store, cluster("", 1, 2, 3))
    node.start()
    before = node.kernel_text("")
    other = cluster("", 1, 2, 3) if kind == "EndpointSlice" else cluster("")
    move(node, fill(Store(), [item for item in other if item["kind"] != kind]))
    wait_for(lambda: "another cluster" in errors(node), 30.0, 0.05)
    assert node.kernel_text("") == before


# In make test, unit tests of reflectors cover credentials.
@pytest.mark.full
def test_a_revoked_token_and_another_authority_leave_everything_in_place(node, tmp_path):
    fill(node.store, cluster(OWN, 1, 2, 3))
    node.start()
    before = node.kernel_text("")
    node.stop_api()
    node.certificates = make_certificates(tmp_path / "rotated")
    node.start_api()
    wait_for(lambda: "certificate" in errors(node), 30.0, 0.05)
    assert node.kernel_text("") == before
    write_kubeconfig(node.kubeconfig, f"https://127.0.0.1:{node.port}", node.certificates.authority, "revoked")
    wait_for(lambda: "credentials are not accepted" in errors(node), 60.0, 0.05)
    assert node.kernel_text("") == before
    node.stop()
    node.start()
    wait_for(lambda: "credentials are not accepted" in errors(node), 30.0, 0.05)
    assert node.kernel_text("") == before and "credentials are not accepted" in node.log
    write_kubeconfig(node.kubeconfig, f"https://127.0.0.1:{node.port}", node.certificates.authority, "test-token")
    node.store.put(service(4))
    node.store.put(endpoint_slice(4))
    wait_for(lambda: serves(node, 4), 60.0, 0.1)
