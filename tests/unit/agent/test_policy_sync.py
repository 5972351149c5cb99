# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies in the agent's loop: work is done only if an object, an address or the kernel's table changed."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import connection_cuts, policy, policy_table
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies.inputs import PAUSE_FACTOR, PolicyChoices
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import NetworkPolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import policy as convergence
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.connections import Connection
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.socket import finished
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.facts import InterfaceAddress
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from tests.netpol import cases
from tests.unit.agent.policy_bench import KINDS, Kernel, cluster_objects, follower, known_cluster, node1, turn


class Cycle:
    """An object that only a collection of garbage removes."""

    def __init__(self) -> None:
        self.itself = self


def test_progress_is_reported_while_policies_are_computed(kernel):
    view = known_cluster()
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
    for item in cluster_objects():
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
    view = known_cluster("Node")
    sync = follower(kernel, view, unknown_pods="deny")
    sync.sync(())
    # As where parts of a state refer to each other.
    replaced = Cycle()
    gc.freeze()
    ended = weakref.ref(replaced)
    del replaced
    assert ended()
    view.state.upsert({**node1(), "spec": {"podCIDRs": ["10.99.0.0/24"]}})
    sync.sync(())
    assert ended() is None
    gc.unfreeze()


def test_nothing_is_computed_while_nothing_changes(kernel, monkeypatch):
    view = known_cluster()
    sync = follower(kernel, view)
    computed: list[str] = []
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
    same = next(item for item in cluster_objects() if item["kind"] == "Pod")
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
    judged: list[int] = []

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

    def __init__(self, clock: list[float]) -> None:
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
