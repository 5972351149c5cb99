# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rendering of ipvs mode with corrected behaviour, one predicate at a time."""

from __future__ import annotations

import itertools

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.ipvs_schedulers import FALLBACK
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import ServicePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED, KUBE_PROXY
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.canonical import (
    canonical_rule,
    target_of,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import CHAINS, ChainKey, JumpKey
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs import model
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.chains import ownership
from tests.unit.rendering.ipvs.test_tables import (
    LOCAL,
    REMOTE,
    SETTINGS,
    SETTINGS_V6,
    behind,
    elements,
    endpoint,
    render,
    route,
)

VIP = "1.2.3.4"
EXTERNAL = {"load_balancer_ips": (VIP,), "external_local": True, "node_port": 30001}


def with_hole(**predicates):
    """Return the settings with some predicates changed, all others as for kube-proxy."""
    return SETTINGS._replace(behaviour=KUBE_PROXY._replace(**predicates))


def redirects(tables, chain):
    rules = tables[CHAINS].get(ChainKey("nat", chain), ())
    return {rule.split()[1]: rule.split("-j ")[1] for rule in rules if "DNAT" in rule or "ACCEPT" in rule}


def test_connections_from_inside_go_to_the_cluster_ip():
    tables = render(route(endpoints=[LOCAL, REMOTE], **EXTERNAL), settings=with_hole(inside_reaches_all=True))
    to_all = "DNAT --to-destination 172.30.0.41:80"
    assert redirects(tables, "KUBE-IPVS-INSIDE") == {
        f"{address}/32": to_all for address in (VIP, "192.168.0.2", "192.168.1.2", "192.168.99.11")
    }
    assert redirects(tables, "KUBE-IPVS-OUTSIDE") == {}
    assert behind(tables, f"{VIP}:80/TCP") == {LOCAL.ip}
    assert behind(tables, "172.30.0.41:80/TCP") == {LOCAL.ip, REMOTE.ip}
    services = tables[CHAINS][ChainKey("nat", "KUBE-SERVICES")]
    assert services[1:4] == (
        "-s 10.0.0.0/8 -j KUBE-IPVS-INSIDE",
        "-m addrtype --src-type LOCAL -j KUBE-IPVS-INSIDE",
        "-j KUBE-IPVS-OUTSIDE",
    )


def test_where_the_cluster_ip_is_limited_too_those_from_outside_go_there():
    one = route(endpoints=[LOCAL, REMOTE], internal_local=True, **EXTERNAL)
    tables = render(one, settings=with_hole(inside_reaches_all=True))
    assert redirects(tables, "KUBE-IPVS-OUTSIDE")[f"{VIP}/32"] == "DNAT --to-destination 172.30.0.41:80"
    assert redirects(tables, "KUBE-IPVS-INSIDE")[f"{VIP}/32"] == "ACCEPT"
    assert behind(tables, f"{VIP}:80/TCP") == {LOCAL.ip, REMOTE.ip}
    assert behind(tables, "172.30.0.41:80/TCP") == {LOCAL.ip}


def test_policy_local_without_local_endpoints_drops():
    settings = with_hole(local_means_local=True)
    tables = render(route(endpoints=[REMOTE], internal_local=True, **EXTERNAL), settings=settings)
    assert not tables[model.REAL_SERVERS]
    assert elements(tables, "KUBE-INTERNAL-NO-LOCAL") == {"172.30.0.41,tcp:80"}
    assert f"{VIP},tcp:80" in elements(tables, "KUBE-EXTERNAL-NO-LOCAL")
    assert tables[CHAINS][ChainKey("mangle", "KUBE-IPVS-OUT-FILTER")]
    nowhere = render(route(internal_local=True, **EXTERNAL), settings=settings)
    assert not elements(nowhere, "KUBE-INTERNAL-NO-LOCAL") | elements(nowhere, "KUBE-EXTERNAL-NO-LOCAL")
    assert "KUBE-INTERNAL-NO-LOCAL" not in render(route(endpoints=[REMOTE]))[model.SETS]


def test_health_check_node_ports_are_closed_on_virtual_addresses():
    chain = ChainKey("filter", "KUBE-IPVS-FILTER")
    rules = render(settings=with_hole(virtual_addresses_are_closed=True))[CHAINS][chain]
    assert set(render()[CHAINS][chain]) - set(rules) == {"-m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN"}


def test_a_terminating_endpoint_keeps_its_udp_flows_at_weight_zero():
    terminating = endpoint("10.180.3.1", state="ST")
    for protocol, kept in (("UDP", True), ("SCTP", True), ("TCP", False)):
        one = route(endpoints=[REMOTE, terminating], protocol=protocol)
        found = render(one, settings=with_hole(terminating_keep_flows=True))[model.REAL_SERVERS]
        weights = {REMOTE.ip: 1, terminating.ip: 0} if kept else {REMOTE.ip: 1}
        assert {key.ip: value.weight for key, value in found.items()} == weights
        assert len(render(one)[model.REAL_SERVERS]) == 1


@pytest.mark.parametrize("scheduler", ["mh", "sh", "lc"])
def test_clients_of_a_real_server_without_new_connections_fall_back(scheduler):
    one = route(endpoints=[LOCAL, REMOTE], policy=ServicePolicy(scheduler=scheduler))
    flags = []
    for predicate in (False, True):
        settings = with_hole(hashing_falls_back=predicate)._replace(schedulers=frozenset((scheduler,)))
        flags += {value.flags for value in render(one, settings=settings)[model.VIRTUAL_SERVERS].values()}
    assert flags == [0, 0 if scheduler == "lc" else FALLBACK]


@pytest.mark.parametrize("allowed", [True, False])
def test_ranges_decide_about_the_source_of_a_connection_of_the_node(allowed):
    source = "192.168.0.0/24" if allowed else "203.0.113.0/24"
    one = route(endpoints=[REMOTE], load_balancer_ips=(VIP,), source_ranges=(source,))
    tables = render(one, settings=with_hole(ranges_hold_for_node=True))
    assert elements(tables, "KUBE-LOAD-BALANCER-SOURCE-IP") == ({f"{VIP},tcp:80,{VIP}"} if allowed else set())
    assert tables[CHAINS][ChainKey("filter", "KUBE-IPVS-OUT-FILTER")] == ()
    assert ChainKey("filter", "KUBE-PROXY-FIREWALL") not in tables[CHAINS]
    assert tables[CHAINS][ChainKey("mangle", "KUBE-PROXY-FIREWALL")]
    jumps = [key for key in tables[CHAINS] if isinstance(key, JumpKey)]
    hooks = {key.chain for key in jumps if key.rule.endswith("KUBE-PROXY-FIREWALL")}
    assert hooks == {"PREROUTING", "OUTPUT"}


@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS_V6], ids=["IPv4", "IPv6"])
def test_chains_of_corrected_behaviour_are_owned_closed_and_canonical(settings):
    six = settings is SETTINGS_V6
    settings = settings._replace(behaviour=CORRECTED, masquerade_ports=(1024, 29999))
    addresses = ("2001:db8:5::1", "fd00:30::1") if six else (VIP, "172.30.0.41")
    routes = [
        route(
            f"s{number}",
            [endpoint("fd00:10::1" if six else "10.180.0.1", local=local)],
            protocol=protocol,
            cluster_ip=addresses[1],
            port=80 + number,
            internal_local=internal,
            load_balancer_ips=addresses[:1],
            external_local=True,
            node_port=30000 + number,
            source_ranges=("2001:db8::/32" if six else "192.168.0.0/16",),
            node_port_sources=(),
        )
        for number, (local, internal, protocol) in enumerate(
            itertools.product((True, False), (True, False), ("TCP", "UDP", "SCTP"))
        )
    ]
    table = render(*routes, settings=settings)[CHAINS]
    builtin = {"ACCEPT", "DROP", "RETURN", "REJECT", "DNAT", "MASQUERADE", "MARK"}
    for key, value in table.items():
        if isinstance(key, ChainKey):
            assert ownership().owns(key.table, key.chain)
        for rule in (key.rule,) if isinstance(key, JumpKey) else value:
            assert target_of(rule) in builtin or ChainKey(key.table, target_of(rule)) in table
            assert canonical_rule(rule, settings.family) == rule
