# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of the Node object of the node that an agent keeps in sync."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services import node_follower
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import RETRY_SECONDS
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ProxyError
from tests.unit.agent.sync_bench import SyncBench, service

CIDRS = {"podCIDRs": ["10.244.1.0/24"]}
ADDRESS = {"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.7"}]}}
OTHER = {"status": {"addresses": [{"type": "ExternalIP", "address": "192.0.2.8"}]}}
NODE_CIDR = {"detectLocalMode": "NodeCIDR"}


@pytest.fixture
def bench(monkeypatch):
    synced = SyncBench(monkeypatch)
    synced.put(service("web", 1))
    synced.sync.sync(first=True)
    return synced


def kubernetes_node(**spec):
    metadata, status = {"name": "n1", **spec.pop("metadata", {})}, spec.pop("status", {})
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec, "status": status}


def test_a_node_that_becomes_known_is_set_up_again(bench):
    calls = []
    bench.put(kubernetes_node())
    bench.sync.node_changed("n1", lambda: calls.append("rebuild"))
    assert calls == ["rebuild"]


def test_another_zone_applies_every_service_again(bench):
    bench.put(kubernetes_node())
    bench.sync.follower.set_up_for(bench.view.state.nodes["n1"])
    bench.put(kubernetes_node(metadata={"labels": {"topology.kubernetes.io/zone": "west"}}))
    bench.view.pop_dirty()
    bench.sync.node_changed("n1", lambda: pytest.fail("no need to set up again"))
    assert bench.view.dirty == set(bench.view.state.services)
    assert bench.sync.proxiers.families[0].context.node.zone == "west"
    assert bench.sync.is_due or bench.sync.delay() < node_follower.ZONE_PAUSE_SECONDS


def test_a_zone_that_changes_again_and_again_is_applied_now_and_then(bench):
    bench.put(kubernetes_node())
    bench.sync.follower.set_up_for(bench.view.state.nodes["n1"])
    applied = 0
    for number in range(120):
        bench.put(kubernetes_node(metadata={"labels": {"topology.kubernetes.io/zone": f"z{number}"}}))
        bench.view.pop_dirty()
        bench.sync.node_changed("n1", lambda: pytest.fail("no need to set up again"))
        bench.timers.run()
        applied += bool(bench.view.dirty)
        bench.now += 0.5
    assert applied == 2
    bench.now += node_follower.ZONE_PAUSE_SECONDS
    bench.timers.run()
    assert bench.sync.proxiers.families[0].context.node.zone == "z119"


@pytest.mark.parametrize(
    ("configuration", "before", "after", "effect"),
    [
        # With an external cloud provider a Node has no address at first.
        ({}, {}, ADDRESS, "addresses"),
        ({}, ADDRESS, OTHER, "addresses"),
        ({}, ADDRESS, {}, "no longer has addresses"),
        ({}, {}, CIDRS, ""),
        ({}, CIDRS, {}, ""),
        (NODE_CIDR, {}, CIDRS, "podCIDRs"),
        (NODE_CIDR, CIDRS, {"podCIDRs": ["10.244.2.0/24"]}, "podCIDRs"),
        (NODE_CIDR, CIDRS, {}, "no longer has podCIDRs"),
        (NODE_CIDR, {**ADDRESS, **CIDRS}, OTHER, "no longer has podCIDRs"),
    ],
)
def test_changes_of_the_node_are_applied_and_losses_reported_once(monkeypatch, configuration, before, after, effect):
    bench = SyncBench(monkeypatch, configuration)
    bench.put(kubernetes_node(**before))
    bench.sync.follower.set_up_for(bench.view.state.nodes["n1"])
    calls = []

    def rebuild():
        calls.append("rebuild")
        bench.sync.follower.set_up_for(bench.view.state.nodes["n1"])

    for labels in ({}, {"a": "b"}, {"a": "c"}):
        bench.put(kubernetes_node(metadata={"labels": labels}, **after))
        bench.sync.node_changed("n1", rebuild)
    lost = "no longer" in effect
    assert calls == (["rebuild"] if effect and not lost else [])
    text = bench.text.getvalue()
    assert text.count("the Node no longer has") == lost and text.count("the Node changed") == len(calls)
    assert effect in text


def test_a_change_of_the_node_that_cannot_be_applied_is_retried(bench):
    bench.put(kubernetes_node())
    bench.sync.follower.set_up_for(bench.view.state.nodes["n1"])
    failures = [ProxyError("busy"), ProxyError("busy")]
    calls = []

    def rebuild():
        calls.append("rebuild")
        if failures:
            raise failures.pop()

    bench.put(kubernetes_node(**ADDRESS))
    bench.sync.node_changed("n1", rebuild)
    for _repetition in range(4):
        bench.now += RETRY_SECONDS
        bench.timers.run()
    assert len(calls) == 3
    assert 'msg="the change of the Node cannot be applied, retrying" error=busy' in bench.text.getvalue()
