# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""At the memory limit, policies and the pods that they isolate are held back last."""

from __future__ import annotations

import io
import json

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.agent import Agent
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.memory import RESERVE
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.settings import AgentOptions
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.known import Batch
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.room import NoRoom, Room
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.files.cache import write_cache
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from tests.unit.agent.policy_bench import with_policies
from tests.unit.agent.source_bench import KINDS
from tests.unit.agent.source_bench import Bench as SourceBench
from tests.unit.agent.test_memory import Bench, Group, service


class Full(Room):
    """Room in which a share of the reserve is left, and nothing else."""

    def __init__(self, left=0.0):
        self.left = left

    def carries(self, more, reserve=0.0):
        return more <= 0 or reserve > self.left


def pod(name, node="node1", address="10.0.0.1"):
    item = {
        "kind": "Pod",
        "metadata": {"namespace": "team", "name": name},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": "Running"},
    }
    if address:
        item["status"]["podIPs"] = [{"ip": address}]
    return item


def policy(name, kind="NetworkPolicy"):
    metadata = {"name": name} if kind == "ClusterNetworkPolicy" else {"namespace": "team", "name": name}
    return {"kind": kind, "metadata": metadata, "spec": {"podSelector": {}}}


def namespace(name):
    return {"kind": "Namespace", "metadata": {"name": name}}


@pytest.fixture
def view():
    made = ClusterView(Full())
    made.node_name = "node1"
    return made


def held(view):
    return {(key.kind, key.name) for key in view.held_back}


def apply(view, *items, listed=False):
    for item in items:
        view.apply(Batch(item["kind"], [item], [], listed))


def test_a_new_pod_of_the_node_and_a_new_policy_isolate_although_there_is_no_room(view):
    apply(view, namespace("team"), listed=True)
    apply(view, pod("old"), listed=True)
    apply(view, pod("new", address=""), pod("other", "node2", "10.0.0.9"), service("web"))
    assert held(view) == {("Pod", "other"), ("Service", "web")}
    found = NodePolicy("node1", view.state.policy)
    view.state.policy.pop_changes()
    apply(view, pod("new", address="10.0.0.2"), policy("deny"), namespace("more"))
    found.update(view.state.policy.pop_changes())
    assert [row[2][-1] for row in sorted(found.table.rows) if row[:2] == ("isolated", "in")] == [1, 2]
    assert held(view) == {("Pod", "other"), ("Service", "web")}


def test_a_pod_that_comes_to_the_node_is_no_longer_held_back(view):
    apply(view, pod("new", "", ""))
    assert held(view) == {("Pod", "new")}
    apply(view, pod("new", address=""))
    assert not view.held_back


def test_a_host_without_a_node_reserves_nothing_for_pods_without_one(view):
    view.node_name = ""
    apply(view, pod("new", "", ""))
    assert held(view) == {("Pod", "new")}


@pytest.mark.parametrize("kind", ["NetworkPolicy", "ClusterNetworkPolicy"])
def test_policies_leave_room_for_the_pods_that_they_select(kind):
    view = ClusterView(Full(0.5))
    view.node_name = "node1"
    apply(view, policy("deny", kind), pod("new"), namespace("team"))
    assert held(view) == {(kind, "deny")}


def test_the_reserve_is_a_share_of_the_capacity_while_policies_are_enforced():
    bench = Bench()
    capacity, budget = bench.budget.capacity, bench.budget
    ordinary, half = (int(capacity * (1 - RESERVE * share)) for share in (1, 0.5))
    assert budget.carries(capacity)
    bench.budget._reserves = lambda: True
    for reserve, most in ((0.0, ordinary), (0.5, half), (1.0, capacity)):
        assert budget.carries(most, reserve) and not budget.carries(most + 1, reserve)


@pytest.mark.parametrize(
    ("kind", "share"),
    [("Pod", 1), ("Service", 1), ("NetworkPolicy", 0.5), ("ClusterNetworkPolicy", 0.5), ("Namespace", 0)],
)
def test_lists_leave_the_reserve_to_those_it_is_for(kind, share):
    bench = Bench()
    bench.budget._reserves = lambda: True
    most = int(bench.budget.capacity * (1 - RESERVE * share))
    bench.budget.admit(kind, most)
    with pytest.raises(NoRoom):
        bench.budget.admit(kind, most + 1)


def test_the_copy_on_disk_may_use_the_reserve_as_its_objects_did(tmp_path):
    path = tmp_path / "cluster.json.gz"
    write_cache(str(path), [json.dumps(service("web")).encode()], set(KINDS))
    bench = SourceBench(path)
    bench.source._room = Full()
    bench.source.start("node1", serving=False)
    assert bench.source.use_cache() and bench.source.view.node_name == "node1"
    bench.source.follow_node("node2", "node1")
    assert bench.source.view.node_name == "node2"


def test_an_agent_reserves_room_if_it_enforces_policies(tmp_path):
    path = tmp_path / "config.conf"
    path.write_text("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n")
    components = Agent(AgentOptions(configuration=str(path)), Log(io.StringIO())).components
    components.memory._group = Group(100 << 20)
    capacity = components.memory.capacity
    assert components.memory.carries(capacity)
    components.policy.configure(with_policies(enabled=True), "node1")
    assert not components.memory.carries(capacity) and components.memory.carries(capacity, reserve=1.0)
