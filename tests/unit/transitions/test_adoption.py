# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node is taken over while it serves with the rules that kube-proxy v1.36.2 had written, and is rolled back to them.

Rules come from the recordings of the conformance cases. A packet fares as by those rules or as by ours after each
commit, also where the cluster has changed between both: then what is programmed belongs to the next step of the case.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, Iterator, Mapping
from unittest import mock

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.chains import chain_ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.saved import SavedChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import NFT
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables import portions
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.observed_order import in_observed_order
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.unit.recordings import Step, steps
from tests.unit.rendering.iptables.test_recordings import NODE_ADDRESSES, saved_rules, settings_of

from .check import described, wrong
from .iptables import Held, Programs, empty, traced, variant_of
from .states import Packet
from .test_iptables import FAULTS

STEPS = list(steps("iptables"))
#: A pod of the node, one of another node, clients inside and outside of the source ranges of the cases.
CLIENTS = {
    "IPv4": ("10.244.1.99", "10.244.2.99", "172.18.0.4", "172.18.0.5", "192.0.2.9"),
    "IPv6": ("fd00:10:244:1::99", "fd00:10:244:2::99", "fd00:172:18::4", "fd00:172:18::5", "2001:db8:9::9"),
}


class Side:
    """What is served in a step of a case: the settings and ServicePorts of a family."""

    def __init__(self, step: Step, family: str) -> None:
        self.step = step
        state = ClusterState.from_objects(step.objects)
        node = state.nodes["node1"]
        self.settings: DataplaneSettings = settings_of(step, family, node.pod_cidrs)
        self.ports = all_service_ports(state, NodeContext(family, "node1", node.zone))

    @property
    def desired(self) -> Mapping[Any, Any]:
        return RENDERING.desired_tables(self.ports, self.settings)["chains"]

    def packets(self, family: str) -> Iterator[Packet]:
        """Yield packets from each client, the node and some endpoints to each address that the step serves."""
        node = NODE_ADDRESSES[family][1]
        for info in self.ports.values():
            goals = [(each, info.port) for each in (info.cluster_ip, *info.external_ips, *info.load_balancer_ips)]
            goals += [(each, info.node_port) for each in NODE_ADDRESSES[family][1:] if info.node_port]
            sources = (*CLIENTS[family], node, *(endpoint.ip for endpoint in info.endpoints[:3]))
            for source, (goal, port) in itertools.product(sources, goals):
                yield Packet(source, goal, port, info.key.protocol.lower())


def loaded(text: str) -> Held:
    """Return the tables of an output of iptables-save."""
    programs = Programs(empty())
    programs.restore(None, re.sub(r"(?m)^(#.*)?\n", "", text + "\n"))
    return programs.held


def taken_over(text: str, before: Side, after: Side, family: str, variant: str) -> list[str]:
    """Return what went wrong while a node with these rules was made to serve ``after``, and was rolled back to them."""
    found: list[str] = []
    packets, nodes = {*before.packets(family), *after.packets(family)}, NODE_ADDRESSES[family][1:]
    programs, recorded = Programs(empty()), loaded(text)
    resource = ChainsResource(variant_of(family, variant), chain_ownership(after.settings, True))
    with programs.used():
        resource.apply(difference({}, after.desired))
    ends = traced(recorded, packets, nodes), traced(programs.held, packets, nodes)
    with Programs(recorded).used():
        saved = SavedChainsResource(resource.variant, resource.ownership).observe()
    taken = Programs(recorded, lambda held: found.extend(wrong(str(after.step), traced(held, packets, nodes), *ends)))
    with taken.used():
        observed = resource.observe()
        resource.apply(difference(observed, in_observed_order(after.desired, observed)))
        observed = resource.observe()
        found += described(difference(observed, in_observed_order(after.desired, observed)))
        restored = SavedChainsResource(resource.variant, resource.ownership, saved)
        observed = restored.observe()
        restored.apply(difference(observed, restored.desired(observed)))
    return found + wrong(f"{after.step}, rolled back", traced(taken.held, packets, nodes), ends[0], ends[0])


def faults(step: Step, variant: str) -> list[str]:
    """Return what goes wrong when the node of a step is taken over, also with what its cluster becomes."""
    later = next((each for each in STEPS if (each.case, each.number) == (step.case, step.number + 1)), None)
    found: list[str] = []
    for family in FAMILIES:
        text, before = saved_rules(step.saved, family), Side(step, family)
        for after in [before] if later is None else [before, Side(later, family)]:
            found += taken_over(text, before, after, family, variant) if text else []
    return found


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_node_of_kube_proxy_is_taken_over(step: Step) -> None:
    assert not faults(step, "legacy")


@pytest.mark.full
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_node_of_kube_proxy_is_taken_over_in_portions(step: Step) -> None:
    with mock.patch.multiple(portions, WHOLE=2, PORTION=3):
        assert not faults(step, NFT)


@pytest.mark.parametrize("fault", FAULTS)
def test_another_order_of_the_commits_is_found(fault: str) -> None:
    """In this case, endpoints of policy Local come and go while others stay."""
    changing = [step for step in STEPS if step.case == "health-check-node-port"]
    with mock.patch.object(chains, "commits", FAULTS[fault]):
        assert any(faults(step, "legacy") for step in changing)
