# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node is taken over while it serves with the rules that kube-proxy v1.36.2 had written, and served as before.

Rules come from the recordings of the conformance cases. A packet fares as by those rules or as by ours after each
commit, also where the cluster has changed between both: then what is programmed belongs to the next step of the case.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Tuple
from unittest import mock

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import FAMILIES
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.chains import chain_ownership
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import ChainsResource
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import NFT, XtablesVariant
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables import portions
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.observed_order import in_observed_order
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.unit.recordings import Step, steps
from tests.unit.rendering.iptables.test_recordings import NODE_ADDRESSES, saved_rules, settings_of

from .iptables import Held, Programs, _KnownRules, empty
from .test_iptables import FAULTS

STEPS = list(steps("iptables"))
#: A pod of the node, one of another node, clients inside and outside of the source ranges of the cases.
CLIENTS = {
    "IPv4": ("10.244.1.99", "10.244.2.99", "172.18.0.4", "172.18.0.5", "192.0.2.9"),
    "IPv6": ("fd00:10:244:1::99", "fd00:10:244:2::99", "fd00:172:18::4", "fd00:172:18::5", "2001:db8:9::9"),
}
Packet = Tuple[str, str, int, str]
Fates = Dict[Packet, FrozenSet[str]]


class Side:
    """What is served in a step of a case: the settings and ServicePorts of a family."""

    def __init__(self, step: Step, family: str) -> None:
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
                yield source, goal, port, info.key.protocol.lower()


def loaded(text: str) -> Held:
    """Return the tables of an output of iptables-save."""
    programs = Programs(empty())
    programs.restore(None, re.sub(r"(?m)^(#.*)?\n", "", text + "\n"))
    return programs.held


def fates(held: Held, packets: FrozenSet[Packet], family: str) -> Fates:
    nodes = NODE_ADDRESSES[family][1:]
    tracer = _KnownRules({ChainKey(*place): rules for place, rules in held.items()}, nodes)
    return {each: tracer.trace(*each, interface="lo" if each[0] in nodes else "eth0") for each in packets}


def taken_over(text: str, before: Side, after: Side, family: str, variant: str) -> List[str]:
    """Return what went wrong while a node with these rules was made to serve ``after``."""
    found: List[str] = []
    packets = frozenset((*before.packets(family), *after.packets(family)))
    programs = Programs(empty())
    resource = ChainsResource(
        XtablesVariant(family, variant, "", (1, 8, 9), "", "", ""), chain_ownership(after.settings, True)
    )
    with programs.used():
        resource.apply(difference({}, after.desired))
        ends = [fates(loaded(text), packets, family), fates(programs.held, packets, family)]

        def seen(held: Held) -> None:
            for packet, fate in fates(held, packets, family).items():
                if fate not in [each[packet] for each in ends]:
                    found.append(f"{packet}: {set(fate)}, expected one of {[set(each[packet]) for each in ends]}")

        programs = Programs(loaded(text), seen)
    with programs.used():
        observed = resource.observe()
        resource.apply(difference(observed, in_observed_order(after.desired, observed)))
        rest = difference(resource.observe(), in_observed_order(after.desired, resource.observe()))
    return found + [f"not as desired: {key}" for part in (rest.added, rest.replaced, rest.removed) for key in part]


def wrong(step: Step, variant: str) -> List[str]:
    """Return what goes wrong when the node of a step is taken over, also with what its cluster becomes."""
    later = next((each for each in STEPS if (each.case, each.number) == (step.case, step.number + 1)), None)
    found: List[str] = []
    for family in FAMILIES:
        text, before = saved_rules(step.saved, family), Side(step, family)
        for after in [before] if later is None else [before, Side(later, family)]:
            found += taken_over(text, before, after, family, variant) if text else []
    return found


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_node_of_kube_proxy_is_taken_over(step: Step) -> None:
    assert not wrong(step, "legacy")


@pytest.mark.full
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_node_of_kube_proxy_is_taken_over_in_portions(step: Step) -> None:
    with mock.patch.multiple(portions, WHOLE=2, PORTION=3):
        assert not wrong(step, NFT)


@pytest.mark.parametrize("fault", FAULTS)
def test_another_order_of_the_commits_is_found(fault: str) -> None:
    """In this case, endpoints of policy Local come and go while others stay."""
    changing = [step for step in STEPS if step.case == "health-check-node-port"]
    with mock.patch.object(chains, "commits", FAULTS[fault]):
        assert any(wrong(step, "legacy") for step in changing)
