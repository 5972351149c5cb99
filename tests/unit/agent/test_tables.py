# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables that are kept up to date Service by Service hold what a rendering of everything gives."""

from __future__ import annotations

import random

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.sync.summaries import Summaries
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.sync.tables import desired_tables
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.merged import ABSENT, MergedTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.render import (
    desired_tables as all_iptables,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.tables import desired_tables as all_ipvs
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.tables import (
    desired_tables as all_nftables,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import (
    RoutingContext,
    all_routes,
    routes_for_service,
)

ALL = {"iptables": all_iptables, "ipvs": all_ipvs, "nftables": all_nftables}
SETTINGS = DataplaneSettings(
    "IPv4",
    "node1",
    "192.0.2.1",
    local_traffic=LocalTraffic("cidr", "10.244.0.0/16"),
    node_addresses=(("eth0", "192.0.2.1"), ("lo", "127.0.0.1")),
    node_port_addresses=("192.0.2.1", "127.0.0.1"),
    large_cluster_endpoints=25,
)
CONTEXT = RoutingContext("IPv4", "node1", "a")


def random_service(chance, number):
    kind = chance.choice(["ClusterIP", "NodePort", "LoadBalancer"])
    ports = [
        {"name": f"p{index}", "protocol": chance.choice(["TCP", "UDP"]), "port": 80 + index}
        for index in range(chance.randint(1, 3))
    ]
    if kind != "ClusterIP":
        for index, port in enumerate(ports):
            port["nodePort"] = 30000 + 10 * number + index
    spec = {
        "type": kind,
        "clusterIP": f"10.96.0.{number + 1}",
        "clusterIPs": [f"10.96.0.{number + 1}"],
        "ports": ports,
        "internalTrafficPolicy": chance.choice(["Cluster", "Local"]),
        "sessionAffinity": chance.choice(["None", "None", "ClientIP"]),
    }
    if chance.random() < 0.3:
        spec["externalIPs"] = [f"198.51.100.{chance.randint(1, 4)}"]
    status = {}
    if kind == "LoadBalancer":
        status = {"loadBalancer": {"ingress": [{"ip": f"203.0.113.{number + 1}"}]}}
        spec["externalTrafficPolicy"] = chance.choice(["Cluster", "Local"])
        if spec["externalTrafficPolicy"] == "Local":
            spec["healthCheckNodePort"] = 32000 + number
        if chance.random() < 0.5:
            spec["loadBalancerSourceRanges"] = chance.choice([["10.0.0.0/8"], ["192.0.2.0/24", "10.1.0.0/16"]])
    return {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"namespace": "default", "name": f"s{number}"},
        "spec": spec,
        "status": status,
    }


def random_slice(chance, number):
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "namespace": "default",
            "name": f"s{number}-x",
            "labels": {"kubernetes.io/service-name": f"s{number}"},
        },
        "addressType": "IPv4",
        "ports": [
            {"name": f"p{index}", "protocol": protocol, "port": 8080 + index}
            for index in range(3)
            for protocol in ("TCP", "UDP")
        ],
        "endpoints": [
            {
                "addresses": [f"10.244.{chance.randint(1, 2)}.{chance.randint(1, 30)}"],
                "nodeName": chance.choice(["node1", "node2"]),
                "conditions": {"ready": chance.random() < 0.8},
            }
            for _ in range(chance.randint(0, 4))
        ],
    }


@pytest.mark.parametrize("mode", sorted(ALL))
@pytest.mark.parametrize("seed", range(6))
def test_random_changes_end_in_what_a_whole_rendering_gives(mode, seed):
    chance = random.Random(seed)
    state = ClusterState()
    tables = desired_tables(mode, SETTINGS)
    kernel = {}
    for table, change in tables.take_changes().items():
        kernel[table] = dict(change.added)
    for _round in range(40):
        dirty = set()
        for _change in range(chance.randint(1, 3)):
            number = chance.randint(0, 7)
            raw = random_service(chance, number) if chance.random() < 0.5 else random_slice(chance, number)
            dirty |= state.delete(raw) if chance.random() < 0.2 else state.upsert(raw)
        for service in dirty:
            tables.put(service, routes_for_service(state, service, CONTEXT))
        if tables.stale:
            tables.settle()
            for service in state.services:
                tables.put(service, routes_for_service(state, service, CONTEXT))
        for table, change in tables.take_changes().items():
            rows = kernel.setdefault(table, {})
            for key, value in change.removed.items():
                assert rows.pop(key) == value
            for key, (old, new) in change.replaced.items():
                assert rows[key] == old != new
                rows[key] = new
            for key, value in change.added.items():
                assert key not in rows
                rows[key] = value
        wanted = ALL[mode](all_routes(state, CONTEXT), SETTINGS)
        for table, rows in wanted.items():
            assert dict(tables.desired[table]) == dict(rows), table
            assert kernel.get(table, {}) == dict(rows), table


def test_a_change_of_one_service_touches_its_own_keys_only():
    state = ClusterState()
    chance = random.Random(1)
    tables = desired_tables("iptables", SETTINGS._replace(large_cluster_endpoints=10**6))
    for number in range(100):
        for raw in (random_service(chance, number), random_slice(chance, number)):
            raw["metadata"]["name"] = raw["metadata"]["name"]
            for service in state.upsert(raw):
                tables.put(service, routes_for_service(state, service, CONTEXT))
    tables.take_changes()
    raw = random_slice(chance, 3)
    (service,) = state.upsert(raw)
    tables.put(service, routes_for_service(state, service, CONTEXT))
    change = tables.take_changes()["chains"]
    assert 0 < len(change) < 60
    for key in [*change.added, *change.removed]:
        assert key.chain.startswith("KUBE-")


def test_the_journal_keeps_the_first_value_and_forgets_nothing():
    merged = MergedTables(["t"])
    merged.replace("a", [("t", "key", 1)])
    assert merged.take_journal() == {"t": {"key": ABSENT}}
    merged.replace("a", [("t", "key", 2)])
    merged.replace("a", [("t", "key", 3)])
    assert merged.take_journal() == {"t": {"key": 1}}
    merged.replace("a", [])
    merged.put("t", "derived", 5)
    assert merged.take_journal() == {"t": {"key": 3, "derived": ABSENT}}
    assert merged.tables == {"t": {"derived": 5}}


def test_summaries_count_what_gauges_and_conntrack_need():
    state = ClusterState()
    raw = random_service(random.Random(0), 1)
    raw["spec"].update(
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        internalTrafficPolicy="Local",
        healthCheckNodePort=32001,
        ports=[{"name": "p0", "protocol": "UDP", "port": 53, "nodePort": 30001}],
    )
    slice_ = random_slice(random.Random(0), 1)
    slice_["endpoints"] = [{"addresses": ["10.244.1.9"], "nodeName": "node2", "conditions": {"ready": True}}]
    state.upsert(raw)
    (service,) = state.upsert(slice_)
    summaries = Summaries()
    assert summaries.put(service, routes_for_service(state, service, CONTEXT)) is True
    assert summaries.put(service, routes_for_service(state, service, CONTEXT)) is False
    assert (summaries.totals.no_local_internal, summaries.totals.no_local_external) == (1, 1)
    assert summaries.health_ports == {service: 32001}
    assert summaries.health_counts == {service: 0}
    slice_["endpoints"].append({"addresses": ["10.244.1.8"], "nodeName": "node1", "conditions": {"ready": True}})
    state.upsert(slice_)
    assert summaries.put(service, routes_for_service(state, service, CONTEXT)) is True
    assert summaries.health_counts == {service: 1}
    assert (summaries.totals.no_local_internal, summaries.totals.endpoints) == (0, 2)
    assert summaries.put(service, ()) is False
    assert summaries.totals == Summaries().totals and summaries.health_ports == {} == summaries.health_counts
