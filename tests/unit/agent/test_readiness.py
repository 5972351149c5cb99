# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When the agent reports that it is ready, for which kubelet waits at boot."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent import readiness
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.agent import Agent
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.settings import AgentOptions
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import Log
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError

CONFIGURATION = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
---
apiVersion: kubenode.proxy/v1alpha1
kind: NodeProxyConfiguration
networkPolicy: {enabled: ENABLED, unknownPods: deny}
"""


class Bench:
    """An agent that serves Services, with policies that a test puts in force, and a manual clock."""

    def __init__(self, path, monkeypatch, enabled=True, table=False):
        self.now = 1000.0
        self.sent = []
        self.text = io.StringIO()
        self.in_force = False
        self.table = table
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(readiness, "holds_policies", self.holds_policies)
        path.write_text(CONFIGURATION.replace("ENABLED", str(enabled).lower()))
        self.agent = Agent(AgentOptions(configuration=str(path)), Log(self.text))
        monkeypatch.setattr(type(self.agent.policy), "in_force", property(lambda _policy: self.in_force))
        monkeypatch.setattr(self.agent.systemd, "send", lambda *lines: self.sent.extend(lines))
        monkeypatch.setattr(self.agent.sync, "sync", lambda first: None)
        monkeypatch.setattr(self.agent.sync, "clean_up_once_serving", lambda: self.sent.append("cleaned up"))
        monkeypatch.setattr(self.agent.components.checks, "end_connections", lambda _view, _families: None)
        self.agent.sync.proxiers = SimpleNamespace(node_view=SimpleNamespace(addresses=()), families=())
        self.agent.readiness.start()

    def holds_policies(self):
        if self.table is None:
            raise KernelError("not permitted")
        return self.table


@pytest.mark.parametrize("table", [False, None], ids=["no-table", "unknown"])
def test_the_agent_is_ready_when_policies_are_in_force(tmp_path, monkeypatch, table):
    """Otherwise kubelet starts pods that are open until Pods, Namespaces and policies have been listed."""
    bench = Bench(tmp_path / "config", monkeypatch, table=table)
    bench.agent._sync(first=True)
    bench.agent.readiness.poll()
    assert bench.sent == ["cleaned up"]
    bench.in_force = True
    bench.agent.readiness.poll()
    bench.agent.readiness.poll()
    assert bench.sent == ["cleaned up", "READY=1"] and bench.agent.readiness.sent
    bench.now += 60.0
    bench.agent.timers.run()
    assert bench.sent.count("READY=1") == 1 and "not in force" not in bench.text.getvalue()


def test_policies_in_force_do_not_make_the_agent_ready_before_services_are_served(tmp_path, monkeypatch):
    bench = Bench(tmp_path / "config", monkeypatch)
    bench.in_force = True
    bench.agent.readiness.poll()
    assert bench.sent == []
    bench.agent._sync(first=True)
    assert bench.sent == ["READY=1", "cleaned up"]


def test_the_agent_is_ready_after_some_time_although_pods_cannot_be_listed(tmp_path, monkeypatch):
    bench = Bench(tmp_path / "config", monkeypatch)
    bench.agent._sync(first=True)
    bench.now += readiness.PATIENCE_SECONDS - 0.1
    bench.agent.timers.run()
    assert "READY=1" not in bench.sent
    bench.now += 0.2
    bench.agent.timers.run()
    assert "READY=1" in bench.sent and "network policies are not in force yet" in bench.text.getvalue()


@pytest.mark.parametrize(("enabled", "table"), [(True, True), (False, False)], ids=["table", "disabled"])
def test_a_table_of_an_earlier_run_protects_the_pods(tmp_path, monkeypatch, enabled, table):
    bench = Bench(tmp_path / "config", monkeypatch, enabled, table)
    asked = []
    monkeypatch.setattr(bench.agent.source, "use_policies_if_late", asked.append)
    bench.agent._sync(first=True)
    bench.agent.readiness.fill()
    assert "READY=1" in bench.sent and not asked and not bench.agent.readiness.waits_for_lists


def test_the_copy_on_disk_is_considered_until_nothing_is_left_to_wait_for(tmp_path, monkeypatch):
    bench = Bench(tmp_path / "config", monkeypatch)
    asked = []
    monkeypatch.setattr(bench.agent.source, "use_policies_if_late", lambda kinds: asked.append(kinds) or len(asked) > 1)
    for _call in range(3):
        bench.agent.readiness.fill()
    assert asked == [{"Pod", "Namespace", "NetworkPolicy", "Node"}] * 2 and not bench.agent.readiness.waits_for_lists


def test_leftovers_are_removed_again_after_a_reload(tmp_path, monkeypatch):
    bench = Bench(tmp_path / "config", monkeypatch)
    bench.agent._sync(first=True)
    bench.agent._sync()
    monkeypatch.setattr(
        "ansible_collections.kubenode.proxy.plugins.module_utils.agent.reload.reload", lambda _components: True
    )
    bench.agent.reload()
    bench.agent._reload_if_requested()
    bench.agent._sync()
    assert bench.sent == ["cleaned up"] * 2
