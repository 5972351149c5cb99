# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role agent on a host outside the cluster, with systemd and without a Node object: it serves cluster IPs only."""

from __future__ import annotations

import pytest

from tests.waiting import wait_for

from .agent import UNIT, status, wait_until_converged
from .cluster import POD, Cluster


@pytest.fixture(scope="module")
def node(start):
    return start("outside")


@pytest.fixture(scope="module")
def cluster(node):
    """Provide a cluster that has the Node of another host only."""
    found = Cluster(node.scratch, ["worker-1"])
    yield found
    found.close()


def rules(node):
    return node.output("iptables-save", "-t", "nat")


def test_an_outside_host_serves_cluster_ips_only_and_leaves_nothing(node, cluster):
    variables = {
        "agent_kubeconfig": str(cluster.kubeconfig),
        "agent_configuration": {"mode": "iptables"},
        "service_proxy_outside_host": True,
    }
    node.role("agent", variables)
    wait_until_converged(node)
    assert "-d 10.96.0.10/32" in rules(node) and f"--to-destination {POD}:8080" in rules(node)
    # The Service has a node port, which the Node of a cluster would serve.
    assert "30080" not in rules(node)
    assert status(node)["healthy"] is True and "nodes" not in status(node)["apiServer"]

    node.restart()
    wait_for(lambda: "-d 10.96.0.10/32" in rules(node), 90, what="the host serves after a reboot")
    assert node.unit(UNIT, "ActiveState")["ActiveState"] == "active" and "30080" not in rules(node)

    removal = {"agent_state": "absent", "agent_remove_dataplane": True}
    node.role("agent", {**variables, **removal, "service_proxy_kubeconfig": str(cluster.kubeconfig)})
    assert "KUBE-" not in rules(node)
    assert node.output("sh", "-c", "ls -d /etc/kubenode-proxy /etc/systemd/system/kubenode* 2>/dev/null || true") == ""
