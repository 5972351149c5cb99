# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rules that iptables mode renders for each conformance case equal those of kube-proxy v1.36.2.

Recorded rules are compared in canonical form. In chains that all Services share, kube-proxy's order is arbitrary, so
these rules are compared as a sorted list, except for the last one.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, Mapping

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import (
    FAMILIES,
    IPV4,
    family_of,
    parse_network,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.iptables import IPTABLES_MODE
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.chains import observed_table, parse_save
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.canonical import canonical_rule
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.fixed import (
    INVALID_COUNTER,
    LOCALHOST_COUNTER,
    SHARED_CHAINS,
    ownership,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import (
    PRESENT,
    ChainKey,
    ChainTable,
    JumpKey,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.unit.recordings import CASES, Step, recorded, steps

NODE_ADDRESSES = {
    "IPv4": ("127.0.0.1", "172.18.0.2", "172.19.0.2"),
    "IPv6": ("::1", "fd00:172:18::2", "fd00:172:19::2"),
}


STEPS = list(steps("iptables"))


def saved_rules(saved: Mapping[str, str], family: str) -> str:
    """Return the recorded iptables-save output of a family; empty if it was not recorded."""
    tool = "iptables-save" if family == IPV4 else "ip6tables-save"
    return "\n".join(text for command, text in saved.items() if command.startswith(f"{tool} -t "))


def settings_of(step: Step, family: str, pod_cidrs: tuple[str, ...]) -> DataplaneSettings:
    cidrs = tuple(cidr for cidr in step.config.get("nodePortAddresses", ()) if family_of(cidr) == family)
    networks = [network for network in map(parse_network, cidrs) if network]
    return DataplaneSettings(
        family=family,
        node_ip=NODE_ADDRESSES[family][1],
        masquerade_all=bool(step.config.get("iptables", {}).get("masqueradeAll")),
        local_traffic=step.local_traffic(family, pod_cidrs),
        node_port_cidrs=cidrs,
        node_port_addresses=tuple(
            address
            for address in NODE_ADDRESSES[family]
            if not networks or any(network.contains(address) for network in networks)
        ),
        localhost_node_ports=family == IPV4 and (not networks or any(net.contains("127.0.0.0") for net in networks)),
        nfacct_counters=(INVALID_COUNTER, LOCALHOST_COUNTER),
    )


def comparable(table: ChainTable) -> dict[Any, Any]:
    """Return the table with the rules of shared chains in an order independent of that of the Services.

    The lab's sentinel Service is omitted: the lab changes it once more than it records.
    """
    result: dict[Any, Any] = {}
    for key, value in table.items():
        if isinstance(value, tuple) and value:
            value = tuple(rule for rule in value if '"lab-sentinel/' not in rule)
            if not value and key not in SHARED_CHAINS:
                continue
        if isinstance(key, ChainKey) and key in SHARED_CHAINS and isinstance(value, tuple):
            result[key] = (sorted(value), value[-1:] if key == ("nat", "KUBE-SERVICES") else ())
        elif key[:2] != ("mangle", "KUBE-PROXY-CANARY"):
            result[key] = value
    return result


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_rendering_equals_what_kube_proxy_programmed(step: Step) -> None:
    state = ClusterState.from_objects(step.objects)
    node = state.nodes["node1"]
    for family in FAMILIES:
        text = saved_rules(step.saved, family)
        if not text:
            continue
        settings = settings_of(step, family, node.pod_cidrs)
        routes = all_service_ports(state, NodeContext(family, "node1", node.zone))
        desired = RENDERING.desired_tables(routes, settings)["chains"]
        observed = observed_table(parse_save(text), family, ownership(settings))
        assert comparable(desired) == comparable(observed)


@pytest.mark.parametrize("family", FAMILIES)
def test_rules_are_counted_as_kube_proxy_counted_them(family: str) -> None:
    """kube-proxy's gauges have the lines of the chains; the jumps from built-in chains are not among them."""
    step = next(step for step in STEPS if step.case == "health-and-metrics")
    state = ClusterState.from_objects(step.objects)
    node = state.nodes["node1"]
    service_ports = all_service_ports(state, NodeContext(family, "node1", node.zone))
    tables = RENDERING.desired_tables(service_ports, settings_of(step, family, node.pod_cidrs))
    text = (CASES / step.case / "metrics-iptables.txt").read_text()
    for gauge in ("total", "last"):
        series = rf'^kubeproxy_sync_proxy_rules_iptables_{gauge}{{ip_family="{family}",table="(\w+)"}} (\d+)$'
        counted = {table: int(rules) for table, rules in re.findall(series, text, re.MULTILINE)}
        assert IPTABLES_MODE.rule_counts(tables) == counted


@pytest.mark.parametrize("family", FAMILIES)
def test_order_of_jump_rules_in_recordings(family: str) -> None:
    """Insert each jump at the head in the order of the table, which gives the order of kube-proxy's rules."""
    step = next(step for step in STEPS if step.case == "clusterip-basic")
    settings = settings_of(step, family, ())
    by_chain: dict[tuple[str, str], list[str]] = {}
    for key in RENDERING.desired_tables({}, settings)["chains"]:
        if isinstance(key, JumpKey):
            by_chain.setdefault((key.table, key.chain), []).insert(0, key.rule)
    saved = parse_save(saved_rules(step.saved, family))
    for chain, rules in by_chain.items():
        assert [canonical_rule(rule, family) for rule in saved.chains[chain]] == rules


def test_there_are_many_recordings() -> None:
    assert len(STEPS) > 80


def test_presence_only_where_localhost_node_ports_are_off() -> None:
    table = RENDERING.desired_tables({}, DataplaneSettings(family="IPv6"))["chains"]
    assert table[ChainKey("filter", "KUBE-FIREWALL")] == PRESENT


def test_every_recorded_rule_is_canonical_already() -> None:
    """Rules of iptables and ipvs modes, as iptables-save 1.8.9 printed them; but nfacct has two blanks there."""
    rules = 0
    for path in [*CASES.glob("*/state-iptables.txt"), *CASES.glob("*/state-ipvs.txt")]:
        for saved, family in itertools.product(recorded(path).values(), FAMILIES):
            for chain in parse_save(saved_rules(saved, family)).chains.values():
                for rule in chain:
                    assert canonical_rule(rule, family) == rule.replace("--nfacct-name  ", "--nfacct-name ")
                    rules += 1
    assert rules > 10000
