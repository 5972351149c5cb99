# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A pod that is new on the node is isolated at once, however many pods its policies classify differently."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import CLASS

PODS, PORTION = 50, 10
OWN, DNS = packed("10.244.1.1"), packed("10.244.3.1")
NAMED = {"to": [{"podSelector": {"matchLabels": {"app": "web"}}}], "ports": [{"port": "http"}]}
WIDE = {"to": [{"podSelector": {"matchLabels": {"app": "web"}}}], "ports": [{"port": 8080}]}
BY_NUMBER = {"to": [{"podSelector": {"matchLabels": {"app": "dns"}}}], "ports": [{"port": 53, "protocol": "UDP"}]}


def pod(name, address, node="node2", **labels):
    ports = [{"name": "http", "containerPort": 8080}] if name.startswith("web") else []
    return {
        "kind": "Pod",
        "metadata": {"namespace": "shop", "name": name, "labels": labels},
        "spec": {"nodeName": node, "containers": [{"ports": ports}]},
        "status": {"podIPs": [{"ip": address}]},
    }


def policy(name, selected, *rules):
    spec = {"podSelector": {"matchLabels": {"app": selected}}, "policyTypes": ["Egress"], "egress": list(rules)}
    return {"kind": "NetworkPolicy", "metadata": {"namespace": "shop", "name": name}, "spec": spec}


NEW, EARLIER = pod("new", "10.244.1.1", "node1", app="job"), pod("earlier", "10.244.1.2", "node1", app="tool")
CLUSTER = [
    {"kind": "Namespace", "metadata": {"name": "shop"}},
    pod("dns", "10.244.3.1", app="dns"),
    *(pod(f"web{number}", f"10.244.2.{number}", app="web") for number in range(1, PODS + 1)),
    # Its rules are in use before the new pod comes.
    EARLIER,
    policy("tool", "tool", BY_NUMBER),
]


class Node:
    """The policies of a node, object by object."""

    def __init__(self, *objects):
        self.state = ClusterState.from_objects([*CLUSTER, *objects])
        self.policy = NodePolicy("node1", self.state.policy, cluster_policies=True, portion=PORTION)
        self.state.policy.pop_changes()

    def change(self, *objects, delete=()):
        for item in objects:
            self.state.upsert(item)
        for item in delete:
            self.state.delete(item)
        self.policy.table.pop_journal()
        self.policy.update(self.state.policy.pop_changes())

    def allowed(self, port=8080, own=OWN):
        """Return the pods to which a pod may connect."""
        judge = self.policy.judge()
        return sum(judge.allows(own, packed(f"10.244.2.{number}"), 6, port) for number in range(1, PODS + 1))

    def finish(self):
        """Return how many pods the new pod may reach after each further step."""
        found = []
        while self.policy.pending:
            self.policy.proceed()
            found.append(self.allowed())
        fresh = NodePolicy("node1", self.state.policy, cluster_policies=True)
        assert self.policy.table.rows == fresh.table.rows
        return found


@pytest.mark.parametrize("rule", [NAMED, WIDE])
def test_a_new_pod_is_isolated_before_all_of_its_peers_are_known(rule):
    node = Node(policy("job", "job", rule, BY_NUMBER))
    node.change(NEW)
    assert node.policy.pending
    journal = node.policy.table.journal
    assert not [row for row in journal if row[0] == CLASS], "peers are classified later"
    judge = node.policy.judge()
    assert judge.is_policed(OWN) and not judge.allows(OWN, packed("192.0.2.1"), 6, 443)
    assert judge.allows(OWN, DNS, 17, 53), "grants to classes that exist are there at once"
    assert node.allowed() == 0
    assert node.finish() == [10, 20, 30, 40, 50]
    node.change(delete=[NEW])
    assert node.policy.pending and not node.policy.judge().is_policed(OWN)
    assert node.finish() == [50] * 5, "an address without a policy may connect to all"


def test_a_pod_that_was_there_before_loses_nothing_in_between():
    """Only new pods may wait for grants; a policy that selects another pod as well waits for none."""
    node = Node(policy("job", "job", NAMED))
    node.change(NEW)
    assert node.policy.pending
    node.change(policy("also", "tool", NAMED))
    assert not node.policy.pending and node.allowed() == node.allowed(own=packed("10.244.1.2")) == PODS
    node = Node(policy("job", "job", NAMED))
    node.change({**EARLIER, "metadata": {**EARLIER["metadata"], "labels": {"app": "job"}}}, NEW)
    assert not node.policy.pending and node.allowed(own=packed("10.244.1.2")) == PODS


def test_what_may_deny_does_not_come_later():
    denied = {"name": "no", "action": "Deny", "to": [{"pods": {"podSelector": {"matchLabels": {"app": "web"}}}}]}
    subject = {"pods": {"podSelector": {"matchLabels": {"app": "job"}}}}
    spec = {"tier": "Admin", "priority": 1, "subject": subject, "egress": [denied]}
    node = Node({"kind": "ClusterNetworkPolicy", "metadata": {"name": "no"}, "spec": spec})
    node.change(NEW)
    assert not node.policy.pending and node.allowed() == 0


def test_pods_that_change_while_others_wait():
    node = Node(policy("job", "job", NAMED))
    node.change(NEW)
    node.policy.proceed()
    gone = [CLUSTER[2 + number] for number in range(5)]
    node.change(pod("web30", "10.244.2.30", app="other"), pod("web51", "10.244.2.51", app="web"), delete=gone)
    assert node.policy.pending
    assert node.finish()[-1] == PODS - 6


def test_a_pod_that_returns_before_its_peers_are_forgotten():
    """The classes must be those of a node on which it always was, with the same numbers."""
    node = Node(policy("job", "job", WIDE, NAMED))
    node.change(NEW)
    node.policy.proceed()
    node.change(delete=[NEW])
    node.change(NEW)
    assert node.finish()[-1] == PODS
