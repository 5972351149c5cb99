# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node that can reach only the controller and the API server: the controller provides libraries and account."""

from __future__ import annotations

import json

import pytest

from tests.apiserver.accounts import claims_of, failure, sign
from tests.apiserver.tls import write_kubeconfig
from tests.waiting import wait_for

from .cluster import BRIDGE, POD, Cluster, endpoint_slice
from .node import ROOT

TOKEN_FILE = "/var/lib/kubenode-proxy/agent/token"
TAINT = {"key": "kubenode.proxy/not-ready", "effect": "NoSchedule"}
LIBRARIES = ("python3-yaml", "python3-prometheus-client")


@pytest.fixture(scope="module")
def node(start):
    node = start("airgap")
    node.run("ip", "route", "delete", "default")
    node.run("dpkg", "--remove", "--force-depends", *LIBRARIES)
    return node


@pytest.fixture(scope="module")
def cluster(node):
    cluster = Cluster(node.scratch, [node.name])
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def accounts(cluster):
    return cluster.server.accounts


@pytest.fixture(scope="module")
def variables(node, cluster, accounts):
    return {
        "agent_configuration": {"mode": "nftables"},
        "agent_create_access": True,
        "agent_admin_kubeconfig": str(cluster.kubeconfig),
        "agent_libraries": "wheelhouse",
        "agent_startup_taint": TAINT["key"],
        "agent_cache_directory": str(ROOT / ".cache/libraries"),
    }


def test_agent_serves_with_libraries_and_account_from_the_controller(node, cluster, accounts, variables):
    assert node.run("curl", "--silent", "--max-time", "2", "http://192.0.2.1", check=False).returncode != 0
    assert node.run("python3", "-c", "import yaml", check=False).returncode == 1
    registered = cluster.nodes()[0]
    others = list(registered["spec"].get("taints", []))
    cluster.store.put({**registered, "spec": {**registered["spec"], "taints": [*others, TAINT]}})
    node.role("agent", variables)
    assert cluster.store.list("/api/v1/nodes")[0][0]["spec"].get("taints", []) == others
    wait_for(lambda: POD in node.output("nft", "list", "ruleset"), what="the endpoint")
    assert len(accounts.writes) == 5
    kinds = sorted(item["kind"] for item in accounts.objects.values())
    assert kinds == ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount"]
    kubeconfig = node.output("cat", "/etc/kubenode-proxy/kubeconfig")
    assert cluster.url in kubeconfig and f"tokenFile: {TOKEN_FILE}" in kubeconfig
    assert node.output("stat", "-c", "%U %a", TOKEN_FILE).split() == ["kubenode-proxy", "600"]
    found = json.loads(node.output("kubenode-proxy", "token", "--output", "json"))
    assert (found["node"], found["lifetimeSeconds"], found["renewalDue"]) == (node.name, 86400, False)
    assert len(accounts.requests) == 1


@pytest.mark.full
def test_second_run_changes_nothing(node, accounts, variables):
    before = node.unit("kubenode-proxy.service", "MainPID")
    again = node.role("agent", variables)
    assert again.changed_tasks == []
    assert len(accounts.writes) == 5 and len(accounts.requests) == 1
    assert node.unit("kubenode-proxy.service", "MainPID") == before


def token(node):
    return node.output("cat", TOKEN_FILE).strip()


def test_agent_renews_its_token_at_half_its_lifetime(node, cluster, accounts, variables):
    """Renew a token that is past half its lifetime, as time would make it."""
    old = token(node)
    claims = claims_of(old)
    past = sign({**claims, "iat": claims["iat"] - 50_000, "exp": claims["exp"] - 50_000})
    node.run("sh", "-c", f"cat > {TOKEN_FILE}", text=past)
    node.run("systemctl", "restart", "kubenode-proxy.service")
    wait_for(lambda: token(node) not in (old, past), what="another token")
    renewed = claims_of(token(node))
    assert renewed["exp"] - renewed["iat"] == 86400 and renewed["kubernetes.io"] == claims["kubernetes.io"]
    assert accounts.review(token(node))
    assert node.output("stat", "-c", "%U %a", TOKEN_FILE).split() == ["kubenode-proxy", "600"]
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.3"]))
    wait_for(lambda: "10.244.1.3" in node.output("nft", "list", "ruleset"), what="a change is served")


def test_a_token_that_cannot_be_used_is_replaced_by_the_next_run(node, cluster, accounts, variables):
    """The Node was deleted and registered again; the file was restored by another user."""
    registered = cluster.nodes()[0]
    cluster.store.put({**registered, "metadata": {**registered["metadata"], "uid": "uid-of-another"}})
    invalid = token(node)
    assert accounts.review(invalid) == ""
    cluster.server.drop_watches()
    node.role("agent", variables)
    assert accounts.review(token(node))
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.5"]))
    wait_for(lambda: "10.244.1.5" in node.output("nft", "list", "ruleset"), what="a change is served")
    valid = token(node)
    node.run("chown", "root", TOKEN_FILE)
    node.role("agent", variables)
    assert token(node) != valid
    assert node.output("stat", "-c", "%U %a", TOKEN_FILE).split() == ["kubenode-proxy", "600"]
    assert node.role("agent", variables).changed_tasks == []


def test_the_reason_is_shown_if_no_token_is_issued(node, accounts, variables, monkeypatch):
    """The task's own result is hidden, since it may contain a token."""
    node.run("mv", TOKEN_FILE, f"{TOKEN_FILE}.old")
    refusal = failure(403, "Forbidden", "no tokens for this account")
    monkeypatch.setattr(accounts, "_token_request", lambda path, body: refusal)
    done = node.role("agent", variables, failing=True)
    node.run("mv", f"{TOKEN_FILE}.old", TOKEN_FILE)
    assert "no tokens for this account" in " ".join(done.output.split())


def test_rotation_revokes_issued_tokens(node, cluster, accounts, variables):
    """The leaked token is refused afterwards, the agent continues with a new one, and no output contains it."""
    leaked = token(node)
    assert accounts.review(leaked)
    done = node.role("agent", {**variables, "agent_rotate_access": True}, "-vvv")
    assert accounts.review(leaked) == "" and accounts.review(token(node))
    assert token(node) not in done.output
    assert "Restart" not in " ".join(done.changed_tasks)
    cluster.server.drop_watches()
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.4"]))
    wait_for(lambda: "10.244.1.4" in node.output("nft", "list", "ruleset"), what="a change is served")
    again = node.role("agent", variables)
    assert again.changed_tasks == [] and accounts.review(leaked) == ""


@pytest.mark.full
def test_shared_token_is_rotated_as_well(node, accounts, variables):
    shared = {**variables, "agent_access_token": "shared"}
    node.role("agent", shared)
    text = node.output("cat", "/etc/kubenode-proxy/kubeconfig")
    leaked = text.split("token: ")[1].split()[0]
    assert accounts.review(leaked)
    # With the formerly documented way the same token comes back.
    for path in [path for path in accounts.objects if "/secrets/" in path]:
        accounts.answer("DELETE", path, None)
    assert accounts.review(leaked) == ""
    node.role("agent", shared)
    assert accounts.review(leaked)
    node.role("agent", {**shared, "agent_rotate_access": True})
    text = node.output("cat", "/etc/kubenode-proxy/kubeconfig")
    assert accounts.review(leaked) == "" and leaked not in text
    assert accounts.review(text.split("token: ")[1].split()[0])


def test_loopback_api_server_is_refused_before_anything_is_created(node, cluster, accounts, variables):
    admin = write_kubeconfig(node.scratch / "admin", cluster.url.replace(BRIDGE, "127.0.0.1"), *cluster.admin)
    before = len(accounts.writes)
    done = node.role("agent", {**variables, "agent_admin_kubeconfig": str(admin)}, failing=True)
    assert "is a loopback address, which on each node refers to the node itself" in done.output
    assert len(accounts.writes) == before


@pytest.mark.full
def test_loopback_api_server_is_replaced_by_the_given_one(node, cluster, variables):
    admin = write_kubeconfig(node.scratch / "admin", cluster.url.replace(BRIDGE, "127.0.0.1"), *cluster.admin)
    node.role("agent", {**variables, "agent_admin_kubeconfig": str(admin), "agent_api_server": cluster.url})
    assert cluster.url in node.output("cat", "/etc/kubenode-proxy/kubeconfig")


def test_token_is_not_shown(node, cluster, variables):
    """At removal; see also :func:`test_rotation_revokes_issued_tokens`."""
    result = node.role("agent", {**variables, "agent_state": "absent", "agent_remove_access": True}, "-vvv")
    assert cluster.server.token not in result.output


def test_account_is_removed_on_request(accounts):
    assert accounts.objects == {}
