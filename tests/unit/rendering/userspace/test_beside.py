# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rendering of userspace mode for some ServicePorts beside another mode."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import ServicePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import DesiredTables
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.beside import RenderingWithListeners
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.userspace.model import (
    ADDRESSES,
    DEVICE,
    DEVICES,
    LISTENERS,
    ListenerKey,
)
from tests.unit.rendering.iptables.routes import by_key, endpoint, route

SETTINGS = DataplaneSettings(
    family="IPv4",
    node_ip="192.168.0.2",
    node_addresses=(("eth0", "192.168.0.2"),),
    node_port_addresses=("192.168.0.2",),
)
POLICY = ServicePolicy(userspace=True)
API = route("apiserver", [endpoint("192.0.2.11", 6443)], cluster_ip="10.103.97.2", port=6443, policy=POLICY)
WEB = route("web", [endpoint("10.180.0.1")], cluster_ip="10.96.0.1", node_port=30080)


@pytest.mark.parametrize("mode", ["nftables", "iptables", "ipvs"])
def test_each_service_port_is_in_the_tables_of_one_mode(mode):
    main = mode_named(mode).rendering
    both = RenderingWithListeners(main)
    tables = both.desired_tables(by_key(API, WEB), SETTINGS)
    assert tuple(tables) == both.tables
    key = ListenerKey("tcp", "10.103.97.2", 6443)
    assert {key: value.endpoints for key, value in tables[LISTENERS].items()} == {key: (("192.0.2.11", 6443),)}
    alone = main.desired_tables(by_key(WEB), SETTINGS)
    if both.has_device:
        alone[ADDRESSES]["10.103.97.2"] = True
    else:
        assert (tables[DEVICES], tables[ADDRESSES]) == ({DEVICE: "dummy"}, {"10.103.97.2": True})
    assert {name: tables[name] for name in main.tables} == alone
    assert (both.serving(API).forwards, both.serving(WEB)) == (True, main)


@pytest.mark.parametrize("mode", ["nftables", "iptables", "ipvs"])
def test_a_change_of_one_service_equals_a_full_rendering(mode):
    both = RenderingWithListeners(mode_named(mode).rendering)
    tables = DesiredTables(both, SETTINGS)
    # From the kernel to the agent, and back.
    for item in (API._replace(policy=ServicePolicy()), API, API._replace(policy=ServicePolicy())):
        tables.apply({item.key.service: [item], WEB.key.service: [WEB]}, lambda _service: [])
        tables.pop_changes()
        assert tables.desired == both.desired_tables(by_key(item, WEB), SETTINGS)


@pytest.mark.parametrize("mode", ["nftables", "iptables", "ipvs"])
def test_addresses_of_the_node_are_in_use(mode):
    both = RenderingWithListeners(mode_named(mode).rendering)
    moved = SETTINGS._replace(node_addresses=(("eth0", "192.168.0.9"),))
    assert both.settings_in_use(SETTINGS) != both.settings_in_use(moved)
    same = SETTINGS._replace(node_addresses=(("eth1", "192.168.0.2"),))
    assert both.settings_in_use(SETTINGS) == both.settings_in_use(same)


def test_a_mode_without_the_agent_says_that_it_serves_the_service_itself():
    rendering = mode_named("nftables").rendering
    assert rendering.ignored_annotation(API, SETTINGS) == ["userspace mode needs the agent; nftables mode serves it"]
    assert RenderingWithListeners(rendering).serving(API).ignored_annotation(API, SETTINGS) == []
