# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rendering of ipvs mode, behaviour by behaviour as kube-proxy's own tests pin it."""

from __future__ import annotations

from typing import Any, Sequence

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import CHAINS, ChainKey, JumpKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import model
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.chains import ALL_CHAINS, OWN_CHAINS
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.entries import ipvs_facts
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.sets import OWN_SETS, SETS, set_name
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import Endpoint, ServicePortInfo
from tests.unit.rendering.iptables.routes import by_key, endpoint, route

NODE_V4 = (("lo", "127.0.0.1"), ("eth0", "192.168.0.2"), ("eth1", "192.168.1.2"), ("eth2", "192.168.99.11"))
NODE_V6 = (("lo", "::1"), ("eth0", "fe80::1"), ("eth0", "2001:db8::1"), ("eth1", "2001:db8:1::2"))
REMOTE = endpoint("10.180.2.1")
LOCAL = endpoint("10.180.0.1", local=True)
SETTINGS = DataplaneSettings(
    family=IPV4,
    node_ip="192.168.0.2",
    local_traffic=LocalTraffic("cidr", "10.0.0.0/8"),
    node_addresses=NODE_V4,
)
SETTINGS_V6 = SETTINGS._replace(
    family=IPV6, node_ip="2001:db8::1", local_traffic=LocalTraffic("cidr", "fd00:10::/64"), node_addresses=NODE_V6
)

Tables = dict[str, dict[Any, Any]]


def render(*routes: ServicePortInfo, settings: DataplaneSettings = SETTINGS) -> Tables:
    return RENDERING.desired_tables(by_key(*routes), settings)


def servers(tables: Tables) -> set[str]:
    return {str(key) for key in tables[model.VIRTUAL_SERVERS]}


def behind(tables: Tables, server: str) -> set[str]:
    return {key.ip for key in tables[model.REAL_SERVERS] if str(key.server) == server}


def elements(tables: Tables, name: str) -> set[str]:
    return {key.element for key in tables[model.SET_ELEMENTS] if key.set == name}


def summary(tables: Tables, chain: str, table: str = "nat") -> list[str]:
    """Return the rules of a chain as "SET TARGET", or just the target if no set is matched."""
    found = []
    for rule in tables[CHAINS][ChainKey(table, chain)]:
        words = rule.split()
        target = words[words.index("-j") + 1]
        found.append(f"{words[words.index('--match-set') + 1]} {target}" if "--match-set" in words else target)
    return found


def test_cluster_ip_with_endpoints_and_without():
    tables = render(route(endpoints=[REMOTE, LOCAL]), route(name="svc2", cluster_ip="172.30.0.42"))
    assert tables[model.VIRTUAL_SERVERS] == {
        model.VirtualServerKey("tcp", "172.30.0.41", 80): model.VirtualServer("rr", 0, 0, 32),
        model.VirtualServerKey("tcp", "172.30.0.42", 80): model.VirtualServer("rr", 0, 0, 32),
    }
    assert behind(tables, "172.30.0.41:80/TCP") == {"10.180.0.1", "10.180.2.1"}
    assert behind(tables, "172.30.0.42:80/TCP") == set()
    assert set(tables[model.REAL_SERVERS].values()) == {model.RealServer(1, "masquerade")}
    assert set(tables[model.ADDRESSES]) == {"172.30.0.41", "172.30.0.42"}
    assert elements(tables, "KUBE-CLUSTER-IP") == {"172.30.0.41,tcp:80", "172.30.0.42,tcp:80"}
    assert elements(tables, "KUBE-IPVS-IPS") == {"172.30.0.41", "172.30.0.42"}


@pytest.mark.parametrize("endpoints", [[], [REMOTE]])
@pytest.mark.parametrize("protocol", ["TCP", "UDP", "SCTP"])
def test_node_port_serves_every_node_address_but_loopback_and_the_dummy(protocol, endpoints):
    settings = SETTINGS._replace(node_addresses=(*NODE_V4, ("kube-ipvs0", "172.30.0.41")))
    tables = render(route(protocol=protocol, node_port=3001, endpoints=endpoints), settings=settings)
    nodes = {"192.168.0.2", "192.168.1.2", "192.168.99.11"}
    expected = {f"{ip}:3001/{protocol}" for ip in nodes}
    assert servers(tables) == {*expected, f"172.30.0.41:80/{protocol}"}
    assert {server for server in expected if behind(tables, server)} == (expected if endpoints else set())
    assert set(tables[model.ADDRESSES]) == {"172.30.0.41"}
    if protocol == "SCTP":
        assert elements(tables, "KUBE-NODE-PORT-SCTP-HASH") == {f"{ip},sctp:3001" for ip in nodes}
    else:
        assert elements(tables, f"KUBE-NODE-PORT-{protocol}") == {"3001"}


def test_an_address_of_an_api_server_is_served_but_not_bound():
    external = route(external_ips=("192.0.2.1", "192.0.2.2"), endpoints=[REMOTE])
    tables = render(external._replace(unbound=("192.0.2.2",)))
    assert set(tables[model.ADDRESSES]) == {"172.30.0.41", "192.0.2.1"}
    assert {"192.0.2.1:80/TCP", "192.0.2.2:80/TCP"} <= servers(tables)


def test_node_port_udp_rules():
    tables = render(route(protocol="UDP", node_port=3001))
    assert summary(tables, "KUBE-NODE-PORT") == ["KUBE-NODE-PORT-UDP KUBE-MARK-MASQ"]
    assert summary(tables, "KUBE-NODE-PORT", "filter") == ["KUBE-HEALTH-CHECK-NODE-PORT ACCEPT"]
    assert summary(tables, "KUBE-SERVICES") == [
        "RETURN",
        "KUBE-CLUSTER-IP KUBE-MARK-MASQ",
        "KUBE-NODE-PORT",
        "KUBE-CLUSTER-IP ACCEPT",
    ]


def test_node_port_ipv6_skips_loopback_and_link_local():
    assert ipvs_facts(SETTINGS_V6).node_ips == ("2001:db8::1", "2001:db8:1::2")
    tables = render(route(cluster_ip="fd00::41", protocol="SCTP", node_port=3001), settings=SETTINGS_V6)
    assert servers(tables) == {"[fd00::41]:80/SCTP", "[2001:db8::1]:3001/SCTP", "[2001:db8:1::2]:3001/SCTP"}
    assert elements(tables, "KUBE-6-NODE-PORT-SCTP-HASH") == {"2001:db8::1,sctp:3001", "2001:db8:1::2,sctp:3001"}


def test_node_port_sctp_with_local_policy():
    tables = render(route(protocol="SCTP", node_port=3001, external_local=True, endpoints=[REMOTE, LOCAL]))
    assert behind(tables, "172.30.0.41:80/SCTP") == {"10.180.0.1", "10.180.2.1"}
    assert behind(tables, "192.168.0.2:3001/SCTP") == {"10.180.0.1"}
    assert len(elements(tables, "KUBE-NODE-PORT-SCTP-HASH")) == 3
    assert elements(tables, "KUBE-NODE-PORT-SCTP-HASH") == elements(tables, "KUBE-NODE-PORT-LOCAL-SCTP-HASH")
    assert summary(tables, "KUBE-NODE-PORT") == [
        "KUBE-NODE-PORT-LOCAL-SCTP-HASH RETURN",
        "KUBE-NODE-PORT-SCTP-HASH KUBE-MARK-MASQ",
    ]


def test_restricted_node_port_addresses_may_be_those_of_the_dummy():
    settings = SETTINGS._replace(
        node_port_cidrs=("192.168.0.0/24", "127.0.0.0/8", "172.30.0.0/16"),
        node_port_addresses=("127.0.0.1", "192.168.0.2", "172.30.0.9"),
        node_addresses=(*NODE_V4, ("kube-ipvs0", "172.30.0.9")),
    )
    tables = render(route(node_port=3001, external_local=True, endpoints=[LOCAL]), settings=settings)
    assert servers(tables) == {"172.30.0.41:80/TCP", "192.168.0.2:3001/TCP", "172.30.0.9:3001/TCP"}
    assert elements(tables, "KUBE-NODE-PORT-TCP") == elements(tables, "KUBE-NODE-PORT-LOCAL-TCP") == {"3001"}
    assert summary(tables, "KUBE-NODE-PORT") == ["KUBE-NODE-PORT-LOCAL-TCP RETURN", "KUBE-NODE-PORT-TCP KUBE-MARK-MASQ"]


def test_a_range_of_length_zero_means_all_addresses():
    settings = SETTINGS._replace(node_port_cidrs=("10.9.0.0/16", "0.0.0.0/0"), node_port_addresses=("127.0.0.1",))
    assert ipvs_facts(settings).node_ips == ("192.168.0.2", "192.168.1.2", "192.168.99.11")


def test_without_any_node_address_the_rest_of_the_port_is_skipped():
    settings = SETTINGS._replace(node_port_cidrs=("10.9.0.0/16",))
    tables = render(route(node_port=3001, health_check_node_port=30999, external_local=True), settings=settings)
    assert servers(tables) == {"172.30.0.41:80/TCP"}
    assert elements(tables, "KUBE-NODE-PORT-TCP") == elements(tables, "KUBE-HEALTH-CHECK-NODE-PORT") == set()


def test_external_ips_are_bound_unless_another_device_has_them():
    tables = render(route(external_ips=("50.60.70.81", "127.0.0.1", "192.168.99.11"), endpoints=[REMOTE]))
    externals = {"50.60.70.81", "127.0.0.1", "192.168.99.11"}
    assert servers(tables) == {f"{ip}:80/TCP" for ip in externals | {"172.30.0.41"}}
    assert set(tables[model.ADDRESSES]) == {"172.30.0.41", "50.60.70.81", "127.0.0.1"}
    assert elements(tables, "KUBE-IPVS-IPS") == set(tables[model.ADDRESSES])
    assert elements(tables, "KUBE-EXTERNAL-IP") == {f"{ip},tcp:80" for ip in externals}
    assert behind(tables, "50.60.70.81:80/TCP") == {"10.180.2.1"}


def test_an_address_that_only_the_dummy_has_is_bound():
    settings = SETTINGS._replace(node_addresses=(*NODE_V4, ("kube-ipvs0", "50.60.70.81")))
    assert "50.60.70.81" in render(route(external_ips=("50.60.70.81",)), settings=settings)[model.ADDRESSES]


def test_external_ips_with_local_policy():
    tables = render(route(external_ips=("50.60.70.81",), external_local=True, endpoints=[REMOTE, LOCAL]))
    assert behind(tables, "50.60.70.81:80/TCP") == {"10.180.0.1"}
    assert behind(tables, "172.30.0.41:80/TCP") == {"10.180.0.1", "10.180.2.1"}
    assert elements(tables, "KUBE-EXTERNAL-IP") == set()
    assert elements(tables, "KUBE-EXTERNAL-IP-LOCAL") == {"50.60.70.81,tcp:80"}
    assert summary(tables, "KUBE-SERVICES")[2:4] == ["KUBE-EXTERNAL-IP-LOCAL ACCEPT"] * 2


def test_load_balancer():
    tables = render(route(load_balancer_ips=("1.2.3.4",), endpoints=[REMOTE]))
    assert servers(tables) == {"172.30.0.41:80/TCP", "1.2.3.4:80/TCP"}
    assert elements(tables, "KUBE-LOAD-BALANCER") == {"1.2.3.4,tcp:80"}
    assert elements(tables, "KUBE-LOAD-BALANCER-LOCAL") == elements(tables, "KUBE-LOAD-BALANCER-FW") == set()
    assert summary(tables, "KUBE-SERVICES") == [
        "RETURN",
        "KUBE-LOAD-BALANCER KUBE-LOAD-BALANCER",
        "KUBE-CLUSTER-IP KUBE-MARK-MASQ",
        "KUBE-NODE-PORT",
        "KUBE-CLUSTER-IP ACCEPT",
        "KUBE-LOAD-BALANCER ACCEPT",
    ]
    assert summary(tables, "KUBE-LOAD-BALANCER") == ["KUBE-MARK-MASQ"]


def test_load_balancer_with_local_policy():
    tables = render(route(load_balancer_ips=("1.2.3.4",), external_local=True, endpoints=[REMOTE, LOCAL]))
    assert behind(tables, "1.2.3.4:80/TCP") == {"10.180.0.1"}
    assert elements(tables, "KUBE-LOAD-BALANCER") == elements(tables, "KUBE-LOAD-BALANCER-LOCAL") == {"1.2.3.4,tcp:80"}
    assert summary(tables, "KUBE-LOAD-BALANCER") == ["KUBE-LOAD-BALANCER-LOCAL RETURN", "KUBE-MARK-MASQ"]


def test_all_kinds_of_addresses_in_order():
    tables = render(route(external_ips=("50.60.70.81",), load_balancer_ips=("1.2.3.4",), node_port=3001))
    assert summary(tables, "KUBE-SERVICES") == [
        "RETURN",
        "KUBE-LOAD-BALANCER KUBE-LOAD-BALANCER",
        "KUBE-CLUSTER-IP KUBE-MARK-MASQ",
        "KUBE-EXTERNAL-IP KUBE-MARK-MASQ",
        "KUBE-EXTERNAL-IP ACCEPT",
        "KUBE-EXTERNAL-IP ACCEPT",
        "KUBE-NODE-PORT",
        "KUBE-CLUSTER-IP ACCEPT",
        "KUBE-LOAD-BALANCER ACCEPT",
    ]


@pytest.mark.parametrize(
    ("ranges", "admitted"),
    [(("10.0.0.0/8",), False), (("10.0.0.0/8", "192.168.0.0/24"), True), (("192.168.0.2/32",), True)],
)
def test_source_ranges(ranges, admitted):
    tables = render(route(load_balancer_ips=("1.2.3.4",), source_ranges=ranges, endpoints=[REMOTE]))
    cidrs = {f"1.2.3.4,tcp:80,{text[:-3] if text.endswith('/32') else text}" for text in ranges}
    assert elements(tables, "KUBE-LOAD-BALANCER") == elements(tables, "KUBE-LOAD-BALANCER-FW") == {"1.2.3.4,tcp:80"}
    assert elements(tables, "KUBE-LOAD-BALANCER-SOURCE-CIDR") == cidrs
    assert elements(tables, "KUBE-LOAD-BALANCER-SOURCE-IP") == ({"1.2.3.4,tcp:80,1.2.3.4"} if admitted else set())
    assert summary(tables, "KUBE-PROXY-FIREWALL", "filter") == ["KUBE-LOAD-BALANCER-FW KUBE-SOURCE-RANGES-FIREWALL"]
    by_source = ["KUBE-LOAD-BALANCER-SOURCE-IP RETURN"] if admitted else []
    firewall = ["KUBE-LOAD-BALANCER-SOURCE-CIDR RETURN", *by_source, "DROP"]
    assert summary(tables, "KUBE-SOURCE-RANGES-FIREWALL", "filter") == firewall
    dropped = "-s 1.2.3.4/32 -m ipvs --vproto 6 --vaddr 1.2.3.4 --vport 80 -j DROP"
    assert tables[CHAINS][ChainKey("filter", "KUBE-IPVS-OUT-FILTER")] == (() if admitted else (dropped,))


def test_health_check_node_ports_are_exactly_those_in_use():
    first = route(name="svc1", health_check_node_port=30000, load_balancer_ips=("1.2.3.4",), external_local=True)
    second = route(name="svc2", health_check_node_port=30001, cluster_ip="172.30.0.42", external_local=True)
    third = route(name="svc3", cluster_ip="172.30.0.43")
    assert elements(render(first, second, third), "KUBE-HEALTH-CHECK-NODE-PORT") == {"30000", "30001"}
    assert elements(render(second, third), "KUBE-HEALTH-CHECK-NODE-PORT") == {"30001"}


def test_affinity_is_persistence_on_every_server():
    tables = render(route(affinity_seconds=10800, node_port=3001, load_balancer_ips=("1.2.3.4",)))
    assert len(tables[model.VIRTUAL_SERVERS]) == 5
    assert set(tables[model.VIRTUAL_SERVERS].values()) == {model.VirtualServer("rr", model.PERSISTENT, 10800, 32)}


@pytest.mark.parametrize(("scheduler", "flags"), [("rr", 0), ("sh", 0), ("mh", 0x10)])
def test_schedulers(scheduler, flags):
    tables = render(route(), settings=SETTINGS._replace(scheduler=scheduler))
    assert list(tables[model.VIRTUAL_SERVERS].values()) == [model.VirtualServer(scheduler, flags, 0, 32)]


def test_an_address_is_shared_by_ports_and_removed_with_the_last():
    http, https = route(port=80), route(port_name="https", port=443)
    assert set(render(http, https)[model.ADDRESSES]) == {"172.30.0.41"}
    assert servers(render(https)) == {"172.30.0.41:443/TCP"}
    assert render()[model.ADDRESSES] == {}


@pytest.mark.parametrize(
    ("internal_local", "endpoints", "chosen"),
    [
        (False, [REMOTE, LOCAL], {"10.180.0.1", "10.180.2.1"}),
        (True, [REMOTE, LOCAL], {"10.180.0.1"}),
        (True, [REMOTE], set()),
    ],
)
def test_internal_traffic_policy(internal_local, endpoints, chosen):
    tables = render(route(internal_local=internal_local, endpoints=endpoints))
    assert behind(tables, "172.30.0.41:80/TCP") == chosen
    local = {"10.180.0.1,tcp:80,10.180.0.1"} if LOCAL in endpoints else set()
    assert elements(tables, "KUBE-LOOP-BACK") == local


def test_internal_local_without_local_endpoints_falls_back_where_the_cluster_list_is_needed():
    tables = render(route(internal_local=True, node_port=3001, endpoints=[REMOTE]))
    assert behind(tables, "172.30.0.41:80/TCP") == {"10.180.2.1"}


def states(*described: tuple[str, str, bool]) -> Sequence[Endpoint]:
    return [endpoint(f"10.180.0.{number}", local=local, state=state) for number, state, local in described]


MIXED = states(("1", "R", True), ("2", "R", True), ("3", "ST", True), ("4", "T", True), ("5", "R", False))
SERVING = states(("2", "ST", True), ("3", "ST", True), ("4", "T", False), ("5", "ST", False))
LOCAL_SERVING = states(("2", "ST", True), ("3", "ST", True), ("4", "T", True), ("5", "R", False))


@pytest.mark.parametrize(
    ("endpoints", "external_local", "cluster_ip", "vip"),
    [
        (MIXED, False, "1 2 5", "1 2 5"),
        (MIXED, True, "1 2 5", "1 2"),
        (SERVING, False, "2 3 5", "2 3 5"),
        (LOCAL_SERVING, True, "5", "2 3"),
        (states(("5", "ST", False)), True, "5", "5"),
    ],
)
def test_terminating_endpoints(endpoints, external_local, cluster_ip, vip):
    tables = render(route(load_balancer_ips=("1.2.3.4",), external_local=external_local, endpoints=endpoints))
    assert behind(tables, "172.30.0.41:80/TCP") == {f"10.180.0.{number}" for number in cluster_ip.split()}
    assert behind(tables, "1.2.3.4:80/TCP") == {f"10.180.0.{number}" for number in vip.split()}
    local = {f"{one.ip},tcp:80,{one.ip}" for one in endpoints if one.is_local}
    assert elements(tables, "KUBE-LOOP-BACK") == local


def test_hairpin_rule_comes_before_the_mark_check():
    assert summary(render(route(endpoints=[LOCAL])), "KUBE-POSTROUTING") == [
        "KUBE-LOOP-BACK MASQUERADE", "RETURN", "MARK", "MASQUERADE",
    ]  # fmt: skip
    assert summary(render(route(endpoints=[REMOTE])), "KUBE-POSTROUTING") == ["RETURN", "MARK", "MASQUERADE"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "! -s 10.0.0.0/8 {comment} -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ"),
        ({"masquerade_all": True}, "{comment} -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ"),
        ({"local_traffic": None}, "{comment} -m set --match-set KUBE-CLUSTER-IP src,dst -j KUBE-MARK-MASQ"),
        (
            {"local_traffic": LocalTraffic("prefix", "veth")},
            "! -i veth+ {comment} -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ",
        ),
    ],
)
def test_masquerading_of_cluster_ips(changes, expected):
    comment = '-m comment --comment "Kubernetes service cluster ip + port for masquerade purpose"'
    rules = render(route(), settings=SETTINGS._replace(**changes))[CHAINS][ChainKey("nat", "KUBE-SERVICES")]
    assert rules[1] == expected.format(comment=comment)


@pytest.mark.parametrize(("settings", "source"), [(SETTINGS, "127.0.0.0/8"), (SETTINGS_V6, "::1/128")])
def test_tables_without_services(settings, source):
    tables = render(settings=settings)
    assert list(tables) == list(RENDERING.tables)
    assert tables[model.DEVICES] == {"kube-ipvs0": "dummy"}
    assert len(tables[model.SETS]) == len(SETS) - len(OWN_SETS) == 17
    assert tables[CHAINS][ChainKey("nat", "KUBE-SERVICES")][0] == f"-s {source} -j RETURN"
    assert {key for key in tables[CHAINS] if isinstance(key, ChainKey)} == {
        chain for chain in ALL_CHAINS if chain not in OWN_CHAINS
    }
    assert len([key for key in tables[CHAINS] if isinstance(key, JumpKey)]) == 9
    assert summary(tables, "KUBE-IPVS-FILTER", "filter")[-1].endswith(" REJECT")


def test_set_names_of_ipv6_are_cut():
    names = {name: set_name(name, IPV6) for name in SETS}
    assert names["KUBE-LOAD-BALANCER-SOURCE-CIDR"] == "KUBE-6-LOAD-BALANCER-SOURCE-CID"
    assert names["KUBE-NODE-PORT-LOCAL-SCTP-HASH"] == "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS"
    assert max(map(len, names.values())) == 31
    assert len(set(names.values())) == len(SETS)


def test_ports_shared_by_services_are_merged():
    first = route(name="a", external_ips=("50.60.70.81",), endpoints=[REMOTE])
    second = route(name="b", cluster_ip="172.30.0.42", external_ips=("50.60.70.81",), endpoints=[LOCAL])
    tables = render(first, second)
    assert behind(tables, "50.60.70.81:80/TCP") == {"10.180.0.1", "10.180.2.1"}
