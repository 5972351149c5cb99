# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rotation of the agents' access, one batch of nodes after the other: it revokes once, and no node is skipped."""

from __future__ import annotations

import pytest

from tests.waiting import wait_for

from .cluster import POD, Cluster, endpoint_slice
from .node import run_playbook

TOKEN_FILE = "/var/lib/kubenode-proxy/agent/token"
ACCOUNT = "/serviceaccounts/kubenode-proxy"


@pytest.fixture(scope="module")
def nodes(start):
    return [start("first"), start("second")]


@pytest.fixture(scope="module")
def cluster(nodes):
    cluster = Cluster(nodes[0].scratch, [node.name for node in nodes])
    yield cluster
    cluster.close()


def install(nodes, cluster, *options):
    variables = {
        "agent_configuration": {"mode": "nftables"},
        "agent_create_access": True,
        "agent_admin_kubeconfig": str(cluster.kubeconfig),
        "agent_libraries": "packages",
        "proxy_prepare_kernel": False,
    }
    return run_playbook(nodes, "kubenode.proxy.agent", variables, {}, "-e", "proxy_serial=1", *options)


def tokens(nodes):
    return [node.output("cat", TOKEN_FILE).strip() for node in nodes]


def served(nodes, address):
    for node in nodes:
        wait_for(lambda node=node: address in node.output("nft", "list", "ruleset"), what=f"{address} on {node.name}")


@pytest.mark.full
def test_tokens_are_revoked_once_and_every_batch_gets_another_one(nodes, cluster):
    accounts = cluster.server.accounts
    install(nodes, cluster)
    served(nodes, POD)
    leaked = tokens(nodes)
    assert len(set(leaked)) == 2 and all(map(accounts.review, leaked))
    (uid,) = {item["metadata"]["uid"] for path, item in accounts.objects.items() if path.endswith(ACCOUNT)}

    recaps = install(nodes, cluster, "-e", "agent_rotate_access=true")
    renewed = tokens(nodes)
    assert [accounts.review(token) for token in leaked] == ["", ""]
    # The token of the first batch would be refused if the second one had revoked again.
    assert all(map(accounts.review, renewed)) and len({*leaked, *renewed}) == 4
    (other,) = {item["metadata"]["uid"] for path, item in accounts.objects.items() if path.endswith(ACCOUNT)}
    assert other != uid
    for node, token in zip(nodes, renewed):
        assert token not in recaps[node.name].output
        assert "Restart the agent" not in recaps[node.name].changed_tasks

    cluster.server.drop_watches()
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.9"]))
    served(nodes, "10.244.1.9")
    again = install(nodes, cluster)
    assert [again[node.name].changed_tasks for node in nodes] == [[], []]
    assert tokens(nodes) == renewed
