# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""After a reboot, before any convergence: the kernel is prepared, and both nodes serve."""

from __future__ import annotations

import json
from datetime import datetime

from tests.molecule_support.checks import within

MODULES = {"node1": {"ip_vs", "ip_vs_rr", "ip_vs_wlc", "nf_conntrack"}, "node2": {"ip_vs", "ip_vs_rr", "nf_conntrack"}}


def test_node_has_rebooted(node, scenario):
    before = json.loads((scenario.place(node.lab) / "before.json").read_text(encoding="utf-8"))["boot"]
    assert node.host.file("/proc/sys/kernel/random/boot_id").content_string.strip() != before


def test_modules_were_loaded_at_boot(node):
    assert node.host.service("systemd-modules-load").is_running
    loaded = set(node.host.check_output("lsmod | cut -d' ' -f1").split())
    assert MODULES[node.name] <= loaded


def test_parameters_of_the_modules_were_set_at_boot(node):
    assert node.host.sysctl("net.ipv4.vs.conntrack") == 1
    assert node.host.sysctl("net.netfilter.nf_conntrack_max") == 50000
    assert node.host.sysctl("net.netfilter.nf_conntrack_tcp_timeout_established") == 86400


def test_agent_serves_again_on_its_own(nodes):
    node = nodes["node1"]
    within(180, "the Service answers", lambda: node.ask("10.96.0.10", 80, timeout=2).outcome == "answer")
    assert node.host.service("kubenode-proxy").is_running


def test_without_an_agent_the_last_confirmed_state_is_served(nodes):
    node = nodes["node2"]
    assert node.host.service("kubenode-proxy-boot").is_running
    servers = node.host.check_output("ipvsadm -L -n")
    # The pod of the node itself would have another address now.
    assert "10.96.0.10" in servers and "10.244.1.2:8080" in servers and "10.244.2.2:8080" not in servers
    within(60, "the Service answers", lambda: node.ask("10.96.0.10", 80, timeout=2).outcome == "answer")
    assert {node.ask("10.96.0.10", 80).backend for _ in range(4)} == {"pod-1-2"}
    # That of the change which was not confirmed is 10.0.0.0/8.
    assert "10.244.0.0/16" in node.host.check_output("iptables-legacy-save")


def test_the_drain_continues_for_the_rest_of_its_time(nodes):
    drain = json.loads(nodes["node1"].host.run("kubenode-proxy drain status --json").stdout)
    assert drain["drained"] and 0 < drain["remainingSeconds"] < 3600
    since, until = (datetime.fromisoformat(drain[name].replace("Z", "+00:00")) for name in ("since", "until"))
    assert abs((until - since).total_seconds() - 3600) <= 1


def test_no_change_waits_and_none_is_reverted(nodes):
    node = nodes["node2"]
    assert not node.host.file("/run/kubenode-proxy-confirm").exists
    assert "kubenode-proxy-revert" not in node.host.check_output("systemctl list-timers --all")
    assert "kubenode-proxy-revert" not in node.host.check_output("journalctl --boot --output=short")
