# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Traffic of unknown pods, while a pod of the node has an address outside of its ranges, and afterwards."""

from __future__ import annotations

import copy
import io

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import policy
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from tests.unit.agent.policy_bench import a_pod, follower, known_cluster, turn

OUTSIDE = "198.51.100.7"


@pytest.fixture
def view() -> ClusterView:
    return known_cluster("Node")


def outside_pod(**status):
    """Return a pod of the node with an address outside of its ranges."""
    pod = copy.deepcopy(a_pod())
    pod["metadata"]["name"] = "outside"
    pod["status"] = {"phase": "Running", "podIPs": [{"ip": OUTSIDE}], **status}
    return pod


def denies(kernel):
    """Return whether the table denies traffic of unknown pods."""
    return any(key[:2] == ("element", "pod-ranges4") for key in kernel.entries)


@pytest.mark.parametrize("how", ["deleted", "ended", "another address", "another node"])
def test_unknown_pods_are_denied_again_once_no_pod_has_another_address(kernel, view, how):
    view.state.upsert(outside_pod())
    log = io.StringIO()
    sync = follower(kernel, view, stream=log, unknown_pods="deny")
    for _round in range(2):
        sync.sync(())
        assert not denies(kernel)
        (warning,) = sync.status()["warnings"]
        assert warning.startswith("traffic of unknown pods is allowed: ") and OUTSIDE in warning
    changed = outside_pod()
    if how == "deleted":
        view.state.delete(changed)
    elif how == "ended":
        view.state.upsert(outside_pod(phase="Succeeded"))
    elif how == "another address":
        view.state.upsert(outside_pod(podIPs=[{"ip": "10.244.1.77"}]))
    else:
        view.state.upsert({**changed, "spec": {**changed["spec"], "nodeName": "node2"}})
    sync.sync(())
    assert denies(kernel) and sync.status()["warnings"] == []
    assert log.getvalue().count(OUTSIDE) == 1 and "traffic of unknown pods is denied" in log.getvalue()


def test_the_warning_names_the_pods_that_are_left(kernel, view):
    other = outside_pod(podIPs=[{"ip": "198.51.100.8"}])
    other["metadata"]["name"] = "other"
    for item in (outside_pod(), other):
        view.state.upsert(item)
    sync = follower(kernel, view, unknown_pods="deny")
    sync.sync(())
    view.state.delete(outside_pod())
    sync.sync(())
    (warning,) = sync.status()["warnings"]
    assert OUTSIDE not in warning and "198.51.100.8" in warning and not denies(kernel)


def test_a_pod_that_gets_another_address_later_opens_nothing(kernel, view, monkeypatch):
    """Nor does a defect after it; a tenant may be able to choose the address of a pod."""
    now = [0.0]
    timers = Timers(lambda: now[0])
    sync = follower(kernel, view, timers, unknown_pods="deny")
    sync.sync(())
    assert denies(kernel) and kernel.observed == 1
    view.state.upsert(outside_pod())
    sync.sync(())
    assert denies(kernel) and kernel.observed == 1, "the state is not computed again"
    (warning,) = sync.status()["warnings"]
    assert warning.startswith("traffic of unknown pods is denied only in the pod ranges") and OUTSIDE in warning

    def fail(*_arguments):
        raise KeyError("a defect")

    view.state.upsert(outside_pod(podIPs=[{"ip": "198.51.100.8"}]))
    with monkeypatch.context() as patched:
        patched.setattr(NodePolicy, "update", fail)
        sync.sync(())
    now[0] += policy.RETRY_SECONDS
    turn(sync, timers)
    assert sync.in_force and denies(kernel)
    view.state.delete(outside_pod())
    sync.sync(())
    assert denies(kernel) and sync.status()["warnings"] == []


def test_pods_of_other_nodes_and_other_settings_have_no_warning(kernel, view):
    pod = outside_pod()
    view.state.upsert({**pod, "spec": {**pod["spec"], "nodeName": "node2"}})
    sync = follower(kernel, view, unknown_pods="deny")
    sync.sync(())
    assert denies(kernel) and sync.status()["warnings"] == []
    view.state.upsert(pod)
    sync = follower(kernel, view)
    sync.sync(())
    assert not denies(kernel) and sync.status()["warnings"] == []
