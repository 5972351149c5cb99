# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test the NodeProxyConfiguration that variables of the policy of Services give, in both roles that write one."""

from __future__ import annotations

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from tests.unit.roles.rendering import rendered

NOT_A_LIST = "shop"
CASES = [
    ({}, None),
    ({"service_proxy_policy_annotations": True}, None),
    ({"service_proxy_policy_annotations": "yes"}, None),
    ({"service_proxy_policy_annotations": None}, None),
    ({"service_proxy_policy_annotations": ""}, None),
    ({"service_proxy_policy_annotations": False}, {"annotations": False}),
    ({"service_proxy_policy_annotations": "false"}, {"annotations": False}),
    ({"service_proxy_policy_annotations": []}, {"annotations": False}),
    ({"service_proxy_policy_annotations": ["shop"]}, {"namespaces": ["shop"]}),
    ({"service_proxy_policy_annotations": NOT_A_LIST}, {"namespaces": NOT_A_LIST}),
    ({"service_proxy_node_port_sources": ["192.0.2.0/24"]}, {"nodePortSources": ["192.0.2.0/24"]}),
    ({"service_proxy_local_services": ["kube-system/dns"]}, {"localServices": ["kube-system/dns"]}),
    ({"service_proxy_external_ranges": ["198.51.100.0/24"]}, {"externalRanges": ["198.51.100.0/24"]}),
    (
        {
            "service_proxy_local_services": ["kube-system/dns"],
            "service_proxy_node_configuration": {"servicePolicy": {"localServices": ["shop/web"], "nodeWeights": True}},
        },
        {"localServices": ["kube-system/dns"], "nodeWeights": True},
    ),
    (
        {
            "service_proxy_policy_annotations": ["shop"],
            "service_proxy_node_configuration": {"servicePolicy": {"aliases": True, "namespaces": ["other"]}},
        },
        {"aliases": True, "namespaces": ["shop"]},
    ),
]


def test_variables_become_fields_of_the_configuration(tmp_path):
    """One run for all cases: a task for each prints the section as both roles compute it."""
    shown = "[__service_proxy_node_configuration.servicePolicy | default(none),"
    shown += " __agent_given_node_configuration.servicePolicy | default(none)]"
    found = rendered(tmp_path, ["service_proxy", "agent"], shown, [variables for variables, _expected in CASES])
    assert found == [[expected, expected] for _variables, expected in CASES]
