# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables that are updated Service by Service equal a full rendering."""

from __future__ import annotations

import random

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.proxier import Proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.summaries import Summaries
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import BEHAVIOURS
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import ServicePolicySettings
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.mode import Adjustments
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.mode import IptablesRendering
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.mode import OVER_NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.merged import ABSENT, MergedTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings, LocalTraffic
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import (
    NodeContext,
    all_service_ports,
    count_endpoints,
    service_ports_of,
)
from tests.lab import manifests

MODES = ("iptables", "ipvs", "nftables", "userspace")
SETTINGS = DataplaneSettings(
    "IPv4",
    "node1",
    "192.0.2.1",
    local_traffic=LocalTraffic("cidr", "10.244.0.0/16"),
    node_addresses=(("eth0", "192.0.2.1"), ("lo", "127.0.0.1")),
    node_port_addresses=("192.0.2.1", "127.0.0.1"),
    large_cluster_endpoints=15,
)
CONTEXT = NodeContext("IPv4", "node1", "a")


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
    ports = [
        manifests.port(8080 + index, name=f"p{index}", protocol=protocol)
        for index in range(3)
        for protocol in ("TCP", "UDP")
    ]
    endpoints = [
        manifests.endpoint(
            f"10.244.{chance.randint(1, 2)}.{chance.randint(1, 30)}",
            chance.choice(["node1", "node2"]),
            ready=chance.random() < 0.8,
        )
        for _ in range(chance.randint(0, 4))
    ]
    return manifests.endpoint_slice(f"s{number}", endpoints, ports)


def annotate(chance, raw):
    """Annotate half of the Services with a scheduler, and half of the slices with a weight."""
    prefix = "kubenode.proxy/"
    requests = {
        f"{prefix}scheduler": chance.choice(["mh", "lc", "twos", "none"]),
        f"{prefix}scheduler-flags": "mh-port",
    }
    given = requests if raw["kind"] == "Service" else {f"{prefix}weight": chance.choice(["0", "2", "5", "x"])}
    if chance.random() < 0.5:
        raw["metadata"]["annotations"] = given


def name_again(chance, raw):
    """Name addresses of some Services once more: the cluster IP, or one as external IP and load balancer address."""
    if raw["kind"] != "Service" or chance.random() < 0.5:
        return
    addresses = [raw["spec"]["clusterIP"], "203.0.113.77"]
    raw["spec"]["externalIPs"] = chance.sample(addresses, chance.randint(1, 2))
    if raw["spec"]["type"] == "LoadBalancer":
        ingress = chance.sample(addresses, chance.randint(1, 2))
        raw["status"] = {"loadBalancer": {"ingress": [{"ip": address} for address in ingress]}}
        sources = {"kubenode.proxy/allowed-sources": "192.0.2.0/24"} if chance.random() < 0.5 else {}
        raw["metadata"].setdefault("annotations", {}).update(sources)


def random_node(chance):
    node = manifests.node(chance.choice(["node1", "node2"]), "192.0.2.1", "10.244.1.0/24")
    node["metadata"]["annotations"] = {"kubenode.proxy/weight": chance.choice(["0", "1", "1", "3"])}
    return node


def apply(tables, state, services, size=None, context=CONTEXT):
    """Apply Services to tables as a proxier does."""
    ports = {service: service_ports_of(state, service, context) for service in services}
    tables.apply(ports, lambda service: service_ports_of(state, service, context), size)


def rendering_named(mode):
    return OVER_NFTABLES if mode == "ipvs over nftables" else mode_named(mode).rendering


@pytest.mark.parametrize("mode", (*MODES, "ipvs over nftables"))
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("behaviour", BEHAVIOURS.values(), ids=list(BEHAVIOURS))
def test_random_changes_equal_a_full_rendering(mode, seed, behaviour):
    chance, policies = random.Random(seed), random.Random(seed)
    context = CONTEXT._replace(behaviour=behaviour, policy=ServicePolicySettings(node_weights=True))
    settings = SETTINGS._replace(behaviour=behaviour, schedulers=frozenset(("mh", "wrr", "wlc", "jhash")))
    state = ClusterState()
    rendering = rendering_named(mode)
    tables = DesiredTables(rendering, settings)
    kernel = {}
    crossings, before = 0, True
    for table, change in tables.pop_changes().items():
        kernel[table] = dict(change.added)
    for _round in range(40):
        dirty = set()
        for _change in range(chance.randint(1, 3)):
            number = chance.randint(0, 7)
            raw = random_service(chance, number) if chance.random() < 0.5 else random_slice(chance, number)
            annotate(policies, raw)
            name_again(policies, raw)
            dirty |= state.delete(raw) if chance.random() < 0.2 else state.upsert(raw)
        if policies.random() < 0.2:
            dirty |= state.upsert(random_node(policies))
        apply(tables, state, dirty, context=context)
        for table, change in tables.pop_changes().items():
            rows = kernel.setdefault(table, {})
            for key, value in change.removed.items():
                assert rows.pop(key) == value
            for key, (old, new) in change.replaced.items():
                assert rows[key] == old != new
                rows[key] = new
            for key, value in change.added.items():
                assert key not in rows
                rows[key] = value
        ports = all_service_ports(state, context)
        small = sum(len(port.endpoints) for port in ports.values()) <= SETTINGS.large_cluster_endpoints
        crossings, before = crossings + (small != before), small
        wanted = rendering.desired_tables(ports, settings)
        assert list(wanted) == list(tables.desired) == list(rendering.tables)
        for table, rows in wanted.items():
            assert dict(tables.desired[table]) == dict(rows), table
            assert kernel.get(table, {}) == dict(rows), table
        for key in ports:
            for table, entry, value in tables.programmed(key):
                assert table in rendering.parts or tables.desired[table][entry] == value
                assert rendering.lines("IPv4", table, entry, value) or not value
    assert crossings > 0


@pytest.mark.parametrize("mode", MODES)
def test_the_count_of_endpoints_is_declared_where_it_decides_anything(mode):
    """Elsewhere the agent does not count them."""
    rendering = mode_named(mode).rendering
    settings = {rendering.at_size(SETTINGS, endpoints) for endpoints in (0, 10, 10**6)}
    assert (len(settings) > 1) is rendering.counts_endpoints


def test_a_change_of_one_service_touches_its_own_keys_only():
    state = ClusterState()
    chance = random.Random(1)
    tables = DesiredTables(mode_named("iptables").rendering, SETTINGS._replace(large_cluster_endpoints=10**6))
    for number in range(100):
        for raw in (random_service(chance, number), random_slice(chance, number)):
            apply(tables, state, state.upsert(raw))
    tables.pop_changes()
    raw = random_slice(chance, 3)
    (service,) = state.upsert(raw)
    apply(tables, state, [service])
    change = tables.pop_changes()["chains"]
    assert 0 < len(change) < 60
    for key in [*change.added, *change.removed]:
        assert key.chain.startswith("KUBE-")


class Counting(IptablesRendering):
    """Count how often each ServicePort is rendered."""

    def __init__(self):
        self.rendered = {}

    def entries(self, service_port, context):
        self.rendered[service_port.key] = self.rendered.get(service_port.key, 0) + 1
        return super().entries(service_port, context)


def full_state(services):
    state, chance = ClusterState(), random.Random(5)
    for number in range(services):
        for raw in (random_service(chance, number), random_slice(chance, number)):
            state.upsert(raw)
    return state


@pytest.mark.parametrize("limit", [10, 10**6])
def test_each_service_port_is_rendered_once_on_either_side_of_the_limit(limit):
    state, rendering = full_state(40), Counting()
    tables = DesiredTables(rendering, SETTINGS._replace(large_cluster_endpoints=limit))
    apply(tables, state, state.services)
    assert set(rendering.rendered) == set(all_service_ports(state, CONTEXT))
    assert set(rendering.rendered.values()) == {1}


@pytest.mark.parametrize("limit", [10, 10**6])
def test_services_that_arrive_in_parts_are_rendered_once_if_the_size_is_given(limit):
    state, rendering = full_state(40), Counting()
    settings = SETTINGS._replace(large_cluster_endpoints=limit)
    tables = DesiredTables(rendering, settings)
    size = sum(count_endpoints(state, service, "IPv4") for service in state.services)
    services = sorted(state.services)
    for start in range(0, len(services), 7):
        apply(tables, state, services[start : start + 7], size)
    assert set(rendering.rendered.values()) == {1}
    tables.pop_changes()
    assert tables.desired == IptablesRendering().desired_tables(all_service_ports(state, CONTEXT), settings)


def test_crossing_the_limit_renders_each_service_port_once_more():
    state, rendering = full_state(20), Counting()
    ports = all_service_ports(state, CONTEXT)
    limit = sum(len(port.endpoints) for port in ports.values())
    tables = DesiredTables(rendering, SETTINGS._replace(large_cluster_endpoints=limit))
    apply(tables, state, state.services)
    assert set(rendering.rendered.values()) == {1}
    raw = random_slice(random.Random(2), 3)
    raw["metadata"]["name"] = "s3-more"
    raw["endpoints"] = [{"addresses": ["10.244.9.9"], "nodeName": "node1", "conditions": {"ready": True}}]
    apply(tables, state, state.upsert(raw))
    assert set(rendering.rendered.values()) == {2}


@pytest.mark.parametrize("seed", range(10))
def test_endpoints_are_counted_without_expanding_them(seed):
    chance, state = random.Random(seed), ClusterState()
    for number in range(30):
        raw = random_slice(chance, number % 10)
        raw["metadata"]["name"] += str(number)
        state.upsert(raw)
        state.upsert(random_service(chance, number % 10))
    claimed = random_service(chance, 3)
    state.upsert(claimed)
    claimed["metadata"]["name"] = "s-second"
    state.upsert(claimed)
    assert state.conflicts
    for service in state.services:
        expanded = sum(len(port.endpoints) for port in service_ports_of(state, service, CONTEXT))
        assert count_endpoints(state, service, "IPv4") == expanded
        assert count_endpoints(state, service, "IPv6") == 0


def test_an_entry_that_another_service_decides_is_not_shown_as_programmed():
    merged = DesiredTables(mode_named("ipvs").rendering, SETTINGS)
    state, chance = ClusterState(), random.Random(0)
    for number, affinity in ((1, "None"), (2, "ClientIP")):
        raw = random_service(chance, number)
        raw["spec"].update(
            type="ClusterIP",
            ports=[{"name": "p0", "protocol": "TCP", "port": 80}],
            externalIPs=["198.51.100.9"],
            sessionAffinity=affinity,
        )
        state.upsert(raw)
    apply(merged, state, state.services)
    first, second = sorted(all_service_ports(state, CONTEXT))
    (key,) = [key for key in merged.desired["virtual servers"] if key.address == "198.51.100.9"]
    assert key in [entry for _table, entry, _value in merged.programmed(first)]
    assert key not in [entry for _table, entry, _value in merged.programmed(second)]


def test_the_journal_keeps_the_first_value_and_forgets_nothing():
    merged = MergedTables(["t"])
    merged.replace("a", [("t", "key", 1)])
    assert merged.pop_journal() == {"t": {"key": ABSENT}}
    merged.replace("a", [("t", "key", 2)])
    merged.replace("a", [("t", "key", 3)])
    assert merged.pop_journal() == {"t": {"key": 1}}
    merged.replace("a", [])
    merged.put("t", "derived", 5)
    assert merged.pop_journal() == {"t": {"key": 3, "derived": ABSENT}}
    assert merged.tables == {"t": {"derived": 5}}


@pytest.mark.parametrize(("mode", "counted"), [("iptables", 2), ("nftables", 2), ("ipvs", 1)])
def test_services_without_local_endpoints_are_counted_as_kube_proxy_counts_them(monkeypatch, mode, counted):
    """It counts ServicePorts, but in ipvs mode the names of Services."""
    without_kernel = mode_named(mode)
    monkeypatch.setattr(without_kernel, "stages", lambda *_arguments: [])
    monkeypatch.setattr(without_kernel, "adjustments", lambda *_arguments: Adjustments())
    policies = {"externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local"}
    ports = [manifests.port(80 + number, name=f"p{number}", nodePort=30001 + number) for number in range(2)]
    raw = manifests.service("web", "10.96.0.1", ports, type="NodePort", **policies)
    remote = manifests.endpoint_slice("web", [manifests.endpoint("10.244.1.9", "node2")], ports)
    state = ClusterState.from_objects([raw, remote])
    proxier = Proxier(load({}).configuration, without_kernel, FamilyContext(SETTINGS, CONTEXT, None), KernelHandles())
    proxier.apply_services(state, list(state.services))
    totals = proxier.summaries.totals
    assert (totals.no_local_internal, totals.no_local_external, totals.ports) == (counted, counted, 2)
    state.upsert(manifests.endpoint_slice("web", [manifests.endpoint("10.244.1.9", "node1")], ports))
    proxier.apply_services(state, list(state.services))
    assert (proxier.summaries.totals.no_local_internal, proxier.summaries.totals.no_local_external) == (0, 0)


def test_summaries_count_what_gauges_and_health_checks_need():
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
    for _again in range(2):
        summaries.put(service, service_ports_of(state, service, CONTEXT))
    assert (summaries.totals.no_local_internal, summaries.totals.no_local_external) == (1, 1)
    assert summaries.health_ports == {service: 32001}
    assert summaries.health_counts == {service: 0}
    slice_["endpoints"].append({"addresses": ["10.244.1.8"], "nodeName": "node1", "conditions": {"ready": True}})
    state.upsert(slice_)
    summaries.put(service, service_ports_of(state, service, CONTEXT))
    assert summaries.health_counts == {service: 1}
    assert (summaries.totals.no_local_internal, summaries.totals.endpoints) == (0, 2)
    summaries.put(service, ())
    assert summaries.totals == Summaries().totals and summaries.health_ports == {} == summaries.health_counts
