# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's network policies with a table in memory."""

from __future__ import annotations

import io
from typing import Any, Optional

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.policies import (
    inputs,
    policy,
    policy_table,
    settings,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.ports.health import ProxyHealth
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.source.view import ClusterView
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.threads.timers import Timers
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.model import KubeProxyConfiguration
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import (
    NetworkPolicySettings,
    NodeProxyConfiguration,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Kind, Resource
from tests.netpol import cases
from tests.unit.agent.reports_in_memory import reports_to

KINDS = {"Pod", "Namespace", "NetworkPolicy"}


class Kernel(Resource[Any, Any]):
    """The table in memory, and notifications of changes by other programs."""

    port = 0
    kind, atomic = Kind.POLICY_OBJECTS, True
    author, lost = "nft, process 7", False

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}
        self.applied: list[int] = []
        self.observed = 0
        self.notified = False
        self.progressed = 0

    def progress(self) -> None:
        self.progressed += 1

    def network_policy(self) -> Kernel:
        return self

    def observe(self) -> dict[Any, Any]:
        self.observed += 1
        return dict(self.entries)

    def apply(self, change: Any) -> None:
        self.applied.append(len(change))
        self.entries.update(change.added)
        self.entries.update({key: new for key, (_old, new) in change.replaced.items()})
        for key in change.removed:
            del self.entries[key]

    def changes(self) -> set[str]:
        notified, self.notified = self.notified, False
        return {"inet"} if notified else set()

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass


class NoInterfaces:
    """In the place of the monitor of interfaces: those of the machine that runs the tests come and go meanwhile."""

    def events(self) -> list[Any]:
        return []

    def pop_lost(self) -> bool:
        return False

    def close(self) -> None:
        pass


def table_in_memory(monkeypatch: Any) -> Kernel:
    """Return the table that the agent watches, without other programs and interfaces of the node."""
    made = Kernel()
    monkeypatch.setattr(policy_table, "TableMonitor", lambda _ports, _table: made)
    monkeypatch.setattr(settings, "policy_findings", lambda *_arguments: [])
    monkeypatch.setattr(inputs, "find_links", lambda *_arguments: None)
    monkeypatch.setattr(inputs, "AddressMonitor", NoInterfaces)
    monkeypatch.setattr(inputs.PolicyLinks, "filenos", lambda _self: [])
    return made


def follower(
    kernel: Kernel,
    view: ClusterView,
    timers: Optional[Timers] = None,
    stream: Optional[io.StringIO] = None,
    events: Optional[list[Any]] = None,
    **options: str,
) -> policy.PolicySync:
    """Return what enforces policies on node1, with these settings; it logs to ``stream``, and posts ``events``."""
    posted = [] if events is None else events
    reports = reports_to(stream, lambda *event: posted.append(event))
    sync = policy.PolicySync(view, kernel, timers or Timers(), reports=reports, health=ProxyHealth(60.0))
    sync.configure(with_policies(enabled=True, **options), "node1")
    return sync


def with_policies(**options: Any) -> KubeProxyConfiguration:
    """Return a configuration with these settings of network policies."""
    node_proxy = NodeProxyConfiguration(network_policy=NetworkPolicySettings(**options))
    return KubeProxyConfiguration(node_proxy=node_proxy)


def turn(sync: policy.PolicySync, timers: Timers) -> None:
    """Do what the agent's loop does when it wakes."""
    timers.run()
    sync.sync(())


def cluster_objects() -> list[dict[str, Any]]:
    """Return the objects of the cluster."""
    return list(cases.steps("default-deny-ingress")[0].objects.values())


def known_cluster(*more: str) -> ClusterView:
    """Return the view of the cluster, which knows completely the kinds of network policies and ``more``."""
    view = ClusterView()
    for item in cluster_objects():
        view.state.upsert(item)
    view.listed |= KINDS | set(more)
    return view


def node1() -> dict[str, Any]:
    """Return the Node that :func:`follower` is on."""
    return next(item for item in cluster_objects() if item["kind"] == "Node" and item["metadata"]["name"] == "node1")


def a_pod() -> dict[str, Any]:
    """Return a pod of that Node."""
    return next(item for item in cluster_objects() if item["kind"] == "Pod" and item["spec"]["nodeName"] == "node1")


def fail(*_arguments: Any, **_named: Any) -> None:
    """Stand in for code with a defect."""
    raise KeyError("a defect")
