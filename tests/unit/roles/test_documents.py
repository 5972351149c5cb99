# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that what the variables of the role agent set is merged over what those of service_proxy give, in all roles."""

from __future__ import annotations

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

import yaml

from tests.unit.roles.rendering import ROLES, rendered

FILE = """
mode: ""
clusterCIDR: 10.245.0.0/16
ipvs: {scheduler: lc}
---
apiVersion: kubenode.proxy/v1alpha1
kind: NodeProxyConfiguration
behaviour: kube-proxy
healthChecks: {maximum: 7, panicPercent: 3}
"""
SERVICE_PROXY = {
    "service_proxy_mode": "nftables",
    "service_proxy_configuration": {"clusterCIDR": "10.244.0.0/16", "ipvs": {"scheduler": "wrr", "strictARP": True}},
    "service_proxy_node_configuration": {"traffic": {"countBytes": True}},
    "service_proxy_behaviour": "corrected",
    "service_proxy_node_port_sources": ["192.0.2.0/24"],
    "service_proxy_network_policy": True,
}
GIVEN = {**SERVICE_PROXY["service_proxy_configuration"], "mode": "nftables"}
GIVEN_NODE = {
    "traffic": {"countBytes": True},
    "behaviour": "corrected",
    "servicePolicy": {"nodePortSources": ["192.0.2.0/24"]},
    "networkPolicy": {"enabled": True},
}


def cases(path: str) -> list:
    """Return variables, and both documents that they give."""
    return [
        ({}, {}, {}),
        (SERVICE_PROXY, GIVEN, GIVEN_NODE),
        (
            {**SERVICE_PROXY, "agent_configuration": {"metricsBindAddress": "0.0.0.0:10249"}},
            {**GIVEN, "metricsBindAddress": "0.0.0.0:10249"},
            GIVEN_NODE,
        ),
        (
            {**SERVICE_PROXY, "agent_configuration": {"mode": "ipvs", "ipvs": {"scheduler": "rr"}}},
            {**GIVEN, "mode": "ipvs", "ipvs": {"scheduler": "rr", "strictARP": True}},
            GIVEN_NODE,
        ),
        (
            {**SERVICE_PROXY, "agent_node_configuration": {"traffic": {"countConnections": True}}},
            GIVEN,
            {**GIVEN_NODE, "traffic": {"countBytes": True, "countConnections": True}},
        ),
        (
            {
                **SERVICE_PROXY,
                "agent_node_configuration": {"behaviour": "kube-proxy", "networkPolicy": {"standalone": True}},
            },
            GIVEN,
            {**GIVEN_NODE, "behaviour": "kube-proxy", "networkPolicy": {"enabled": True, "standalone": True}},
        ),
        (
            {
                **SERVICE_PROXY,
                "agent_configuration_file": path,
                "agent_configuration": {"ipvs": {"scheduler": "sh"}},
                "agent_node_configuration": {"healthChecks": {"panicPercent": 4}},
            },
            {
                "mode": "nftables",
                "clusterCIDR": "10.245.0.0/16",
                "ipvs": {"scheduler": "sh", "strictARP": True},
            },
            {
                **GIVEN_NODE,
                "behaviour": "kube-proxy",
                "apiVersion": "kubenode.proxy/v1alpha1",
                "kind": "NodeProxyConfiguration",
                "healthChecks": {"maximum": 7, "panicPercent": 4},
            },
        ),
    ]


@pytest.mark.parametrize("role", ["agent", "service_proxy"])
def test_every_variable_counts_in_every_role(tmp_path, role):
    path = tmp_path / "proxy.yaml"
    path.write_text(FILE, encoding="utf-8")
    name = "given_configuration" if role == "agent" else "configuration"
    node = "given_node_configuration" if role == "agent" else "node_configuration"
    expected = cases(str(path))
    found = rendered(
        tmp_path, [role], f"[__{role}_{name}, __{role}_{node}]", [variables for variables, *_documents in expected]
    )
    assert found == [documents for _variables, *documents in expected]


def test_the_mode_is_requested_if_a_variable_names_it(tmp_path):
    given = [
        {},
        {"service_proxy_configuration": {"mode": "ipvs"}},
        {"service_proxy_mode": "nftables", "service_proxy_configuration": {"mode": "ipvs"}},
        {"service_proxy_mode": "nftables", "agent_configuration": {"mode": "iptables"}},
    ]
    found = rendered(tmp_path, ["service_proxy"], "[__service_proxy_mode, __service_proxy_requested_mode]", given)
    assert found == [["", ""], ["ipvs", ""], ["nftables", "nftables"], ["iptables", "iptables"]]


def test_the_return_to_kube_proxy_is_in_its_mode_and_keeps_the_other_settings(tmp_path):
    text = (ROLES.parent / "playbooks/migrate.yml").read_text(encoding="utf-8")
    facts = [task.get("ansible.builtin.set_fact", {}) for task in yaml.safe_load(text)[0]["tasks"]]
    (forced,) = (item for item in facts if "__service_proxy_forced" in item)
    node = {
        **SERVICE_PROXY,
        "service_proxy_mode": "nftables",
        "migrate_back_mode": "ipvs",
        "__service_proxy_of_kube_proxy": {"configuration": {"mode": "ipvs", "nodePortAddresses": ["primary"]}},
        "agent_configuration": {"mode": "nftables", "nodePortAddresses": ["192.0.2.0/24"], "ipvs": {"scheduler": "sh"}},
        "agent_node_configuration": {"ipvsFilterBackend": "nftables", "staticServices": {"directory": "/etc/mine"}},
        "service_proxy_network_policy_standalone": True,
    }
    expression = "[__service_proxy_mode, __service_proxy_configuration.nodePortAddresses,"
    expression += " __service_proxy_configuration.ipvs.scheduler, __service_proxy_node_configuration.ipvsFilterBackend,"
    expression += " __service_proxy_static_directory, __service_proxy_policies_standalone]"
    assert rendered(tmp_path, ["service_proxy"], expression, [forced], hosts={"node": node}) == [
        ["ipvs", ["primary"], "sh", "iptables", "/etc/mine", False]
    ]


def test_every_role_protects_the_addresses_of_the_api_servers(tmp_path):
    given = {
        "service_proxy_api_servers": ["192.0.2.11", "192.0.2.12:7443", "fd00::1"],
        "agent_node_configuration": {"apiServers": {"subset": 2}},
    }
    servers = {"servers": ["192.0.2.11:6443", "192.0.2.12:7443", "[fd00::1]:6443"], "subset": 2}
    expression = "[__service_proxy_node_configuration.apiServers, __agent_full_node_configuration.apiServers]"
    assert rendered(tmp_path, ["service_proxy", "agent"], expression, [given]) == [[servers, servers]]
