# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node that reaches nothing but the controller and the API server: libraries and account come from the controller."""

from __future__ import annotations

import pytest

from tests.apiserver.tls import write_kubeconfig

from .accounts import Accounts
from .cluster import POD, Cluster
from .node import ROOT, wait_for

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
def accounts(node, cluster):
    accounts = Accounts(cluster.certificates, cluster.server.token)
    yield accounts
    accounts.close()


@pytest.fixture(scope="module")
def variables(node, cluster, accounts):
    admin = write_kubeconfig(node.scratch / "admin", accounts.url, cluster.certificates.authority, "admin-token")
    return {
        "agent_configuration": {"mode": "nftables"},
        "agent_create_access": True,
        "agent_admin_kubeconfig": str(admin),
        "agent_api_server": cluster.url,
        "agent_libraries": "wheelhouse",
        "agent_cache_directory": str(ROOT / ".cache/libraries"),
    }


def test_agent_serves_with_libraries_and_account_from_the_controller(node, cluster, accounts, variables):
    assert node.run("curl", "--silent", "--max-time", "2", "http://192.0.2.1", check=False).returncode != 0
    assert node.run("python3", "-c", "import yaml", check=False).returncode == 1
    node.role("agent", variables)
    wait_for("the endpoint", lambda: POD in node.output("nft", "list", "ruleset"))
    assert len(accounts.writes) == 4
    kinds = sorted(item["kind"] for item in accounts.objects.values())
    assert kinds == ["ClusterRole", "ClusterRoleBinding", "Secret", "ServiceAccount"]
    kubeconfig = node.output("cat", "/etc/kubenode-proxy/kubeconfig")
    assert cluster.url in kubeconfig and cluster.server.token in kubeconfig


@pytest.mark.full
def test_second_run_changes_nothing(node, accounts, variables):
    before = node.unit("kubenode-proxy.service", "MainPID")
    again = node.role("agent", variables)
    assert again.changed_tasks == []
    assert len(accounts.writes) == 4
    assert node.unit("kubenode-proxy.service", "MainPID") == before


def test_token_is_not_shown(node, cluster, variables):
    result = node.role("agent", {**variables, "agent_state": "absent", "agent_remove_access": True}, "-vvv")
    assert cluster.server.token not in result.output


def test_account_is_removed_when_asked(accounts):
    assert accounts.objects == {}
    assert len([line for line in accounts.writes if line.startswith("DELETE")]) == 4
