# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state that an administrator finds on a converged node."""

from __future__ import annotations

import json

import pytest

AGENTS = ("node1", "node2")


@pytest.mark.parametrize("name", AGENTS)
def test_agent_runs_and_is_enabled_at_boot(nodes, name):
    host = nodes[name].host
    unit = host.service("kubenode-proxy")
    assert unit.is_running
    assert unit.is_enabled
    assert [
        process.user for process in host.process.filter(comm="python3") if "kubenode-proxy.pyz" in process.args
    ] == ["kubenode-proxy"]


@pytest.mark.parametrize("name", AGENTS)
def test_agent_is_healthy_and_has_metrics(nodes, name):
    host = nodes[name].host
    assert host.run("curl -sf http://127.0.0.1:10256/healthz").rc == 0
    metrics = host.check_output("curl -sf http://127.0.0.1:10249/metrics")
    synced = [
        line for line in metrics.splitlines() if line.startswith("kubeproxy_sync_proxy_rules_duration_seconds_count")
    ]
    assert synced
    assert float(synced[0].split()[-1]) >= 1


@pytest.mark.parametrize("name, status, local", [("node1", "200", 1), ("node2", "503", 0)])
def test_health_check_port_reports_whether_a_local_endpoint_exists(nodes, name, status, local):
    node = nodes[name]
    printed = node.host.check_output(f"curl -s -w '\\n%{{http_code}}' http://{node.address}:32000/")
    body, code = printed.rsplit("\n", 1)
    assert code == status
    assert json.loads(body)["localEndpoints"] == local


@pytest.mark.parametrize("name", AGENTS)
def test_secrets_are_not_world_readable(nodes, name):
    file = nodes[name].host.file("/etc/kubenode-proxy/kubeconfig")
    assert (file.user, file.group, oct(file.mode)) == ("root", "kubenode-proxy", "0o640")


def test_single_run_leaves_one_systemd_service_for_the_next_boot(nodes):
    host = nodes["node3"].host
    units = host.check_output("systemctl list-unit-files --no-legend 'kubenode-proxy*' | cut -d' ' -f1").split()
    assert units == ["kubenode-proxy-boot.service"]
    assert host.service("kubenode-proxy-boot").is_enabled and not host.service("kubenode-proxy-boot").is_running
    # The group is that of the role schedule where it is installed.
    snapshot = host.file("/var/lib/kubenode-proxy/snapshot.json.gz")
    assert (snapshot.group, oct(snapshot.mode)) == ("root", "0o640")


def test_kernel_is_prepared_for_the_next_boot(node):
    parameters = node.host.file("/etc/sysctl.d/99-kubenode-proxy.conf").content_string
    for key, value in {
        "net.ipv4.conf.all.route_localnet": 1,
        "net.netfilter.nf_conntrack_tcp_timeout_established": 86400,
    }.items():
        assert f"{key} = {value}\n" in parameters
        assert node.host.sysctl(key) == value
    assert "nf_conntrack" in node.host.file("/etc/modules-load.d/kubenode-proxy.conf").content_string.split()
