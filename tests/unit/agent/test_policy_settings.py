# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings of network policies in the agent: what they wait for, and the ranges of unknown pods."""

from __future__ import annotations

from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import policy, settings
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.policy import policy_findings
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from tests.unit.agent.policy_bench import (
    KINDS,
    a_pod,
    cluster_objects,
    fail,
    follower,
    known_cluster,
    node1,
    turn,
    with_policies,
)


def test_the_ranges_of_unknown_pods_are_those_that_the_node_gets(kernel, monkeypatch):
    monkeypatch.setattr(settings, "policy_findings", policy_findings)
    view = ClusterView()
    node = node1()
    for item in cluster_objects():
        if item["kind"] != "Node":
            view.state.upsert(item)
    view.listed |= KINDS
    sync = follower(kernel, view, unknown_pods="deny")

    def ranges() -> list[Any]:
        return [key for key in kernel.entries if key[:2] == ("element", "pod-ranges4")]

    sync.sync(())
    assert not kernel.entries, "the Node is needed"
    view.state.upsert({**node, "spec": {}})
    view.listed.add("Node")
    sync.sync(())
    assert kernel.entries and not ranges(), "policies are enforced, although the Node has no ranges yet"
    view.state.upsert(node)
    sync.sync(())
    assert len(ranges()) == 1 and ("element", "known4", bytes((10, 244, 1, 12))) in kernel.entries
    view.state.upsert({**node, "spec": {"podCIDRs": ["10.99.0.0/24"]}})
    sync.sync(())
    assert kernel.entries and not ranges(), "pods of the node have other addresses"


def test_addresses_of_unknown_pods_are_denied_while_the_node_is_registered_again(kernel, monkeypatch):
    monkeypatch.setattr(settings, "policy_findings", policy_findings)
    view = known_cluster("Node")
    sync = follower(kernel, view, unknown_pods="deny")
    sync.sync(())
    before = dict(kernel.entries)
    assert any(key[:2] == ("element", "pod-ranges4") for key in before)
    node = node1()
    for without in (lambda: view.state.delete(node), lambda: view.state.upsert({**node, "spec": {}})):
        without()
        sync.sync(())
        assert kernel.entries == before and kernel.observed == 1
    view.state.upsert(node)
    sync.sync(())
    assert kernel.entries == before and kernel.observed == 1
    sync.configure(with_policies(enabled=True), "node1")
    sync.sync(())
    assert not any(key[:2] == ("element", "pod-ranges4") for key in kernel.entries)


def test_new_settings_wait_for_the_objects_that_they_need_and_the_previous_ones_remain(kernel, monkeypatch):
    kernel.fileno = lambda: 77
    view = known_cluster()
    sync = follower(kernel, view)
    assert sync.filenos() == [] and not sync.status()["inForce"]
    sync.sync(())
    assert sync.filenos() == [77] and sync.status()["inForce"]
    sync.configure(with_policies(enabled=True, cluster_policies=True), "node1")
    before = dict(kernel.entries)
    # A change by another program is noticed, and its descriptor is read, so that the loop does not spin.
    kernel.entries.clear()
    kernel.notified = True
    sync.sync(())
    assert not kernel.notified and kernel.entries == before
    assert "previous settings" in sync.status()["error"]
    view.listed |= {"ClusterNetworkPolicy", "AdminNetworkPolicy", "BaselineAdminNetworkPolicy"}
    sync.sync(())
    assert sync.status()["inForce"] and not sync.status()["error"]


def test_what_both_settings_need_is_followed_while_one_waits(kernel):
    """Without it, policies would not follow the cluster, and descriptors that nothing reads would wake the loop."""
    view = known_cluster("ClusterNetworkPolicy", "AdminNetworkPolicy", "BaselineAdminNetworkPolicy")
    sync = follower(kernel, view, cluster_policies=True)
    sync.sync(())
    assert sync.in_force
    both = sync.resources
    sync.configure(with_policies(enabled=True, unknown_pods="deny"), "node1")
    assert set(sync.resources) == set(both)
    view.forget("ClusterNetworkPolicy")
    assert sync.filenos() == []


def test_the_ranges_of_unknown_pods_are_kept_after_a_defect(kernel, monkeypatch):
    view = known_cluster("Node")
    now = [0.0]
    timers = Timers(lambda: now[0])
    sync = follower(kernel, view, timers, unknown_pods="deny")
    sync.sync(())
    node = node1()
    for name in ("node1", "node2"):
        view.state.delete({**node, "metadata": {**node["metadata"], "name": name}})
    view.state.delete(a_pod())
    with monkeypatch.context() as patched:
        patched.setattr(NodePolicy, "update", fail)
        sync.sync(())
    now[0] += policy.RETRY_SECONDS
    turn(sync, timers)
    assert sync.in_force and [key for key in kernel.entries if key[:2] == ("element", "pod-ranges4")]
