# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table beside IPVS: its elements are those of kube-proxy's ipsets, and its rules have the effect of the chains."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED, KUBE_PROXY
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.stages.still_connected import (
    StillConnected,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules.module_profile import modules_for
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import model
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import OVER_NFTABLES, RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.nftables_layout import IPVS_TABLE, RESOURCE
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.own_servers import (
    RECORD_SETS,
    OwnServers,
    recorded_server,
    server_record,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import ElementKey, ObjectKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.served import served_cluster_ips
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Resource
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo
from tests.unit.rendering.iptables.routes import by_key, endpoint, route
from tests.unit.rendering.ipvs.test_tables import LOCAL, REMOTE, SETTINGS, SETTINGS_V6

LB, EXTERNAL = "5.6.7.8", "1.2.3.4"
NODES = ("192.168.0.2", "192.168.1.2", "192.168.99.11")


def table(*routes: ServicePortInfo, settings: DataplaneSettings = SETTINGS) -> dict[Any, Any]:
    return OVER_NFTABLES.desired_tables(by_key(*routes), settings)[RESOURCE]


def elements(found: dict[Any, Any], name: str, settings: DataplaneSettings = SETTINGS) -> set[str]:
    """Return the elements of a set or map as the nft program writes them."""
    lines: list[str] = []
    for key, value in found.items():
        if isinstance(key, ElementKey) and key.name == name:
            lines += OVER_NFTABLES.lines(settings.family, RESOURCE, key, value)
    return {line.split("{ ")[1].split(" }")[0] for line in lines}


def rules(found: dict[Any, Any], chain: str) -> list[str]:
    value = found[ObjectKey("chain", chain)]
    return [line.strip() for line in OVER_NFTABLES.lines(IPV4, RESOURCE, ObjectKey("chain", chain), value)[1:-1]]


def test_the_tables_besides_the_filter_backend_are_the_same():
    routes = by_key(route(node_port=3001, external_ips=(EXTERNAL,), load_balancer_ips=(LB,), endpoints=[LOCAL, REMOTE]))
    with_sets, with_table = (each.desired_tables(routes, SETTINGS) for each in (RENDERING, OVER_NFTABLES))
    for name in (model.DEVICES, model.ADDRESSES, model.VIRTUAL_SERVERS, model.REAL_SERVERS):
        assert with_sets[name] == with_table[name]
    assert set(with_table) - set(with_sets) == {RESOURCE}
    assert set(with_sets) - set(with_table) == {"sets", "set elements", "chains"}


def test_a_service_of_every_kind():
    found = table(route(node_port=3001, external_ips=(EXTERNAL,), load_balancer_ips=(LB,), endpoints=[LOCAL, REMOTE]))
    assert elements(found, "cluster-ip-frontends") == {"172.30.0.41 . tcp . 80"}
    assert elements(found, "external-ip-frontends") == {f"{EXTERNAL} . tcp . 80"}
    assert elements(found, "load-balancer-frontends") == {f"{LB} . tcp . 80"}
    assert elements(found, "service-addresses") == {"172.30.0.41", EXTERNAL, LB}
    assert elements(found, "node-ports") == {"tcp . 3001"}
    assert elements(found, "hairpin-connections") == {"10.180.0.1 . 10.180.0.1 . tcp . 80"}
    for name in ("local-node-ports", "local-external-ip-frontends", "local-load-balancer-frontends"):
        assert elements(found, name) == set()


def test_policy_local_keeps_the_source():
    found = table(
        route(
            node_port=3001,
            external_ips=(EXTERNAL,),
            load_balancer_ips=(LB,),
            external_local=True,
            health_check_node_port=3333,
            endpoints=[LOCAL],
        )
    )
    assert elements(found, "external-ip-frontends") == set()
    assert elements(found, "local-external-ip-frontends") == {f"{EXTERNAL} . tcp . 80"}
    assert elements(found, "local-load-balancer-frontends") == {f"{LB} . tcp . 80"}
    assert elements(found, "local-node-ports") == {"tcp . 3001"}
    assert elements(found, "health-check-node-ports") == {"tcp . 3333"}


def test_source_ranges_exclude_the_node_or_allow_it():
    outside = table(route(load_balancer_ips=(LB,), source_ranges=("203.0.113.0/25", "10.9.8.7/32")))
    assert elements(outside, "firewalled-frontends") == {f"{LB} . tcp . 80 : goto firewall-32-25"}
    assert elements(outside, "source-ranges-25") == {f"{LB} . tcp . 80 . 203.0.113.0"}
    assert elements(outside, "source-ranges-32") == {f"{LB} . tcp . 80 . 10.9.8.7"}
    assert elements(outside, "firewalled-for-node") == {f"{LB} . {LB} . tcp . 80"}
    inside = table(route(load_balancer_ips=(LB,), source_ranges=("192.168.0.0/16",)))
    assert elements(inside, "source-ranges-32") == {f"{LB} . tcp . 80 . {LB}"}
    assert elements(inside, "firewalled-for-node") == set()
    everyone = table(route(load_balancer_ips=(LB,), source_ranges=("0.0.0.0/0",)))
    assert elements(everyone, "firewalled-frontends") == set() == elements(everyone, "firewalled-for-node")


def test_corrected_behaviour_filters_before_ipvs_and_redirects_by_source():
    settings = SETTINGS._replace(behaviour=CORRECTED)
    found = table(
        route(node_port=3001, load_balancer_ips=(LB,), source_ranges=("203.0.113.0/24",), external_local=True),
        route(name="b", cluster_ip="172.30.0.42", internal_local=True, endpoints=[REMOTE]),
        settings=settings,
    )
    assert ObjectKey("set", "firewalled-for-node") not in found
    assert rules(found, "early-prerouting")[1:] == ["ct state new jump firewall-check"]
    dropped = "ct state new ip daddr . meta l4proto . th dport @dropped-internal drop"
    assert rules(found, "early-output")[1:] == ["ct state new jump firewall-check", dropped]
    frontends = {f"{LB} . tcp . 80", *(f"{address} . tcp . 3001" for address in NODES)}
    targets = {f"{frontend} : 172.30.0.41 . 80" for frontend in frontends}
    assert elements(found, "redirected-inside") == targets
    assert elements(found, "redirected-frontends") == frontends
    assert elements(found, "redirected-outside") == set()
    assert elements(found, "dropped-internal") == {"172.30.0.42 . tcp . 80"}


@pytest.mark.parametrize("behaviour", [KUBE_PROXY, CORRECTED])
@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS_V6], ids=["IPv4", "IPv6"])
def test_a_table_that_follows_services_equals_the_whole_rendering(settings, behaviour):
    six = settings is SETTINGS_V6
    settings = settings._replace(behaviour=behaviour)
    address, lb, sources = ("fd00::41", "fd00::99", "2001:db8::/32") if six else ("172.30.0.41", LB, "192.168.0.0/16")
    local = endpoint("fd00:10::1" if six else "10.180.0.1", local=True)
    first = route(cluster_ip=address, node_port=3001, endpoints=[local])
    second = route(cluster_ip=address, port=81, port_name="b", load_balancer_ips=(lb,), source_ranges=(sources,))
    tables = DesiredTables(OVER_NFTABLES, settings)
    service = first.key.service
    for wanted in ([first], [first, second], [second], [second._replace(external_local=True)], []):
        tables.apply({service: wanted}, lambda _name: [])
        assert tables.desired == OVER_NFTABLES.desired_tables(by_key(*wanted), settings)
    assert not [key for key in tables.desired[RESOURCE] if isinstance(key, ElementKey)]


class _Observed(Resource[Any, Any]):
    def __init__(self, entries):
        self.entries = entries

    def observe(self):
        return dict(self.entries)


def recorded(found):
    return set(filter(None, map(recorded_server, found)))


@pytest.mark.parametrize("behaviour", (KUBE_PROXY, CORRECTED))
@pytest.mark.parametrize("external", ({}, {"external_local": True}))
def test_every_virtual_server_has_a_record_in_both_filter_backends(external, behaviour):
    """The node has one external address itself, so it is not on the dummy device."""
    settings = SETTINGS._replace(behaviour=behaviour)
    extra = {"external_ips": (NODES[0], "203.0.113.9"), "load_balancer_ips": (NODES[0], "203.0.113.10"), **external}
    tcp, udp = (route(protocol=name, name=name, node_port=3001, **extra) for name in ("TCP", "UDP"))
    for rendering in (RENDERING, OVER_NFTABLES):
        tables = rendering.desired_tables(by_key(tcp, udp), settings)
        servers = set(tables[model.VIRTUAL_SERVERS])
        assert len(servers) > 8
        elements = [key for name in rendering.filter_backend.tables for key in tables[name]]
        own = OwnServers(elements, ())
        assert not [server for server in servers if server not in own]
        for near in (server._replace(port=server.port + 1) for server in servers):
            assert near not in own and near not in OwnServers(elements, tables[model.ADDRESSES])
        if rendering is OVER_NFTABLES:
            assert recorded(server_record(tables[RESOURCE])) == recorded(elements)


def test_what_is_left_records_virtual_servers_and_has_no_rule():
    found = table(route(node_port=3001), route(name="b", cluster_ip="172.30.0.42", protocol="UDP", node_port=3002))
    left = server_record(found)
    assert {(key.protocol, key.port) for key in recorded(left) if not key.address} == {("tcp", 3001), ("udp", 3002)}
    objects = {key for key in left if isinstance(key, ObjectKey)}
    assert objects == {IPVS_TABLE.key, *(ObjectKey("set", name) for name in RECORD_SETS)}
    server = model.VirtualServerKey("udp", NODES[0], 3002)
    used = {model.RealServerKey(server, "10.180.2.1", 80): 1}
    real = _Observed(dict.fromkeys(used, model.RealServer(1)))
    kept = StillConnected(real, _Observed(found), lambda: used, dict, True)
    assert recorded(kept.table(found)) == {server._replace(address="")}
    assert kept.sets({"KUBE-NODE-PORT-UDP": 1}) == {}
    assert StillConnected(real, _Observed(found), dict, dict, True).table(found) == {}


def test_the_filter_backend_nftables_needs_no_module_of_ipset_or_iptables():
    names = modules_for("ipvs", ["wlc"], filter_backend="nftables")
    assert {"ip_vs", "ip_vs_wlc", "nf_tables", "dummy"} <= set(names)
    assert not [name for name in names if name.startswith(("ip_set", "xt_", "ip_tables"))]
    assert modules_for("ipvs", ["wlc"], filter_backend="iptables") == modules_for("ipvs", ["wlc"])


def test_services_that_are_served_are_recognised():
    with_endpoint, without = route(endpoints=[REMOTE]), route(name="b", cluster_ip="172.30.0.42", node_port=3001)
    tables = OVER_NFTABLES.desired_tables(by_key(with_endpoint, without), SETTINGS)
    assert served_cluster_ips(tables.values()) == {"172.30.0.41"}
