# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rotation of the agents' access in batches of nodes, and a node that was off when its token expired."""

from __future__ import annotations

import time

import pytest

from tests.apiserver.accounts import claims_of, sign
from tests.waiting import wait_for

from .agent import UNIT, log_since, mark, status, wait_for_activity
from .cluster import POD, Cluster, endpoint_slice
from .node import run_playbook

TOKEN_FILE = "/var/lib/kubenode-proxy/agent/token"
ACCOUNT = "/serviceaccounts/kubenode-proxy"
#: An endpoint that is added while the access is refused.
LATER = "10.244.1.10"


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


@pytest.mark.full
def test_a_node_whose_token_expired_while_it_was_off_serves_and_follows_after_the_next_run(nodes, cluster):
    install(nodes, cluster)
    served(nodes, POD)
    node, accounts = nodes[0], cluster.server.accounts
    node.run("systemctl", "stop", UNIT)
    now = int(time.time())
    claims = claims_of(tokens(nodes)[0])
    expired = sign({**claims, "iat": now - 7200, "exp": now - 3600})
    node.run("sh", "-c", f"cat >{TOKEN_FILE}", text=expired)
    assert not accounts.review(expired)
    cursor = mark(node)
    node.restart()
    served([node], POD)
    wait_for_activity(node)
    wait_for(lambda: "run the role agent again" in log_since(node, cursor), what="the agent says that it has expired")
    wait_for(lambda: "Unauthorized" in str(status(node)["apiServer"]), what="the status says that access is refused")
    cluster.store.put(endpoint_slice("web", [POD, LATER]))
    assert status(node)["startedFromCache"] and LATER not in node.output("nft", "list", "ruleset")
    install(nodes, cluster)
    served([node], LATER)
    assert accounts.review(tokens(nodes)[0])
    said = log_since(node, cursor)
    assert said.count("run the role agent again") == 1 and "Traceback" not in said
