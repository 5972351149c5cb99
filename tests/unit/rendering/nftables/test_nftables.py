# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nftables mode as values: rendering, division into transactions, and text."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import parse_attributes
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import messages
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.decoding import parse_expression
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.messages import Encoder, expression_bytes
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Planner, Transaction
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables import balancing, layout
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables import expressions as x
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.affinity import hashed_name
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import (
    RENDERING,
    service_port_entries,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    INDEX,
    ElementKey,
    Expression,
    ObjectKey,
    Rule,
    SparseList,
    list_items,
    list_value,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.rule_text import rule_text
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.text import (
    describe,
    key_parts,
    restore_text,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference

from .samples import sample_route, sample_routes, sample_settings, vip

FAMILIES = ("IPv4", "IPv6")


def own_table(port: Any, settings: Any) -> dict[Any, Any]:
    """Return the contribution of one ServicePort, by key."""
    return {key: value for _table, key, value in service_port_entries(port, settings)}


def table(family: str = "IPv4", **changes: Any) -> dict[Any, Any]:
    return RENDERING.desired_tables(sample_routes(family), sample_settings(family, **changes))["table objects"]


def lines_of(desired: dict[Any, Any], *key: Any, family: str = "IPv4") -> list[str]:
    (found,) = (each for each in desired if each == key)
    return [line.strip() for line in describe(family, found, desired[found])]


def elements(desired: dict[Any, Any], name: str) -> list[str]:
    return [
        line.split("{ ")[1][:-2]
        for key, value in desired.items()
        if key[0] in ("element", "list") and key[1] == name
        for line in describe("IPv4", key, value)
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("testing/service/tcp/http", "P4ZYZVCF-testing/service/tcp/http"),
        ("ns1/svc1/tcp/p80", "ULMVA6XW-ns1/svc1/tcp/p80"),
        ("ns1/svc1/tcp/", "6KJ5P52A-ns1/svc1/tcp/"),
    ],
)
def test_names_are_kube_proxys(text: str, name: str) -> None:
    assert hashed_name(text) == name


def test_long_names_are_cut() -> None:
    name = hashed_name("n" * 300)
    assert len(name) == 240
    assert name.endswith("nnn...")


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1025, 2048)])
def test_size_classes(count: int, size: int) -> None:
    assert balancing.at_random(count).size == size


def test_the_number_of_rules_does_not_depend_on_services() -> None:
    def chains(count: int) -> int:
        routes = [sample_route("IPv4", number, 3) for number in range(1, count + 1)]
        made = RENDERING.desired_tables({item.key: item for item in routes}, sample_settings("IPv4"))["table objects"]
        return sum(key[0] in ("chain", "set") for key in made)

    assert chains(1) == chains(200)


def test_a_cluster_ip() -> None:
    desired = table()
    assert "10.96.0.1 . tcp . 80 : goto cluster-8" in elements(desired, layout.FRONTENDS)
    assert "10.96.0.2 . udp . 53 : goto cluster-1" in elements(desired, layout.FRONTENDS)
    assert lines_of(desired, "list", layout.ENDPOINTS, b"\x0a\x60\x00\x02\x11\0\0\0\0\x35\0\0") == [
        "element ip kube-proxy service-endpoints { 10.96.0.2 . udp . 53 . 0 : 10.244.1.1 . 8080 }"
    ]
    assert "10.244.1.3 . 10.244.1.3 . tcp . 8080" in elements(desired, layout.HAIRPIN)
    assert "10.244.1.2 . 10.244.1.2 . tcp . 8080" not in elements(desired, layout.HAIRPIN)


def test_external_traffic() -> None:
    desired = table()
    frontends = elements(desired, layout.FRONTENDS)
    assert "203.0.113.1 . tcp . 80 : goto masquerade-2" in frontends
    assert "198.51.100.1 . tcp . 80 : goto external-4-2" in frontends
    assert "tcp . 30003 : goto nodeport-masquerade-2" in elements(desired, layout.NODE_PORT_FRONTENDS)
    assert lines_of(desired, "chain", "nodeport-masquerade-2") == [
        "chain nodeport-masquerade-2 {",
        'meta mark set meta mark | 0x00004000 comment "masquerade"',
        "goto nodeport-cluster-2",
        "}",
    ]
    assert lines_of(desired, "chain", "external-4-2")[1:-1] == [
        'ip saddr 10.244.0.0/15 goto cluster-4 comment "short-circuit pod traffic"',
        'fib saddr type local meta mark set meta mark | 0x00004000 comment "masquerade local traffic"',
        'fib saddr type local goto cluster-4 comment "short-circuit local traffic"',
        "goto local-2",
    ]


def test_refusals() -> None:
    desired = table()
    assert "10.96.0.7 . sctp . 80 : goto reject-chain" in elements(desired, layout.NO_ENDPOINT_SERVICES)
    assert "sctp . 30007 : goto reject-chain" in elements(desired, layout.NO_ENDPOINT_NODE_PORTS)
    assert "tcp . 30009 : drop" in elements(desired, layout.NO_ENDPOINT_NODE_PORTS)
    assert "tcp . 30009 : goto nodeport-external-1-0" in elements(desired, layout.NODE_PORT_FRONTENDS)
    assert lines_of(desired, "chain", "cluster-ips-check")[1:-1] == [
        'ip daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"',
        'fib daddr type local return comment "node-local programs"',
        'ip daddr 10.200.0.0/16 drop comment "Drop traffic to unallocated ClusterIPs"',
        'ip daddr 10.96.0.0/12 drop comment "Drop traffic to unallocated ClusterIPs"',
    ]


def test_source_ranges() -> None:
    desired = table()
    assert elements(desired, layout.FIREWALLED) == ["198.51.100.1 . tcp . 80 : goto firewall-32-23-16-8"]
    assert elements(desired, "source-ranges-23") == ["198.51.100.1 . tcp . 80 . 10.1.2.0"]
    assert lines_of(desired, "chain", "firewall-32-23-16-8")[2:-1] == [
        "ip daddr . meta l4proto . th dport . ip saddr & 255.255.254.0 @source-ranges-23 return",
        "ip daddr . meta l4proto . th dport . ip saddr & 255.255.0.0 @source-ranges-16 return",
        "ip daddr . meta l4proto . th dport . ip saddr & 255.0.0.0 @source-ranges-8 return",
        "drop",
    ]


def test_a_source_range_with_the_node_allows_the_address_itself() -> None:
    route = sample_route(
        "IPv4", 1, 0, load_balancer_ips=(vip("IPv4"),), source_ranges=("172.18.0.0/16",), externally_accessible=True
    )
    made = own_table(route, sample_settings("IPv4"))
    assert elements(made, "source-ranges-32") == ["198.51.100.1 . tcp . 80 . 198.51.100.1"]
    outside = own_table(route, sample_settings("IPv4", node_ip="192.0.2.1"))
    assert not elements(outside, "source-ranges-32")


def test_a_range_of_everything_needs_no_firewall() -> None:
    route = sample_route("IPv4", 1, 1, load_balancer_ips=(vip("IPv4"),), source_ranges=("0.0.0.0/0", "10.0.0.0/8"))
    made = own_table(route, sample_settings("IPv4"))
    assert not elements(made, layout.FIREWALLED)


def test_session_affinity() -> None:
    desired = table()
    service = "J7BZZQLX-ns/svc6/tcp/http"
    assert f"10.96.0.6 . tcp . 80 : goto service-{service}" in elements(desired, layout.FRONTENDS)
    lines = lines_of(desired, "chain", f"service-{service}")[1:-1]
    assert [line.split(" goto ")[0] for line in lines] == [
        "ip saddr @affinity-67KNUZLJ-ns/svc6/tcp/http__10.244.1.1/8080",
        "ip saddr @affinity-5I26R7Q5-ns/svc6/tcp/http__10.244.1.2/8080",
        "ip saddr @affinity-5BGW4A6H-ns/svc6/tcp/http__10.244.1.3/8080",
        "numgen random mod 3 0",
        "numgen random mod 2 0",
        "goto endpoint-5BGW4A6H-ns/svc6/tcp/http__10.244.1.3/8080",
    ]
    assert lines_of(desired, "chain", "endpoint-67KNUZLJ-ns/svc6/tcp/http__10.244.1.1/8080")[1:-1] == [
        "update @affinity-67KNUZLJ-ns/svc6/tcp/http__10.244.1.1/8080 { ip saddr }",
        "meta l4proto tcp dnat to 10.244.1.1:8080",
    ]
    assert "timeout 3h" in lines_of(desired, "set", "affinity-67KNUZLJ-ns/svc6/tcp/http__10.244.1.1/8080")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, 'ip daddr @cluster-ips ip saddr != 10.244.0.0/15 meta mark set meta mark | 0x00004000 comment "masquerade '
             'clusterIP traffic from outside cluster"'),
        ({"local_traffic": LocalTraffic("bridge", "cni0")},
         'ip daddr @cluster-ips iifname != "cni0" meta mark set meta mark | 0x00004000 comment "masquerade clusterIP '
         'traffic from outside cluster"'),
        ({"local_traffic": LocalTraffic("prefix", "veth"), "masquerade_mark": 1},
         'ip daddr @cluster-ips iifname != "veth*" meta mark set meta mark | 0x00000001 comment "masquerade clusterIP '
         'traffic from outside cluster"'),
        ({"masquerade_all": True},
         'ip daddr @cluster-ips meta mark set meta mark | 0x00004000 comment "masquerade all clusterIP traffic"'),
        ({"local_traffic": None},
         'ip saddr @cluster-ips meta mark set meta mark | 0x00004000 comment "masquerade traffic from clusterIPs"'),
    ],
)  # fmt: skip
def test_masquerading_of_cluster_ips(changes: dict[str, Any], line: str) -> None:
    assert lines_of(table(**changes), "chain", "services")[1] == line


@pytest.mark.parametrize("family", FAMILIES)
def test_node_ports_on_all_addresses(family: str) -> None:
    desired = table(family, node_port_cidrs=())
    assert ("set", "nodeport-ips") not in desired
    version, loopback = ("ip6", "::1") if family == "IPv6" else ("ip", "127.0.0.0/8")
    assert lines_of(desired, "chain", "services", family=family)[-2] == (
        f"fib daddr type local {version} daddr != {loopback} meta l4proto . th dport vmap @nodeport-frontends"
    )


def test_loopback_is_not_a_node_port_address() -> None:
    desired = table(node_port_addresses=("127.0.0.1", "172.18.0.2"))
    assert elements(desired, layout.NODE_PORT_IPS) == ["172.18.0.2"]


def test_the_first_of_two_services_keeps_an_address() -> None:
    one = sample_route("IPv4", 1, 3, external_ips=("203.0.113.1",), externally_accessible=True)
    two = sample_route("IPv4", 2, 1, external_ips=("203.0.113.1",), externally_accessible=True)
    desired = RENDERING.desired_tables({one.key: one, two.key: two}, sample_settings("IPv4"))["table objects"]
    assert "203.0.113.1 . tcp . 80 : goto masquerade-4" in elements(desired, layout.FRONTENDS)
    assert sum(line.startswith("203.0.113.1 ") for line in elements(desired, layout.ENDPOINTS)) == 3


def test_entries_are_ordered_for_creation() -> None:
    for family in FAMILIES:
        known = {("chain", "reject-chain"), ("chain", layout.LOCALHOST_REJECT)}
        known.update((key[0], key[1]) for key in layout.fixed_sets(family))
        names = {*layout.fixed_sets(family), layout.LOCALHOST_REJECTED}
        for route in sample_routes(family).values():
            for _table, key, value in service_port_entries(route, sample_settings(family)):
                if key[0] in ("set", "chain"):
                    known.add((key[0], key[1]))
                elif key[1] not in names:
                    assert ("set", key[1]) in known
                if isinstance(value, str) and value.startswith("goto "):
                    assert ("chain", value[5:]) in known


def test_lists() -> None:
    assert list_value({0: b"a", 1: b"b"}) == (b"a", b"b")
    assert list_value({0: b"a", 2: b"b"}) == SparseList(((0, b"a"), (2, b"b")))
    assert list_items(SparseList(((0, b"a"), (2, b"b")))) == [(0, b"a"), (2, b"b")]


@pytest.mark.parametrize("family", FAMILIES)
def test_expressions_survive_their_encoding(family: str) -> None:
    seen = 0
    for key, value in table(family).items():
        if key[0] == "chain":
            for rule in value.rules:
                for part in rule.expressions:
                    raw = memoryview(expression_bytes(part))
                    assert parse_expression(raw[4:]) == part
                    seen += 1
    assert seen > 100


def test_unknown_expressions_are_shown_and_not_hidden() -> None:
    rule = Rule((x.meta(x.META_MARK), Expression("quota", ((1, b"\x01"),))), 'a "quoted" comment')
    assert rule_text(rule) == '[meta 1=1 2=3] [quota 1=01] comment "a ?quoted? comment"'


def words(transaction: Transaction) -> list[str]:
    return [each.label for each in transaction.messages]


def test_a_small_change_is_one_transaction() -> None:
    before = table()
    fewer = dict(list(sample_routes("IPv4").items())[1:])
    after = RENDERING.desired_tables(fewer, sample_settings("IPv4"))["table objects"]
    for change in (difference(before, after), difference(after, before)):
        assert len(list(Planner(Encoder("IPv4")).transactions(change))) == 1


def test_removing_one_endpoint_is_one_element_and_no_verdict() -> None:
    five, four = sample_route("IPv4", 1, 8), sample_route("IPv4", 1, 7)
    settings = sample_settings("IPv4")
    change = difference(own_table(five, settings), own_table(four, settings))
    (transaction,) = Planner(Encoder("IPv4")).transactions(change)
    assert words(transaction) == ["elements of service-endpoints to be removed"]


def test_a_large_load_creates_the_hooks_last() -> None:
    desired = table()
    transactions = list(Planner(Encoder("IPv4"), most_elements=5).transactions(difference({}, desired)))
    assert len(transactions) > 5
    hooks = [name for kind, name in [key[:2] for key in desired if key[0] == "chain"] if desired[kind, name].base]
    for transaction in transactions[:-1]:
        assert not any(f"chain {hook}" in words(transaction) for hook in hooks)
    assert {f"chain {hook}" for hook in hooks} <= set(words(transactions[-1]))


def test_removal_of_the_table_is_one_message() -> None:
    (transaction,) = Planner(Encoder("IPv4")).transactions(Change(removed=table()))
    assert [each.message[0] for each in transaction.messages] == [messages.DELETE_TABLE]


def test_messages_stay_below_the_maximum_size_of_an_attribute() -> None:
    items = [(struct.pack(">I", number), True) for number in range(20_000)]
    made = list(Encoder("IPv4").add_elements("cluster-ips", items))
    assert len(made) > 1
    assert all(len(payload) < 65_536 for _kind, _flags, payload in made)
    counted = 0
    for _kind, _flags, payload in made:
        nest = parse_attributes(memoryview(payload), 4, len(payload))[3]
        counted += len(nest) // 16
    assert counted == 20_000


@pytest.mark.parametrize("family", FAMILIES)
def test_elements_are_shown_with_the_parts_of_their_set(family: str) -> None:
    desired = RENDERING.desired_tables(sample_routes(family), sample_settings(family))["table objects"]
    elements = [key for key in desired if isinstance(key, ElementKey)]
    for key in elements:
        declared = desired[ObjectKey("set", key.name)].key
        # The last part of a set of lists is the index, which its entries do not have.
        assert key_parts(family, key.name, key.key) == tuple(part for part in declared if part != INDEX), key.name
    assert {"source-ranges-", "nodeport-source-ranges-"} <= {key.name.rstrip("0123456789") for key in elements}


@pytest.mark.parametrize("family", FAMILIES)
def test_text(family: str) -> None:
    text = restore_text(family, RENDERING.desired_tables(sample_routes(family), sample_settings(family)))
    version = "ip6" if family == "IPv6" else "ip"
    name = f"table {version} kube-proxy"
    assert text.startswith(f"{name}\ndelete {name}\n{name} {{")
    assert "[" not in text.replace("dnat to [", "")
    assert restore_text(family, {"table objects": {}}) == ""
