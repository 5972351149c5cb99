# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Interfaces of pods in the agent: rows about them follow what policies limit."""

from __future__ import annotations

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import inputs
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import LINK
from tests.unit.agent.policy_bench import KINDS, follower, table_in_memory, turn
from tests.unit.simulation.policies import find_links
from tests.unit.transitions.policies import State


def test_link_local_traffic_is_allowed_again_when_nothing_limits_a_pod(monkeypatch):
    """A NetworkPolicy allows everything; a ClusterNetworkPolicy, which is deleted, was all that limited the pod."""
    kernel = table_in_memory(monkeypatch)
    monkeypatch.setattr(inputs, "find_links", find_links)
    view, timers = ClusterView(), Timers()
    objects = State("one", "admin denies").objects()
    for item in objects.values():
        view.state.upsert(item)
    view.listed |= {*KINDS, "ClusterNetworkPolicy"}
    sync = follower(kernel, view, timers, cluster_policies=True)
    turn(sync, timers)
    assert sync._policy is not None and (LINK, "in", "cni0") in sync._policy.table.rows
    view.state.delete(next(item for key, item in objects.items() if key[0] == "ClusterNetworkPolicy"))
    turn(sync, timers)
    assert (LINK, "in", "cni0") not in sync._policy.table.rows
