# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module service_proxy_info beside a running agent: what the agent does on purpose is not drift."""

from __future__ import annotations

from typing import Any, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.module_support.inspection import inspected
from tests.kernel.agent_node import AgentNode, endpoint_slice, service
from tests.kernel.backends import make_network, manifests, three_backends, write_manifests
from tests.kernel.policy_node import elements, pod, policy_node
from tests.kernel.unchanged_node import StandIn
from tests.kernel.userspace_node import userspace_node
from tests.waiting import wait_for

COLLECTIONS = ("/api/v1/services", "/api/v1/nodes", "/apis/discovery.k8s.io/v1/endpointslices")
POLICIES = ("/api/v1/pods", "/api/v1/namespaces", "/apis/networking.k8s.io/v1/networkpolicies")
CHECK = {"kubenode.proxy/check": "tcp", "kubenode.proxy/check-interval": "200ms"}
MODES = (
    "nftables",
    pytest.param("iptables", marks=pytest.mark.full),
    pytest.param("ipvs", marks=[pytest.mark.uml, pytest.mark.full]),
    pytest.param("userspace", marks=pytest.mark.full),
)


@pytest.fixture
def node(request, tmp_path) -> Iterator[AgentNode]:
    make_network()
    agent_node = userspace_node(tmp_path, getattr(request, "param", "nftables"))
    agent_node.store.put(service(1))
    agent_node.store.put(endpoint_slice(1))
    yield agent_node
    # Printed if the test fails.
    print(agent_node.log)
    agent_node.close()


def objects(node: AgentNode, *paths: str) -> Any:
    """Return what a read of the cluster returns now."""
    return [item for path in (*COLLECTIONS, *paths) for item in node.store.list(path)[0]]


def compared(node: AgentNode, cluster: Any, **options: Any) -> dict[str, Any]:
    """Return the module's result for this state of the cluster."""
    given = {
        "state_directory": str(node.scratch / "run"),
        "cluster_state": cluster,
        "config": str(node.scratch / "config.yaml"),
        "history_directory": None,
        "traffic": False,
        **options,
    }
    return inspected(StandIn(given, check=False, diff=True))


def change(node: AgentNode) -> None:
    """Change the cluster, and wait until the agent has programmed it."""
    node.store.put(endpoint_slice(1, count=5))
    wait_for(lambda: node.status()["families"]["IPv4"]["endpoints"] == 5)


@pytest.mark.parametrize("node", MODES, indirect=True)
def test_changes_that_only_the_agent_knows_are_not_drift(node):
    node.start()
    read = objects(node)
    found = compared(node, read)
    assert (found["drift"], found["newer"], found["excluded_endpoints"]) == (False, "", 0), found
    change(node)
    found = compared(node, read)
    assert not found["drift"] and found["newer"] and not found["difference"], found
    assert found["summary"] == "" and found["changes"] == [] and found["counts"]["added"] == 0, found
    assert not found["cautions"] or "given cluster state" not in " ".join(found["cautions"]), found
    found = compared(node, objects(node))
    assert (found["drift"], found["newer"]) == (False, ""), found
    # Without the agent nobody knows a newer state; in userspace mode nothing can be compared.
    node.stop()
    if node.mode != "userspace":
        found = compared(node, read)
        assert found["drift"] and not found["newer"], found


def test_an_agent_that_cannot_follow_or_has_other_settings_explains_nothing(node):
    node.start()
    settings = {**node.configuration, "nftables": {**node.configuration["nftables"], "masqueradeBit": 13}}
    given = {"config": None, "configuration": settings, "node_configuration": node.node_configuration}
    found = compared(node, objects(node), **given)
    assert found["drift"] and not found["newer"], found
    assert "the agent has other settings" in " ".join(found["cautions"]), found

    node.stop_api()
    wait_for(lambda: "watching" not in node.status()["apiServer"].values())
    node.store.put(endpoint_slice(1, count=5))
    found = compared(node, objects(node))
    assert found["drift"] and not found["newer"], found
    assert "the agent does not follow the API server" in " ".join(found["cautions"]), found


def test_changes_of_network_policies_are_not_drift(tmp_path):
    node = policy_node(tmp_path, networkPolicy={"enabled": True})
    control = tmp_path / "run" / "agent" / "agent.sock"
    control.parent.mkdir(parents=True)
    (tmp_path / "agent.sock").symlink_to(control)
    node.options = ["--control", str(control)]
    try:
        node.start()
        wait_for(lambda: node.status()["networkPolicy"].get("inForce"), 30)
        read = objects(node, *POLICIES)
        found = compared(node, read, ignore_findings=["incomplete-snapshot"])
        assert (found["drift"], found["newer"]) == (False, ""), found
        node.store.put(pod("late", "10.244.0.6", {"app": "db"}))
        wait_for(lambda: "10.244.0.6" in elements("isolated-in4"), 30)
        found = compared(node, read, ignore_findings=["incomplete-snapshot"])
        assert not found["drift"] and "olic" in found["newer"], found
    finally:
        node.close()


@pytest.mark.parametrize("node", MODES, indirect=True)
def test_endpoints_that_fail_their_checks_are_counted_and_not_drift(node):
    write_manifests(node.services, manifests(**CHECK))
    with three_backends() as backends:
        backends[2].stop()
        node.start()
        wait_for(lambda: node.status()["clusterKnown"], 30)
        wait_for(lambda: [item["passing"] for item in node.status()["checks"]].count(False) == 1, 30)
        found = compared(node, objects(node))
        assert (found["drift"], found["newer"], found["excluded_endpoints"]) == (False, "", 1), found
