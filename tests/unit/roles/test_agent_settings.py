# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Test that an agent has the settings with which the role service_proxy compares its node: only then it is asked."""

from __future__ import annotations

import pytest

# The environments of the oldest and newest Python do not have it.
pytest.importorskip("ansible")

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.settings_digest import settings_digest
from tests.unit.roles.rendering import rendered

CASES = [
    {},
    {"service_proxy_mode": "nftables"},
    {
        "service_proxy_mode": "ipvs",
        "service_proxy_ipvs_filter_backend": "nftables",
        "service_proxy_configuration": {
            "mode": "iptables",
            "clusterCIDR": "10.244.0.0/16",
            "ipvs": {"scheduler": "lc"},
        },
        "service_proxy_behaviour": "corrected",
        "service_proxy_node_port_sources": ["192.0.2.0/24"],
        "service_proxy_network_policy": True,
        "service_proxy_api_servers": ["192.0.2.11", "192.0.2.12"],
    },
    {"service_proxy_mode": "nftables", "service_proxy_outside_host": True},
]


def digest(configuration, mode, node_configuration):
    """Return the digest of the settings in a configuration, and the mode in an option."""
    loaded, _warnings = load(configuration, mode, node_configuration)
    return settings_digest(loaded, "", "node1", ("IPv4",), ClusterState())


def test_both_roles_give_the_same_settings(tmp_path):
    shown = "[__service_proxy_configuration, __service_proxy_requested_mode, __service_proxy_node_configuration],"
    shown += " [__agent_given_configuration, '', __agent_full_node_configuration]"
    found = rendered(tmp_path, ["service_proxy", "agent"], f"[{shown}]", CASES)
    digests = [[digest(*settings) for settings in pair] for pair in found]
    assert all(of_role == of_agent for of_role, of_agent in digests) and len(digests) == len(CASES)
    assert len({of_agent for _of_role, of_agent in digests}) == len(CASES)
