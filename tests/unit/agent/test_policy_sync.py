# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies in the agent's loop: work is done only if an object, an address or the kernel's table changed."""

from __future__ import annotations

import gc
import io
import weakref
from functools import partial
from typing import Any, List

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import (
    connection_cuts,
    policy,
    policy_table,
    settings,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies.inputs import PAUSE_FACTOR, PolicyChoices
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import (
    NetworkPolicySettings,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import policy as convergence
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.policy import policy_findings
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.connections import Connection
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.socket import finished
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.facts import InterfaceAddress
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from tests.netpol import cases
from tests.unit.agent.policy_bench import KINDS, Kernel, follower, table_in_memory, turn, with_policies


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    return table_in_memory(monkeypatch)


class Cycle:
    """An object that only a collection of garbage removes."""

    def __init__(self) -> None:
        self.itself = self


def test_the_ranges_of_unknown_pods_are_those_that_the_node_gets(kernel, monkeypatch):
    monkeypatch.setattr(settings, "policy_findings", policy_findings)
    view = ClusterView()
    objects = cases.steps("default-deny-ingress")[0].objects
    node = next(item for key, item in objects.items() if key[0] == "Node" and key[2] == "node1")
    for item in objects.values():
        if item["kind"] != "Node":
            view.state.upsert(item)
    view.listed |= KINDS
    sync = follower(kernel, view, unknown_pods="deny")

    def ranges() -> List[Any]:
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
    view = ClusterView()
    objects = cases.steps("default-deny-ingress")[0].objects
    for item in objects.values():
        view.state.upsert(item)
    view.listed |= KINDS | {"Node"}
    sync = follower(kernel, view, unknown_pods="deny")
    sync.sync(())
    before = dict(kernel.entries)
    assert any(key[:2] == ("element", "pod-ranges4") for key in before)
    node = next(item for key, item in objects.items() if key[0] == "Node" and key[2] == "node1")
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


def test_progress_is_reported_while_policies_are_computed(kernel):
    view = ClusterView()
    for item in cases.steps("default-deny-ingress")[0].objects.values():
        view.state.upsert(item)
    view.listed |= KINDS
    sync = follower(kernel, view)
    sync.sync(())
    first = kernel.progressed
    assert first >= len(view.state.policy.pods)
    view.state.policy.changes.pods.update(view.state.policy.pods)
    sync.sync(())
    assert kernel.progressed > first
    sync.close()


def test_connections_from_any_address_of_the_node_are_not_cut(monkeypatch):
    """In ipvs mode, one of the node to a cluster IP comes from that address, which is on the device of the proxy."""
    state = ClusterView().state
    for item in cases.steps("default-deny-ingress")[0].objects.values():
        state.upsert(item)
    found = convergence.node_policy(state, NetworkPolicySettings(enabled=True), "node1", ())
    own = next(row[2] for row in found.table.rows if row[:2] == ("isolated", "in") and len(row[2]) == 4)
    addresses = [InterfaceAddress("kube-ipvs0", "10.96.0.1", 32, "global")]
    denied = []

    def chosen(_family, _addresses, unwanted, _progress):
        denied.append(unwanted)
        return 0
        yield

    monkeypatch.setattr(convergence, "interface_addresses", lambda: addresses)
    monkeypatch.setattr(convergence, "cutting_connections", chosen)
    finished(convergence.cutting_denied(found))
    from_vip = Connection(bytes((10, 96, 0, 1)), own, 6, 80, b"")
    assert not denied[0](from_vip)
    addresses.clear()
    finished(convergence.cutting_denied(found))
    assert denied[-1](from_vip)


def test_what_a_new_state_replaces_is_collected(kernel):
    view = ClusterView()
    objects = cases.steps("default-deny-ingress")[0].objects
    for item in objects.values():
        view.state.upsert(item)
    view.listed |= KINDS | {"Node"}
    sync = follower(kernel, view, unknown_pods="deny")
    sync.sync(())
    # As where parts of a state refer to each other.
    replaced = Cycle()
    gc.freeze()
    ended = weakref.ref(replaced)
    del replaced
    assert ended()
    raw = next(item for key, item in objects.items() if key[0] == "Node" and key[2] == "node1")
    view.state.upsert({**raw, "spec": {"podCIDRs": ["10.99.0.0/24"]}})
    sync.sync(())
    assert ended() is None
    gc.unfreeze()


def test_nothing_is_computed_while_nothing_changes(kernel, monkeypatch):
    view = ClusterView()
    objects = cases.steps("default-deny-ingress")[0].objects
    for item in objects.values():
        view.state.upsert(item)
    view.listed |= KINDS
    sync = follower(kernel, view)
    computed: List[str] = []
    for module, name in ((policy_table, "change_of"), (policy, "annotation_warnings"), (policy_table, "plan")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *words, _name=name, _original=original, **more: computed.append(_name) or _original(*words, **more),
        )
    addresses = (("eth0", "172.18.0.2"),)
    sync.sync(addresses)
    assert kernel.entries and kernel.observed == 1 and not sync.status()["error"]
    computed.clear()
    for _round in range(3):
        sync.sync(addresses)
    assert computed == [] and kernel.observed == 1
    same = next(item for key, item in objects.items() if key[0] == "Pod")
    view.state.upsert({**same, "metadata": {**same["metadata"], "annotations": {"of": "no interest"}}})
    sync.sync(addresses)
    assert computed == []
    view.state.upsert({**same, "metadata": {**same["metadata"], "labels": {"app": "another"}}})
    sync.sync(addresses)
    assert "change_of" in computed and kernel.observed == 1
    computed.clear()
    sync.sync((*addresses, ("eth1", "10.244.1.12")))
    assert "change_of" in computed and len(kernel.applied) >= 2
    kernel.notified = True
    kernel.entries.popitem()
    sync.sync((*addresses, ("eth1", "10.244.1.12")))
    assert kernel.observed == 2 and kernel.applied[-1] == 1


def test_a_new_pod_is_isolated_first_and_nothing_is_cut_before_its_grants_are_complete(kernel, monkeypatch):
    monkeypatch.setattr(policy, "node_policy", partial(_in_portions, 1))
    judged: List[int] = []

    def cutting(*_arguments):
        judged.append(len(kernel.applied))
        return 0
        yield

    monkeypatch.setattr(connection_cuts, "cutting_denied", cutting)
    view = ClusterView()
    objects = cases.steps("named-ports-egress")[0].objects
    isolated = [item for item in objects.values() if item["kind"] == "Pod" and item["spec"].get("nodeName") == "node1"]
    for item in objects.values():
        if item not in isolated:
            view.state.upsert(item)
    view.listed |= KINDS
    now = [0.0]
    timers = Timers(lambda: now[0])
    sync = follower(kernel, view, timers, established_connections="cut")
    sync.sync(())
    timers.run()
    assert len(kernel.applied) == len(judged) == 1 and timers.delay() > 0 and sync.delay() > 0
    now[0] += connection_cuts.PAUSE_SECONDS
    for item in isolated:
        view.state.upsert(item)
    sync.sync(())
    assert len(kernel.applied) == 2 and any(key[:2] == ("element", "isolated-out4") for key in kernel.entries)
    assert len(judged) == 1, "connections that later grants allow would be cut"
    while min(timers.delay(), sync.delay()) == 0:
        turn(sync, timers)
    now[0] += connection_cuts.PAUSE_SECONDS
    timers.run()
    assert len(kernel.applied) > 3 and judged == [1, len(kernel.applied)]
    fresh = Kernel()
    follower(fresh, view, established_connections="cut").sync(())
    assert fresh.entries == kernel.entries


class _Crowded:
    """Policies of which a changed one finds no room, and a choice takes a second."""

    def __init__(self, clock: List[float]) -> None:
        self.choices, self.is_provisional, self.clock = 0, False, clock

    def update(self, _changes: Any, choose: bool) -> None:
        if choose:
            self.reconsider()
        else:
            self.is_provisional = True

    def reconsider(self) -> None:
        self.is_provisional = False
        self.choices += 1
        self.clock[0] += 1.0


def test_policies_are_chosen_again_within_seconds_but_not_all_the_time():
    now = [0.0]
    timers = Timers(lambda: now[0])
    crowded: Any = _Crowded(now)
    choices = PolicyChoices(timers, lambda: choices.reconsider_if_due(crowded, fresh=False))
    for _round in range(2):
        choices.update(crowded, None)
        assert crowded.choices == 1
    assert crowded.is_provisional and timers.delay() == PAUSE_FACTOR
    now[0] += PAUSE_FACTOR
    timers.run()
    assert crowded.choices == 2 and not crowded.is_provisional and timers.delay() == float("inf")


def _in_portions(portion: int, state: Any, _settings: Any, node_name: str, *_others: Any, **_progress: Any) -> Any:
    return NodePolicy(node_name, state.policy, portion=portion)


def test_nothing_wakes_the_loop_between_a_failure_and_the_next_attempt(kernel, monkeypatch):
    """Nothing reads the notifications until then, so that waiting for them would return at once, again and again."""
    view = ClusterView()
    for item in cases.steps("default-deny-ingress")[0].objects.values():
        view.state.upsert(item)
    view.listed |= KINDS
    now = [0.0]
    timers = Timers(lambda: now[0])
    sync = follower(kernel, view, timers)
    sync.sync(())
    assert sync.filenos() == [kernel.fileno()]

    def refuse(_change: Any) -> None:
        raise KernelError("no memory")

    kernel.notified = True
    kernel.entries.popitem()
    with monkeypatch.context() as patched:
        patched.setattr(kernel, "apply", refuse)
        sync.sync(())
    assert sync.status()["error"] == "no memory" and sync.filenos() == []
    now[0] += policy.RETRY_SECONDS
    turn(sync, timers)
    assert not sync.status()["error"] and sync.filenos() == [kernel.fileno()]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (NodePolicy, "update"),
        (NodePolicy, "reconsider"),
        (policy, "node_policy"),
        (policy_table, "change_of"),
        (policy_table, "desired_table"),
        (policy, "annotation_warnings"),
    ],
)
def test_a_defect_neither_ends_the_agent_nor_changes_the_table(kernel, monkeypatch, module, name):
    """Whichever step it is in; it is tried again with a new state, for a tenth of the time at most."""
    view = ClusterView()
    objects = cases.steps("default-deny-ingress")[0].objects
    for item in objects.values():
        view.state.upsert(item)
    view.listed |= KINDS
    now = [0.0]
    timers = Timers(lambda: now[0])
    sync = follower(kernel, view, timers)
    sync.sync(())
    view.state.delete(
        next(item for key, item in objects.items() if key[0] == "Pod" and item["spec"]["nodeName"] == "node1")
    )
    before = dict(kernel.entries)
    tries = []

    def fail(*_arguments: Any, **_named: Any) -> None:
        tries.append(now[0])
        now[0] += 1
        raise KeyError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        # These are called for a new state, or at the regular check.
        patched.setattr(NodePolicy, "too_large", {("x", "y"): "is refused"})
        if name in ("node_policy", "desired_table", "reconsider"):
            now[0] += KubeProxyConfiguration().check_period
            if name == "node_policy":
                sync._policy = None
            timers.run()
        sync.sync(())
        assert tries and "KeyError: 'a defect'" in sync.status()["error"] and not sync.status()["inForce"]
        if name not in ("annotation_warnings", "desired_table"):
            # These come after the change has been applied.
            assert kernel.entries == before
        patched.setattr(policy, "node_policy", fail)
        for _second in range(30):
            now[0] += 1
            turn(sync, timers)
        assert len(tries) == 4 and sync.filenos() == []
    now[0] += policy.RETRY_FACTOR
    turn(sync, timers)
    assert not sync.status()["error"] and sync.status()["inForce"] and kernel.entries != before


def test_new_settings_wait_for_the_objects_that_they_need_and_the_previous_ones_remain(kernel, monkeypatch):
    kernel.fileno = lambda: 77
    view = ClusterView()
    for item in cases.steps("default-deny-ingress")[0].objects.values():
        view.state.upsert(item)
    view.listed |= KINDS
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


def known_cluster(*more: str) -> ClusterView:
    view = ClusterView()
    for item in cases.steps("default-deny-ingress")[0].objects.values():
        view.state.upsert(item)
    view.listed |= KINDS | set(more)
    return view


def a_pod(view: ClusterView) -> Any:
    objects = cases.steps("default-deny-ingress")[0].objects.values()
    return next(item for item in objects if item["kind"] == "Pod" and item["spec"]["nodeName"] == "node1")


def fail(*_arguments: Any, **_named: Any) -> None:
    raise KeyError("a defect")


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
    node = next(item for key, item in cases.steps("default-deny-ingress")[0].objects.items() if key[0] == "Node")
    for name in ("node1", "node2"):
        view.state.delete({**node, "metadata": {**node["metadata"], "name": name}})
    view.state.delete(a_pod(view))
    with monkeypatch.context() as patched:
        patched.setattr(NodePolicy, "update", fail)
        sync.sync(())
    now[0] += policy.RETRY_SECONDS
    turn(sync, timers)
    assert sync.in_force and [key for key in kernel.entries if key[:2] == ("element", "pod-ranges4")]


def test_a_defect_that_shows_again_after_each_success_takes_a_tenth_of_the_time(kernel, monkeypatch):
    view = known_cluster()
    now = [0.0]
    timers = Timers(lambda: now[0])
    sync = follower(kernel, view, timers)
    sync.sync(())
    pod = a_pod(view)
    made = []

    def made_slowly(*words: Any, **more: Any) -> Any:
        made.append(now[0])
        return original(*words, **more)

    def fail_slowly(*_arguments: Any, **_named: Any) -> None:
        now[0] += 2
        raise KeyError("a defect")

    original = policy.node_policy
    monkeypatch.setattr(policy, "node_policy", made_slowly)
    monkeypatch.setattr(NodePolicy, "update", fail_slowly)
    while now[0] < 200:
        view.state.upsert({**pod, "metadata": {**pod["metadata"], "labels": {"number": str(now[0])}}})
        turn(sync, timers)
        now[0] += 1
    assert 8 <= len(made) < 12


def test_equal_settings_do_not_hide_a_defect(kernel, monkeypatch):
    view = known_cluster()
    now = [1000.0]
    sync = follower(kernel, view, Timers(lambda: now[0]))
    sync.sync(())
    elements = sync.status()["elements"]
    view.state.delete(a_pod(view))
    monkeypatch.setattr(NodePolicy, "update", fail)
    sync.sync(())
    sync.configure(with_policies(enabled=True), "node1")
    assert "a defect" in sync.status()["error"] and sync.status()["elements"] == elements
    with pytest.raises(ProxyError, match="a defect"):
        sync.explainer(())


def test_a_table_that_cannot_be_removed_is_reported(kernel, monkeypatch):
    sync = follower(kernel, known_cluster())
    sync.sync(())

    def refuse(_table: Any) -> None:
        raise KernelError("busy")

    monkeypatch.setattr(policy_table.PolicyTable, "remove", refuse)
    sync.configure(with_policies(), "node1")
    sync.sync(())
    assert sync.status()["error"] == "busy"


def test_a_repair_names_what_was_changed_and_by_whom(kernel):
    log, events = io.StringIO(), []
    sync = follower(kernel, known_cluster(), stream=log, events=events)
    sync.sync(())
    kernel.notified = True
    del kernel.entries[next(key for key in kernel.entries if key[:2] == ("element", "isolated-in4"))]
    sync.sync(())
    assert sync.status()["repaired"] == 1 and sync.status()["failures"] == 0
    line = next(line for line in log.getvalue().splitlines() if "repaired external changes" in line)
    assert 'family=NetworkPolicy noticed_by="notification of nf_tables (nft, process 7)"' in line
    assert 'removed="1 element of (isolated-in4)"' in line
    assert [(reason, note) for _about, _kind, reason, _action, note in events] == [
        ("DriftRepaired", "NetworkPolicy: removed: 1 element of (isolated-in4)")
    ]


def test_a_change_of_what_another_program_has_just_deleted_does_not_wait_for_the_retry(kernel, monkeypatch):
    view = known_cluster()
    sync = follower(kernel, view)
    sync.sync(())
    original = kernel.apply

    def refuse(_change: Any) -> None:
        monkeypatch.setattr(kernel, "apply", original)
        raise KernelError("no such table")

    kernel.entries.clear()
    kernel.notified = True
    monkeypatch.setattr(kernel, "apply", refuse)
    view.state.delete(a_pod(view))
    sync.sync(())
    assert kernel.entries and sync.in_force and sync.status()["repaired"] == len(kernel.entries)
    fresh = Kernel()
    follower(fresh, view).sync(())
    assert fresh.entries == kernel.entries


def test_a_repair_that_fails_is_reported_once_and_counted_when_it_succeeds(kernel, monkeypatch):
    now, events = [0.0], []
    timers = Timers(lambda: now[0])
    sync = follower(kernel, known_cluster(), timers, events=events)
    sync.sync(())
    kernel.entries.popitem()
    kernel.notified = True

    def refuse(_change: Any) -> None:
        raise KernelError("busy")

    with monkeypatch.context() as patched:
        patched.setattr(kernel, "apply", refuse)
        sync.sync(())
        now[0] += policy.RETRY_SECONDS
        turn(sync, timers)
    now[0] += policy.RETRY_SECONDS
    turn(sync, timers)
    assert sync.in_force and sync.status()["repaired"] == 1
    assert [event[2] for event in events] == ["DriftNotRepaired", "DriftRepaired"]


def test_policies_are_in_force_although_denied_packets_cannot_be_logged(kernel, monkeypatch):
    sync = follower(kernel, known_cluster())
    monkeypatch.setattr(sync._denied, "report", fail)
    sync.sync(())
    assert sync.in_force and kernel.entries
