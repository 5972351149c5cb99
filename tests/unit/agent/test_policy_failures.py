# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies in the agent after failures and defects, and changes of their table by other programs."""

from __future__ import annotations

import io
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import policy, policy_table
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError, ProxyError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from tests.unit.agent.policy_bench import Kernel, a_pod, fail, follower, known_cluster, turn, with_policies


def test_nothing_wakes_the_loop_between_a_failure_and_the_next_attempt(kernel, monkeypatch):
    """Nothing reads the notifications until then, so that waiting for them would return at once, again and again."""
    view = known_cluster()
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
    view = known_cluster()
    now = [0.0]
    timers = Timers(lambda: now[0])
    sync = follower(kernel, view, timers)
    sync.sync(())
    view.state.delete(a_pod())
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


def test_a_defect_that_shows_again_after_each_success_takes_a_tenth_of_the_time(kernel, monkeypatch):
    view = known_cluster()
    now = [0.0]
    timers = Timers(lambda: now[0])
    sync = follower(kernel, view, timers)
    sync.sync(())
    pod = a_pod()
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
    view.state.delete(a_pod())
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
    view.state.delete(a_pod())
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
