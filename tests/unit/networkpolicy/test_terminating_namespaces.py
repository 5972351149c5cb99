# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Policies of a terminating namespace hold until it is gone, whichever of the two events arrives first."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.parsing.policy_objects import PolicyObjects
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy

POLICY = {
    "kind": "NetworkPolicy",
    "metadata": {"namespace": "shop", "name": "deny"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
}
POD = {
    "kind": "Pod",
    "metadata": {"namespace": "shop", "name": "web"},
    "spec": {"nodeName": "node1"},
    "status": {"podIPs": [{"ip": "10.244.1.11"}]},
}
NAMESPACE = {"kind": "Namespace", "metadata": {"name": "shop"}}
TERMINATING = {"kind": "Namespace", "metadata": {"name": "shop", "deletionTimestamp": "2026-01-02T00:00:00Z"}}


class Cluster:
    """A cluster with an isolated pod, and what a node makes of its changes."""

    def __init__(self):
        self.now = 100.0
        self.state = ClusterState()
        self.state.policy = PolicyObjects(lambda: self.now)
        for item in (NAMESPACE, POD, POLICY):
            self.state.upsert(item)
        self.policy = NodePolicy("node1", self.state.policy)
        self.state.policy.pop_changes()

    @property
    def isolated(self):
        self.policy.update(self.state.policy.pop_changes())
        return not self.policy.judge().allows(packed("198.51.100.1"), packed("10.244.1.11"), 6, 80)


@pytest.mark.parametrize("overtakes", [False, True])
def test_a_policy_holds_until_its_terminating_namespace_is_gone(overtakes):
    cluster = Cluster()
    if overtakes:
        cluster.state.delete(POLICY)
        cluster.now += 4.0
    cluster.state.upsert(TERMINATING)
    if not overtakes:
        cluster.state.delete(POLICY)
    assert cluster.isolated
    cluster.state.delete(NAMESPACE)
    assert not cluster.isolated and not cluster.state.policy.policies


def test_a_policy_that_was_deleted_before_its_namespace_does_not_return():
    cluster = Cluster()
    cluster.state.delete(POLICY)
    assert not cluster.isolated
    cluster.now += 6.0
    cluster.state.upsert(TERMINATING)
    assert not cluster.isolated


@pytest.mark.parametrize("again", [False, True])
def test_a_namespace_that_is_created_again_has_its_new_policies_only(again):
    cluster = Cluster()
    cluster.state.upsert(TERMINATING)
    cluster.state.delete(POLICY)
    if again:
        cluster.state.upsert(POLICY)
    cluster.state.upsert(NAMESPACE)
    assert cluster.isolated is again
    cluster.state.delete(POLICY)
    assert not cluster.isolated
