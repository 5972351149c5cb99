# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role agent on a node with systemd: installed, kept running, changed, removed."""

from __future__ import annotations

import signal

import pytest

from .cluster import POD, Cluster, endpoint_slice, service
from .node import collection, play, wait_for

UNIT = "kubenode-proxy.service"
# What would be told of a node on which nothing of the agent is left.
TRACES = (
    *("/etc/kubenode-proxy", "/usr/local/lib/kubenode-proxy", "/usr/local/bin/kubenode-proxy"),
    *("/etc/systemd/system/kubenode-proxy.service", "/etc/tmpfiles.d/kubenode-proxy.conf"),
    *("/var/lib/kubenode-proxy", "/run/kubenode-proxy"),
    "/usr/local/share/bash-completion/completions/kubenode-proxy",
    "/etc/systemd/system/multi-user.target.wants/kubenode-proxy.service",
)


@pytest.fixture(scope="module")
def node(start):
    return start("agent")


@pytest.fixture(scope="module")
def cluster(node):
    cluster = Cluster(node.scratch, [node.name])
    yield cluster
    cluster.go_away()


@pytest.fixture(scope="module")
def variables(cluster):
    return {
        "agent_kubeconfig": str(cluster.kubeconfig),
        "agent_configuration": {"mode": "iptables"},
    }


@pytest.fixture(scope="module")
def installed(node, variables):
    """The role has run on a fresh node, after a preview that has changed nothing."""
    preview = node.role("agent", variables, "--check")
    assert preview.changed > 5
    assert node.run("ls", *TRACES, check=False).stdout == ""
    return node.role("agent", variables)


def rules(node):
    return node.output("iptables-save", "-t", "nat")


def start_of(node):
    """Which process the unit is, and when it was started."""
    found = node.unit(UNIT, "MainPID", "ExecMainStartTimestampMonotonic")
    assert found["MainPID"] != "0"
    return found


def endpoint_is_served(node, address):
    return wait_for(f"{address} is an endpoint", lambda: f"--to-destination {address}:8080" in rules(node))


def test_installed_agent_is_active_and_serves(node, installed):
    assert node.unit(UNIT, "ActiveState", "Type", "UnitFileState") == {
        "Type": "notify",
        "ActiveState": "active",
        "UnitFileState": "enabled",
    }
    endpoint_is_served(node, POD)
    assert "10.96.0.10/32" in rules(node)


def test_second_run_changes_and_restarts_nothing(node, installed, variables):
    before = start_of(node)
    again = node.role("agent", variables)
    assert (again.changed, again.changed_tasks) == (0, [])
    assert start_of(node) == before


def test_agent_reports_the_hash_of_the_source_that_the_controller_has(node, installed):
    from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.archive import pack

    expected = pack(str(collection() / "ansible_collections/kubenode/proxy/plugins/module_utils")).version
    assert node.output("cat", "/usr/local/lib/kubenode-proxy/VERSION").strip() == expected
    assert expected in node.output("kubenode-proxy", "--version")
    look = {"kubenode.proxy.service_proxy_info": {"configuration": {"mode": "iptables"}}, "register": "found"}
    play([node], [look, {"ansible.builtin.assert": {"that": f"found.agent_version == '{expected}'"}}], {})


def test_agent_is_not_root_and_has_two_capabilities(node, installed):
    status = node.output("cat", f"/proc/{start_of(node)['MainPID']}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split()[0] != "0"
    assert {int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {1 << 12 | 1 << 13}
    assert fields["NoNewPrivs"] == "1"


def test_security_score(node, installed):
    lines = node.output("systemd-analyze", "security", "--no-pager", UNIT).splitlines()
    overall = next(line for line in lines if "Overall exposure level" in line)
    assert float(overall.split(":")[1].split()[0]) <= 2.5, "\n".join(lines)


def test_secrets_are_for_the_agent_only(node, installed):
    listing = node.output("stat", "-c", "%a %U %G", "/etc/kubenode-proxy", "/etc/kubenode-proxy/kubeconfig")
    assert listing.splitlines() == ["750 root kubenode-proxy", "640 root kubenode-proxy"]


def test_change_in_the_cluster_reaches_the_kernel(node, installed, cluster):
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.3"]))
    endpoint_is_served(node, "10.244.1.3")


def test_changed_configuration_is_read_without_a_restart(node, installed, variables):
    before = start_of(node)
    # The tests that follow go on with it.
    variables["agent_configuration"]["iptables"] = {"masqueradeAll": True}
    result = node.role("agent", variables)
    assert "kubenode.proxy.agent : Reload" in result.changed_tasks
    assert "kubenode.proxy.agent : Restart" not in result.changed_tasks
    assert start_of(node)["MainPID"] == before["MainPID"]
    wait_for("everything is masqueraded", lambda: "-d 10.96.0.10/32" in _masqueraded(node))


def _masqueraded(node):
    return "\n".join(line for line in rules(node).splitlines() if line.endswith("-j KUBE-MARK-MASQ"))


def test_killed_agent_is_started_again_and_leaves_the_dataplane(node, installed):
    before, rules_before = start_of(node), _chains(node)
    node.run("kill", f"-{signal.SIGKILL.value}", before["MainPID"])
    wait_for("a new process", lambda: node.unit(UNIT, "MainPID")["MainPID"] not in ("0", before["MainPID"]))
    assert _chains(node) == rules_before
    wait_for("active", lambda: node.unit(UNIT, "ActiveState")["ActiveState"] == "active")
    assert _chains(node) == rules_before


def _chains(node):
    """The rules without counters and times."""
    return sorted(line for line in rules(node).splitlines() if line.startswith("-A"))


def test_changed_engine_restarts_and_leaves_the_dataplane(node, installed, variables):
    before, rules_before = start_of(node), _chains(node)
    node.run("sh", "-c", "echo >>/usr/local/lib/kubenode-proxy/kubenode-proxy.pyz")
    result = node.role("agent", variables)
    assert "kubenode.proxy.agent : Restart" in result.changed_tasks
    assert start_of(node) != before
    assert _chains(node) == rules_before


def test_foreign_removal_is_repaired(node, installed):
    before = _chains(node)
    node.run("iptables", "-t", "nat", "-F", "KUBE-SERVICES")
    wait_for("repaired", lambda: _chains(node) == before, 10)


def test_lock_of_iptables_is_shared_with_the_agent(node, installed):
    assert node.output("stat", "-c", "%a %U %G", "/run/xtables.lock").split() == ["660", "root", "kubenode-proxy"]


def test_api_server_away_for_a_while(node, installed, cluster):
    before, rules_before = start_of(node), _chains(node)
    cluster.go_away()
    cluster.store.put(service("late", "10.96.0.11"))
    cluster.store.put(endpoint_slice("late", ["10.244.1.9"]))
    assert _chains(node) == rules_before
    cluster.come_back()
    wait_for("the change made meanwhile", lambda: "--to-destination 10.244.1.9:8080" in rules(node), 40)
    assert start_of(node) == before


def test_legacy_iptables_needs_no_root_either(node, installed):
    node.run("systemctl", "stop", UNIT)
    for program in ("iptables", "ip6tables"):
        node.run("update-alternatives", "--set", program, f"/usr/sbin/{program}-legacy")
    node.run("sh", "-c", "nft flush ruleset && rm -f /run/xtables.lock")
    node.run("systemctl", "start", UNIT)
    endpoint_is_served(node, POD)
    assert "KUBE-" in node.output("iptables-legacy-save") and "KUBE-" not in node.output("nft", "list", "ruleset")
    assert node.output("stat", "-c", "%a %G", "/run/xtables.lock").split() == ["660", "kubenode-proxy"]


def test_boot_without_the_api_server(node, installed, cluster):
    node.run("systemctl", "stop", UNIT)
    node.run("systemctl", "start", UNIT)
    rules_before = _chains(node)
    cluster.go_away()
    node.restart()
    wait_for("the rules of before", lambda: _chains(node) == rules_before, 30)
    assert node.unit(UNIT, "ActiveState")["ActiveState"] == "active"
    cluster.come_back()
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.10"]))
    wait_for("what the server says now", lambda: "--to-destination 10.244.1.10:8080" in rules(node), 60)


def test_absent_leaves_nothing_but_the_dataplane_unless_asked(node, installed, variables):
    packages = node.output("dpkg-query", "-W")
    rules_before = _chains(node)
    node.role("agent", {**variables, "agent_state": "absent"})
    assert node.run("ls", *TRACES, check=False).stdout == ""
    assert node.run("getent", "passwd", "kubenode-proxy", check=False).stdout == ""
    assert node.unit(UNIT, "LoadState")["LoadState"] == "not-found"
    assert _chains(node) == rules_before
    again = node.role("agent", {**variables, "agent_state": "absent", "agent_remove_dataplane": True})
    # To remove the dataplane takes the lock in the runtime directory, which is then gone again.
    assert again.changed_tasks == [
        "kubenode.proxy.agent : Remove everything that it has programmed",
        "kubenode.proxy.agent : Remove the files",
    ]
    assert "KUBE-" not in rules(node)
    assert node.run("ls", *TRACES, check=False).stdout == ""
    assert node.output("dpkg-query", "-W") == packages


def test_without_a_way_to_the_api_server_nothing_is_started(node):
    result = node.role("agent", {}, failing=True)
    assert "give agent_kubeconfig" in " ".join(result.output.split())
