# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever a change revokes is evaluated again, and a change that revokes nothing costs nothing."""

from __future__ import annotations

import itertools

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.revocations import revoked
from tests.netpol.campaign import follow
from tests.netpol.random_clusters import OUTSIDE, PODS, Generator
from tests.unit.networkpolicy.test_gradual import Node, pod, policy

TEMPLATES = ("10.244.{}.{}", "fd00:10:244:{}::{}")
PORTS = ((6, 80), (6, 8080), (17, 53))


def flows():
    """Return connections between pods of the node and all others, in both directions."""
    for template in TEMPLATES:
        own = [packed(template.format(*place)) for place in PODS[:6]]
        outside = [each for each in OUTSIDE if (":" in each) == (":" in template)]
        peers = [packed(each) for each in (*(template.format(*place) for place in PODS), *outside)]
        for one, peer in itertools.product(own, peers):
            for port in PORTS:
                yield (one, peer, *port)
                yield (peer, one, *port)


def unnoticed(seed, tiers):
    """Return connections that a change of a random cluster revokes unnoticed, and how many it revokes at all."""
    generator = Generator(seed, cluster_policies=tiers)
    objects = generator.cluster()
    cluster = ClusterState.from_objects(objects.values())
    policies = NodePolicy("node1", cluster.policy, cluster_policies=tiers)
    cluster.policy.pop_changes()
    policies.table.pop_journal()
    missed, count = [], 0
    for _step in range(4):
        judge = policies.judge()
        allowed = [flow for flow in flows() if judge.allows(*flow)]
        before = dict(objects)
        generator.change(objects)
        follow(cluster, before, objects)
        policies.update(cluster.policy.pop_changes())
        while policies.pending:
            policies.proceed()
        judge = policies.judge()
        found = revoked(policies, policies.table.pop_journal(), tiers)
        gone = [flow for flow in allowed if not judge.allows(*flow)]
        missed += [flow for flow in gone if found.isdisjoint(flow[:2])]
        count += len(gone)
    return missed, count


@pytest.mark.parametrize("tiers", [False, True])
def test_what_random_changes_revoke_is_among_the_revoked(tiers):
    found = [unnoticed(seed, tiers) for seed in range(60)]
    assert [missed for missed, _count in found if missed] == []
    assert sum(count for _missed, count in found) > 1000


FROM_WEB = {"to": [{"podSelector": {"matchLabels": {"app": "web"}}}], "ports": [{"port": 8080}]}
JOB = pod("job", "10.244.1.1", "node1", app="job")


@pytest.mark.parametrize(
    ("change", "delete", "expected"),
    [
        pytest.param([pod("web99", "10.244.2.99", app="web")], [], set(), id="a new peer"),
        pytest.param([policy("also", "job", {})], [], set(), id="a wider policy"),
        pytest.param([], [JOB], set(), id="a deleted pod"),
        pytest.param([pod("new", "10.244.1.3", "node1", app="job")], [], {"10.244.1.3"}, id="a new pod"),
        pytest.param([pod("web1", "10.244.2.1", app="other")], [], {"10.244.2.1"}, id="a peer with other labels"),
        pytest.param([policy("job", "job")], [], {"10.244.1.1"}, id="a narrower policy"),
        pytest.param([], [policy("job", "job")], set(), id="a deleted policy"),
    ],
)
def test_only_what_is_taken_away_is_evaluated_again(change, delete, expected):
    node = Node(policy("job", "job", FROM_WEB), JOB)
    node.policy.table.pop_journal()
    for item in change:
        node.state.upsert(item)
    for item in delete:
        node.state.delete(item)
    node.policy.update(node.state.policy.pop_changes())
    while node.policy.pending:
        node.policy.proceed()
    assert revoked(node.policy, node.policy.table.pop_journal(), False) == {packed(each) for each in expected}


def test_a_cluster_policy_that_denies_what_it_accepted():
    def admin(action):
        rule = {"name": "r", "action": action, "to": [{"pods": {"podSelector": {"matchLabels": {"app": "web"}}}}]}
        subject = {"pods": {"podSelector": {"matchLabels": {"app": "job"}}}}
        spec = {"tier": "Admin", "priority": 1, "subject": subject, "egress": [rule]}
        return {"kind": "ClusterNetworkPolicy", "metadata": {"name": "admin"}, "spec": spec}

    node = Node(admin("Accept"), JOB)
    node.policy.table.pop_journal()
    node.state.upsert(admin("Deny"))
    node.policy.update(node.state.policy.pop_changes())
    assert revoked(node.policy, node.policy.table.pop_journal(), True) == {packed("10.244.1.1")}
