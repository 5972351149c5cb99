# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The name of a host's Node: each variable gives it to both roles, also where those of both are known."""

from __future__ import annotations

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from tests.unit.roles.rendering import rendered

CASES = [
    ({}, "h"),
    ({"agent_node_name": "a"}, "a"),
    ({"service_proxy_node_name": "s"}, "s"),
    ({"agent_node_name": "a", "service_proxy_node_name": "s"}, "a"),
    ({"service_proxy_node_name": "Node-1 "}, "node-1"),
    ({"service_proxy_configuration": {"hostnameOverride": "O"}, "service_proxy_node_name": "s"}, "o"),
    ({"agent_configuration": {"hostnameOverride": "o"}, "agent_node_name": "a"}, "o"),
    # kubeadm writes it into kube-proxy's configuration.
    ({"agent_configuration": {"hostnameOverride": ""}, "agent_node_name": "a"}, "a"),
    ({"service_proxy_node_name": "", "service_proxy_configuration": {"hostnameOverride": None}}, "h"),
    # What a host has said is data, and stays that.
    ({"agent_node_name": {"__ansible_unsafe": "{{ 40 + 2 }}"}}, "{{ 40 + 2 }}"),
]


@pytest.mark.parametrize("roles", [("agent",), ("service_proxy",), ("agent", "service_proxy")])
def test_the_variables_name_the_same_node_for_both_roles(tmp_path, roles):
    # The agent's command has the name from its file.
    written = "__agent_full_configuration.hostnameOverride | trim | lower"
    names = {"agent": ["__agent_node_name", written], "service_proxy": ["__service_proxy_node_name"]}
    expressions = [expression for role in roles for expression in names[role]]
    found = rendered(tmp_path, roles, f"[{', '.join(expressions)}]", [case for case, _name in CASES], hosts={"h": {}})
    assert found == [[name] * len(expressions) for _case, name in CASES]
