# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names, numbers of rules, texts and decisions of the rendering."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED, KUBE_PROXY
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.iptables import IPTABLES_MODE
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.canonical import (
    canonical_rule,
    target_of,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.fixed import (
    INVALID_COUNTER,
    LOCALHOST_COUNTER,
    ownership,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.names import hash16
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.services import probability
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import ChainKey, JumpKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from tests.campaigns import examples

from .routes import by_key, endpoint, route

COUNTERS = (INVALID_COUNTER, LOCALHOST_COUNTER)
PODS = LocalTraffic("cidr", "10.0.0.0/8")


def facts(**fields: Any) -> DataplaneSettings:
    defaults: dict[str, Any] = {"family": "IPv4", "node_ip": "192.168.0.2", "local_traffic": PODS}
    return DataplaneSettings(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ns1/svc1:p80tcp", "XPGD46QRK7WJZT7O"),
        ("ns1/svc1tcp", "AQI2S6QIMU7PVVRP"),
        ("default/kubernetes:httpstcp", "NPX46M4PTMTKRN6Y"),
        ("kube-system/kube-dns:dnsudp", "TCOU7JCQXEZGVUNU"),
        ("ns2/svc2:p80tcp", "GNZBNJ2PO5MGZ6GT"),
        ("ns5/svc5:p80tcp", "NUKIZ6OKUXPJNT4C"),
        ("ns1/svc1:p80tcp10.180.0.1:80", "SXIVWICOYRO3J4NJ"),
        ("ns1/svc1:p80tcp[fd00:10:180::1]:80", "OGYCNMB4EMRUSJ6N"),
    ],
)
def test_hash16(text: str, expected: str) -> None:
    assert hash16(text) == expected


def services(number: int, ends: int, load_balancer: bool) -> Any:
    routes = []
    for index in range(number):
        fields: dict[str, Any] = {"cluster_ip": f"172.30.1.{index}"}
        if load_balancer:
            fields.update(
                node_port=3001 + index,
                external_ips=(f"192.0.2.{index}",),
                load_balancer_ips=(f"1.2.3.{index}",),
                source_ranges=("203.0.113.0/24",),
            )
        routes.append(route(f"svc{index}", [endpoint(f"10.{index}.0.{end}") for end in range(ends)], **fields))
    return by_key(*routes)


@pytest.mark.parametrize(
    ("load_balancer", "number", "ends", "filter_rules", "nat_rules"),
    [
        (False, 0, 0, 4, 5),
        (False, 1, 0, 5, 5),
        (False, 1, 1, 4, 10),
        (False, 1, 2, 4, 13),
        (False, 1, 10, 4, 37),
        (False, 10, 0, 14, 5),
        (False, 10, 1, 4, 55),
        (False, 10, 2, 4, 85),
        (False, 10, 10, 4, 325),
        (True, 0, 0, 4, 5),
        (True, 1, 0, 8, 5),
        (True, 1, 1, 5, 18),
        (True, 1, 2, 5, 21),
        (True, 1, 10, 5, 45),
        (True, 10, 0, 44, 5),
        (True, 10, 1, 14, 135),
        (True, 10, 2, 14, 165),
        (True, 10, 10, 14, 405),
    ],
)
def test_numbers_of_rules(load_balancer: bool, number: int, ends: int, filter_rules: int, nat_rules: int) -> None:
    """The gauges count the rules as kube-proxy's own test of generated rules does: without the jumps to chains."""
    tables = RENDERING.desired_tables(services(number, ends, load_balancer), facts(nfacct_counters=COUNTERS))
    assert IPTABLES_MODE.rule_counts(tables) == {"filter": filter_rules, "nat": nat_rules}


def test_probabilities() -> None:
    assert probability(1) == "1.00000000000"
    assert probability(2) == "0.50000000000"
    assert probability(3) == "0.33333333349"
    assert probability(100001) == "0.00001000008"
    values = [float(probability(number)) for number in range(1, 20001)]
    assert values == sorted(set(values), reverse=True)


def test_large_cluster_has_no_endpoint_comments() -> None:
    ends = [endpoint(f"10.1.{number // 250}.{number % 250}") for number in range(1001)]
    table = RENDERING.desired_tables(by_key(route(endpoints=ends, affinity_seconds=60)), facts())["chains"]
    balancing = table[ChainKey("nat", "KUBE-SVC-XPGD46QRK7WJZT7O")]
    assert isinstance(balancing, tuple)
    assert sum("--comment" in rule for rule in balancing) == 1  # only the masquerade rule has a comment
    assert not any("--comment" in str(rules) for key, rules in table.items() if "KUBE-SEP-" in key.chain)
    small = RENDERING.desired_tables(by_key(route(endpoints=ends[:1000], affinity_seconds=60)), facts())["chains"]
    assert all("--comment" in rule for rule in small[ChainKey("nat", "KUBE-SVC-XPGD46QRK7WJZT7O")])


def test_unready_endpoints_count_for_the_large_cluster() -> None:
    ends = [endpoint("10.2.0.1"), *(endpoint(f"10.1.{i // 250}.{i % 250}", state="T") for i in range(1000))]
    table = RENDERING.desired_tables(by_key(route(endpoints=ends)), facts())["chains"]
    assert not any("--comment" in str(rules) for key, rules in table.items() if "KUBE-SEP-" in key.chain)


def test_fixed_rules_follow_the_node() -> None:
    settings = facts(random_fully=False, conntrack_liberal=True, masquerade_mark=0x8000)
    table = RENDERING.desired_tables({}, settings)["chains"]
    assert table[ChainKey("nat", "KUBE-POSTROUTING")] == (
        "-m mark ! --mark 0x8000/0x8000 -j RETURN",
        "-j MARK --set-xmark 0x8000/0x0",
        '-m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE',
    )
    assert table[ChainKey("nat", "KUBE-MARK-MASQ")] == ("-j MARK --set-xmark 0x8000/0x8000",)
    assert len(table[ChainKey("filter", "KUBE-FORWARD")]) == 2
    counted = RENDERING.desired_tables({}, facts(nfacct_counters=COUNTERS))["chains"]
    assert "--nfacct-name ct_state_invalid_dropped_pkts" in str(counted[ChainKey("filter", "KUBE-FORWARD")])


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bridge", ""),
        ("bridge", "cni0 -j ACCEPT"),
        ("bridge", "a\nb"),
        ("bridge", "sixteencharacter"),
        ("prefix", 'x"'),
        ("prefix", ""),
        ("cidr", "fd00::/8"),
        ("cidr", "10.0.0.0"),
        ("magic", "x"),
    ],
)
def test_invalid_detectors(kind: str, value: str) -> None:
    service_ports = by_key(route(endpoints=[endpoint("10.0.0.1")]))
    with pytest.raises(ConfigurationError):
        RENDERING.desired_tables(service_ports, facts(local_traffic=LocalTraffic(kind, value)))


def test_a_detector_that_covers_everything_masquerades_nothing() -> None:
    everything = facts(local_traffic=LocalTraffic("cidr", "0.0.0.0/0"))
    table = RENDERING.desired_tables(by_key(route(endpoints=[endpoint("10.0.0.1")])), everything)["chains"]
    assert len(table[ChainKey("nat", "KUBE-SVC-XPGD46QRK7WJZT7O")]) == 1


# -- properties

ADDRESSES = st.integers(1, 250).map(lambda number: f"10.{number % 3}.0.{number}")
ENDPOINTS = st.lists(
    st.builds(endpoint, ADDRESSES, st.sampled_from((80, 8080)), st.booleans(), st.sampled_from(("R", "ST", "T"))),
    max_size=4,
    unique_by=lambda one: one.text,
)
ROUTES = st.builds(
    route,
    st.sampled_from(("a", "b", "c-d", "e" * 63)),
    ENDPOINTS,
    port_name=st.sampled_from(("", "http", "dns-tcp")),
    protocol=st.sampled_from(("TCP", "UDP", "SCTP")),
    cluster_ip=st.integers(1, 250).map(lambda number: f"172.30.0.{number}"),
    node_port=st.sampled_from((0, 30001, 32767)),
    external_ips=st.sampled_from(((), ("192.0.2.1",), ("192.0.2.1", "192.0.2.2"))),
    load_balancer_ips=st.sampled_from(((), ("198.51.100.1",))),
    source_ranges=st.sampled_from((None, (), ("203.0.113.0/24",), ("192.168.0.0/16", "0.0.0.0/0"))),
    external_ip_sources=st.sampled_from((None, (), ("203.0.113.0/24",))),
    node_port_sources=st.sampled_from((None, (), ("192.168.0.0/16",))),
    affinity_seconds=st.sampled_from((0, 10800)),
    internal_local=st.booleans(),
    external_local=st.booleans(),
)
FACTS = st.builds(
    facts,
    masquerade_all=st.booleans(),
    local_traffic=st.sampled_from((None, PODS, LocalTraffic("bridge", "cni0"), LocalTraffic("prefix", "veth"))),
    localhost_node_ports=st.booleans(),
    nfacct_counters=st.sampled_from(((), COUNTERS)),
    large_cluster_endpoints=st.sampled_from((2, 1000)),
    behaviour=st.sampled_from((KUBE_PROXY, CORRECTED)),
    masquerade_ports=st.sampled_from(((0, 0), (1024, 29999))),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(ROUTES, max_size=5), FACTS)
def test_tables_are_closed_owned_and_canonical(routes: Any, node: DataplaneSettings) -> None:
    table = RENDERING.desired_tables(by_key(*routes), node)["chains"]
    owned = ownership(node)
    builtin: set[str] = {"ACCEPT", "DROP", "RETURN", "REJECT", "DNAT", "MASQUERADE", "MARK", ""}
    used = set()
    for key, value in table.items():
        rules = value if isinstance(value, tuple) else (key.rule,) if isinstance(key, JumpKey) else ()
        if isinstance(key, ChainKey):
            assert owned.owns(key.table, key.chain)
        for rule in rules:
            target = target_of(rule)
            assert target in builtin or ChainKey(key.table, target) in table
            used.add((key.table, target))
            assert canonical_rule(rule, "IPv4") == rule
    for key in table:
        if isinstance(key, ChainKey) and key.chain != "KUBE-PROXY-CANARY":
            fixed = key in owned.fixed
            assert fixed or (key.table, key.chain) in used or key.chain.startswith("KUBE-SEP-")


@pytest.mark.parametrize(("internal_local", "external_local"), [(True, False), (False, True)])
def test_a_chain_that_no_source_can_reach_does_not_exist(internal_local: bool, external_local: bool) -> None:
    closed = route(
        "a",
        [endpoint("10.1.0.1", 80, True, "R"), endpoint("10.1.0.2", 80, False, "R")],
        load_balancer_ips=("198.51.100.1",),
        source_ranges=(),
        internal_local=internal_local,
        external_local=external_local,
    )
    table = RENDERING.desired_tables(by_key(closed), facts())["chains"]
    prefixes = {key.chain[:9] for key in table if isinstance(key, ChainKey)}
    assert ("KUBE-SVL-" in prefixes, "KUBE-SVC-" in prefixes) == (internal_local, not internal_local)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(ROUTES, max_size=5), FACTS)
def test_services_applied_in_any_order_give_the_desired_table(routes: Any, node: DataplaneSettings) -> None:
    keyed = by_key(*routes)
    services: dict[Any, Any] = {}
    for one in keyed.values():
        services.setdefault(one.key.service, []).append(one)
    tables = DesiredTables(RENDERING, node)
    for service in sorted(services, reverse=True):
        tables.apply({service: services[service]}, services.__getitem__)
    tables.pop_changes()
    assert tables.desired == RENDERING.desired_tables(keyed, node)
