# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``state: rendered`` with network policies: beside the Services, and where another program serves them."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.render import render
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Request
from tests.netpol import cases


@pytest.mark.parametrize(
    ("policy", "tools"),
    [
        ({}, {"nft IPv4", "nft IPv6"}),
        ({"enabled": True}, {"nft IPv4", "nft IPv6", "nft inet"}),
        ({"enabled": True, "standalone": True}, {"nft inet"}),
    ],
)
def test_the_table_of_policies_is_rendered_where_they_are_enforced(policy, tools):
    cluster = ClusterState.from_objects(list(cases.steps("default-deny-ingress")[0].objects.values()))
    configuration = load({"mode": "nftables"}, node_source={"networkPolicy": policy}).configuration
    texts = render(Request(cluster, configuration, node_name="node1"))
    assert set(texts) == tools
    if policy:
        assert "table inet kubenode-network-policy {" in texts["nft inet"]
        assert "set isolated-in4 {" in texts["nft inet"] and "10.244.1.12" in texts["nft inet"]
