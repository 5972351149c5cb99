# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent restores kernel parameters that another program changes, and counts and logs each repair."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel.agent_node import AgentNode, endpoint_slice, service
from tests.waiting import wait_for

CLOSE_WAIT = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait")
ESTABLISHED = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established")


@pytest.fixture
def node(tmp_path):
    agent_node = AgentNode(tmp_path, "nftables")
    agent_node.store.put(service(1))
    agent_node.store.put(endpoint_slice(1))
    timeouts = {"maxPerCore": 0, "tcpEstablishedTimeout": "2h", "tcpCloseWaitTimeout": "1h"}
    agent_node.write_configuration(conntrack=timeouts)
    yield agent_node
    agent_node.close()


def test_a_changed_parameter_is_restored_counted_and_logged(node):
    node.start()
    assert (CLOSE_WAIT.read_text(), ESTABLISHED.read_text()) == ("3600\n", "7200\n")
    for parameter, kept in ((CLOSE_WAIT, "3600\n"), (ESTABLISHED, "7200\n")):
        known = node.metric("kubenode_proxy_drift_repaired_total")
        parameter.write_text("60\n")
        wait_for(lambda parameter=parameter, kept=kept: parameter.read_text() == kept, 60.0, 0.1)
        wait_for(lambda known=known: node.metric("kubenode_proxy_drift_repaired_total") == known + 1)
    assert 'kubenode_proxy_drift_repaired_total{ip_family="",kind="sysctls"} 2.0' in node.fetch("/metrics")
    assert node.status()["driftRepaired"] == 2
    assert "nf_conntrack_tcp_timeout_close_wait from 60 to 3600" in node.log
    assert node.differences()["changed"] is False
