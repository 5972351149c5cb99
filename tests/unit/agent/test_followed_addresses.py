# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A change of the node's addresses changes the state that depends on them, and nothing else."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.services.proxier import Proxier
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext, all_service_ports
from tests.lab import manifests

MODES = ("iptables", "ipvs", "nftables")
CONTEXT = NodeContext("IPv4", "node1", "")
NODE = ("eth0", "192.0.2.1")
SECOND = ("eth0", "192.0.2.2")
LOOPBACK = ("lo", "127.0.0.1")
#: The address that the plugin ptp gives to the host's end of each pod's interface.
POD = ("vethab12", "10.244.1.1")
OTHER_POD = ("vethcd34", "10.244.1.1")


def settings(*addresses, cidrs=(), **more):
    """Return the settings that follow from these addresses of the node."""
    chosen = [text for _interface, text in addresses if not cidrs or text.startswith("192.0.2.")]
    return DataplaneSettings(
        "IPv4",
        "node1",
        "192.0.2.1",
        node_port_cidrs=cidrs,
        node_port_addresses=tuple(dict.fromkeys(chosen)),
        node_addresses=addresses,
        **more,
    )


def cluster(services):
    state = ClusterState()
    chance = random.Random(3)
    for number in range(services):
        kind = ("ClusterIP", "NodePort", "LoadBalancer")[number % 3]
        port = manifests.port(80, name="p", protocol=chance.choice(["TCP", "UDP"]))
        if kind != "ClusterIP":
            port["nodePort"] = 30000 + number
        # One of them is the second address of the node.
        external = ["192.0.2.2" if number % 10 == 0 else "198.51.100.1"] if number % 5 == 0 else []
        name, endpoints = f"s{number}", [manifests.endpoint(f"10.244.2.{number + 1}")]
        state.upsert(manifests.service(name, f"10.96.0.{number + 1}", [port], type=kind, externalIPs=external))
        target = manifests.port(8080, name="p", protocol=port["protocol"])
        state.upsert(manifests.endpoint_slice(name, endpoints, [target]))
    return state


def proxier(mode, state, start):
    """Return a family that holds these Services, without any kernel."""
    parts = SimpleNamespace(
        tracks_connections=True,
        rendering=mode_named(mode).rendering,
        counts_ports=True,
        stages=lambda *_arguments: [],
        adjustments=lambda *_arguments: SimpleNamespace(draining=0),
    )
    found = Proxier(load({"mode": mode}).configuration, parts, FamilyContext(start, CONTEXT, None), KernelHandles())
    found.apply_services(state, state.services)
    found.tables.pop_changes()
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cidrs", [(), ("192.0.2.0/24",)])
def test_incremental_changes_equal_a_full_rendering(mode, cidrs):
    state = cluster(30)
    family = proxier(mode, state, settings(LOOPBACK, NODE, cidrs=cidrs))
    steps = [
        settings(LOOPBACK, NODE, SECOND, cidrs=cidrs),
        settings(LOOPBACK, NODE, SECOND, POD, cidrs=cidrs),
        settings(LOOPBACK, NODE, cidrs=cidrs, service_cidrs=("10.96.0.0/16",)),
        settings(LOOPBACK, cidrs=cidrs),
        settings(LOOPBACK, NODE, cidrs=cidrs),
    ]
    for wanted in steps:
        family.follow(wanted, state)
        changes = family.tables.pop_changes()
        whole = mode_named(mode).rendering.desired_tables(all_service_ports(state, CONTEXT), wanted)
        for table, rows in whole.items():
            assert dict(family.tables.desired[table]) == dict(rows), (table, wanted)
        assert family.settings == wanted and not family.tables.pop_changes()
        assert sum(map(len, changes.values())) < 200
    assert not family.follow(steps[-1], state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cidrs", [(), ("192.0.2.0/24",)])
@pytest.mark.parametrize(
    "after",
    [
        (NODE, LOOPBACK),
        (LOOPBACK, NODE, ("eth1", "192.0.2.1")),
        (LOOPBACK, ("bond0", "192.0.2.1")),
    ],
    ids=["another order", "a second interface with it", "another interface"],
)
def test_the_same_addresses_change_nothing(mode, cidrs, after):
    state = cluster(3)
    family = proxier(mode, state, settings(LOOPBACK, NODE, cidrs=cidrs))
    assert not family.follow(settings(*after, cidrs=cidrs), state)
    assert not family.tables.pop_changes() and family.settings.node_addresses == after


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
@pytest.mark.parametrize("cidrs", [(), ("192.0.2.0/24",)])
def test_pods_change_nothing_in_modes_that_use_no_list_of_addresses(mode, cidrs):
    state = cluster(3)
    family = proxier(mode, state, settings(LOOPBACK, NODE, cidrs=cidrs))
    assert not family.follow(settings(LOOPBACK, NODE, POD, cidrs=cidrs), state)
    assert not family.follow(settings(LOOPBACK, NODE, cidrs=cidrs), state)


def test_in_ipvs_mode_only_the_first_and_the_last_pod_with_an_address_count():
    state = cluster(3)
    family = proxier("ipvs", state, settings(LOOPBACK, NODE))
    assert family.follow(settings(LOOPBACK, NODE, POD), state)
    assert not family.follow(settings(LOOPBACK, NODE, POD, OTHER_POD), state)
    assert not family.follow(settings(LOOPBACK, NODE, OTHER_POD), state)
    assert family.follow(settings(LOOPBACK, NODE), state)


def test_link_local_addresses_of_pod_interfaces_are_ignored():
    before = DataplaneSettings("IPv6", node_addresses=(("eth0", "2001:db8::1"), ("eth0", "fe80::1")))
    after = before._replace(node_addresses=(*before.node_addresses, ("vethab12", "fe80::2")))
    for mode in MODES:
        in_use = mode_named(mode).rendering.settings_in_use
        assert in_use(before) == in_use(after), mode


def test_the_cost_of_an_address_depends_only_on_its_users():
    """An address costs one element in nftables, one chain in iptables, its virtual and real servers in IPVS."""
    state = cluster(30)
    cidrs = ("192.0.2.0/24",)
    costs = {}
    for mode in MODES:
        family = proxier(mode, state, settings(LOOPBACK, NODE, cidrs=cidrs))
        assert family.follow(settings(LOOPBACK, NODE, ("eth0", "192.0.2.3"), cidrs=cidrs), state)
        changes = family.tables.pop_changes().items()
        costs[mode] = {name: (len(item.added), len(item.replaced), len(item.removed)) for name, item in changes}
    assert list(costs["nftables"].values()) == [(1, 0, 0)]
    assert list(costs["iptables"].values()) == [(0, 1, 0)]
    assert costs["ipvs"] == {"virtual servers": (20, 0, 0), "real servers": (20, 0, 0)}
