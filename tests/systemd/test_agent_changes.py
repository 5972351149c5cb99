# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of the configuration and files of an agent that runs: read without a restart, or refused as a whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.installed import KEPT_OFF_FILE
from tests.waiting import wait_for

from .agent import UNIT, rules, start_of, status
from .node import run_playbook

# For a change of one variable by the playbook, on one host.
MOST_TASKS, MOST_SKIPPED = 28, 31
RELOAD = "kubenode.proxy.agent : Reload the agent"
COMMAND = "/usr/local/bin/kubenode-proxy"
RECORD = "/var/lib/kubenode-proxy/installed"


@pytest.fixture(scope="module")
def node(start):
    return start("changes")


@pytest.fixture(scope="module")
def installed(node, variables):
    return node.role("agent", variables)


def _masqueraded_mark(node):
    return "\n".join(line for line in rules(node).splitlines() if line.startswith("-A KUBE-MARK-MASQ"))


def _masqueraded(node):
    return "\n".join(line for line in rules(node).splitlines() if line.endswith("-j KUBE-MARK-MASQ"))


def test_changed_configuration_is_read_without_a_restart(node, installed, variables):
    before, recorded = start_of(node), node.output("stat", "-c", "%n %z", RECORD)
    # The following tests keep this configuration.
    variables["agent_configuration"]["iptables"] = {"masqueradeAll": True}
    result = node.role("agent", variables)
    assert RELOAD in result.changed_tasks
    assert "kubenode.proxy.agent : Restart" not in result.changed_tasks
    assert start_of(node)["MainPID"] == before["MainPID"]
    wait_for(lambda: "-d 10.96.0.10/32" in _masqueraded(node), what="everything is masqueraded")
    # What is installed agrees with the record, so no task has inspected each file.
    assert node.output("stat", "-c", "%n %z", RECORD) == recorded


@pytest.mark.full
@pytest.mark.parametrize("change", [("chmod", "700", COMMAND), ("rm", "/etc/tmpfiles.d/kubenode-proxy.conf")])
def test_a_file_that_somebody_has_changed_is_installed_again(node, installed, variables, change):
    node.run(*change)
    result = node.role("agent", variables)
    assert result.changed > 0 and node.output("stat", "-c", "%a", COMMAND).strip() == "755"
    assert node.role("agent", variables).changed_tasks == []


def test_a_change_of_one_variable_runs_few_tasks(node, installed, variables):
    """Every task costs the controller some 0.1 s of processor time on each host, a skipped one a third of that."""
    changed = {"mode": "iptables", "iptables": {"minSyncPeriod": "2s"}}
    given = {**variables, "agent_configuration": changed, "kernel_unchangeable": "warn"}
    done = run_playbook([node], "kubenode.proxy.agent", given, {})[node.name]
    ran, skipped = re.search(rf"^{node.name} .* ok=(\d+) .* skipped=(\d+)", done.output, re.MULTILINE).groups()
    assert "kubenode.proxy.agent : Write the configuration" in done.changed_tasks
    assert int(ran) <= MOST_TASKS and int(skipped) <= MOST_SKIPPED, (ran, skipped)
    node.role("agent", variables)
    # The playbook has also prepared the kernel for the next boot.
    node.role("kernel", {"kernel_state": "absent"})


def test_a_configuration_that_the_agent_refuses_is_not_written(node, installed, variables):
    path = "/etc/kubenode-proxy/config.yaml"
    before, process = node.output("cat", path), start_of(node)
    wrong = {**variables, "agent_node_configuration": {"healthChecks": {"maximum": 500}}}
    result = node.role("agent", wrong, failing=True)
    reason = "NodeProxyConfiguration: healthChecks.maximum: 500 is not between 0 and 200"
    assert f'"msg": "{reason}"' in result.output and result.changed == 0
    assert node.output("cat", path) == before
    assert node.role("agent", variables).changed_tasks == []
    assert start_of(node) == process


def test_a_reload_of_a_configuration_that_the_agent_refuses_fails(node, installed, variables):
    path = "/etc/kubenode-proxy/config.yaml"
    process, read = start_of(node), node.output("stat", "-c", "%z", "/run/kubenode-proxy/started")
    node.run("sed", "-i.good", "s/^mode:.*/mode: wrong/", path)
    assert node.run("systemctl", "reload", UNIT, check=False).returncode != 0
    # The role knows by this time that the agent has not read the file.
    assert node.output("stat", "-c", "%z", "/run/kubenode-proxy/started") == read
    node.run("mv", f"{path}.good", path)
    node.run("systemctl", "reload", UNIT)
    assert node.output("stat", "-c", "%z", "/run/kubenode-proxy/started") != read
    assert start_of(node) == process


def test_a_configuration_that_the_agent_cannot_apply_fails_the_role_until_it_can(node, installed, variables, cluster):
    process = start_of(node)
    other = {**variables, "agent_configuration": {**variables["agent_configuration"], "hostnameOverride": "other"}}
    # The Node has the host's address, so the name is right, and a change of it a mistake.
    (registered,) = (each for each in cluster.nodes() if each["metadata"]["name"] == node.name)
    addresses = [{"type": "InternalIP", "address": node.output("hostname", "-I").split()[0]}]
    cluster.store.put({**registered, "status": {**registered["status"], "addresses": addresses}})
    wait_for(lambda: not status(node)["ignored"], what="the agent knows the host's Node")
    refused = node.role("agent", other, failing=True)
    assert f"this host is Node {node.name}, and its agent would take it for other" in refused.output, refused.output
    cluster.store.put(registered)
    wait_for(lambda: status(node)["ignored"], what="another host may be the Node of that name")
    # Valid, but the agent must read the other Node first.
    cluster.go_away()
    result = node.role("agent", other, failing=True)
    reason = "the agent does not have its new configuration in effect: the previous configuration is kept: "
    assert status(node)["node"] != "other" and f"{reason}{status(node)['reloadError']}" in result.output
    assert "reload failed, the previous configuration is in effect" in node.unit(UNIT, "StatusText")["StatusText"]
    assert reason in node.role("agent", other, failing=True).output
    cluster.come_back()
    assert node.role("agent", other).changed_tasks == [RELOAD]
    assert status(node)["node"] == "other" and not status(node)["reloadError"]
    node.role("agent", variables)
    assert status(node)["node"] != "other"
    assert start_of(node) == process, "an agent does not start with a configuration that it cannot apply"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"agent_kubeconfig": "/nope"}, "agent_kubeconfig: /nope on the controller cannot be read: No such file"),
        ({"agent_kubeconfig": "/etc/hostname"}, "agent_kubeconfig: /etc/hostname: is not a valid kubeconfig: "),
        ({"agent_python": "/nope"}, "agent_python: /nope: cannot be run: No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_before_anything_is_written(node, installed, variables, wrong, reason):
    other = {**variables, "agent_configuration": {"mode": "iptables"}, **wrong}
    result = node.role("agent", other, failing=True)
    assert reason in result.output and result.changed == 0


def test_files_of_a_run_that_failed_are_read_after_the_next_one(node, installed, variables):
    # The following tests keep this configuration, too.
    variables["agent_configuration"]["iptables"]["masqueradeBit"] = 15
    other = node.scratch / "other-kubeconfig"
    other.write_text(Path(variables["agent_kubeconfig"]).read_text() + "# Another one.\n")
    # A file that is a mount point cannot be replaced.
    path = "/etc/kubenode-proxy/kubeconfig"
    node.run("mount", "--bind", "-o", "ro", path, path)
    node.role("agent", {**variables, "agent_kubeconfig": str(other)}, failing=True)
    node.run("umount", path)
    before = start_of(node)
    assert "/0x8000" not in _masqueraded_mark(node), "the run must fail before its handlers"
    assert node.role("agent", variables).changed_tasks == [RELOAD]
    assert start_of(node) == before
    wait_for(lambda: "/0x8000" in _masqueraded_mark(node), what="the new bit")
    node.run("touch", f"/etc/systemd/system/{UNIT}")
    task = "kubenode.proxy.agent : Restart the agent if it has not read all files"
    assert node.role("agent", variables).changed_tasks == [task]
    assert start_of(node) != before


@pytest.mark.full
def test_a_change_of_the_mode_whose_state_cannot_be_saved_is_saved_by_the_next_run(node, installed, variables):
    """It is what an operator would return to."""
    history = "/var/lib/kubenode-proxy-history"
    other = {**variables, "agent_configuration": {"mode": "nftables"}, "kernel_unchangeable": "warn"}
    node.run("mkdir", "-p", "-m", "0700", history)
    node.run("mount", "-t", "tmpfs", "-o", "size=4k,mode=0700", "tmpfs", history)
    node.run("sh", "-c", f"head -c 8192 /dev/zero >{history}/full", check=False)
    refused = node.role("agent", other, failing=True)
    assert "No space left on device" in refused.output, refused.output
    assert status(node)["mode"] == "iptables"
    node.run("umount", history)
    node.role("agent", other)
    wait_for(lambda: status(node)["mode"] == "nftables", what="the other mode")
    assert " iptables" in node.output(COMMAND, "rollback", "--list")
    node.role("agent", variables)
    wait_for(lambda: status(node)["mode"] == "iptables", what="the mode of before")


def test_an_agent_for_network_policies_only_leaves_no_host_without_a_service_proxy(node, installed, variables):
    """Neither does a migration that has no other agent, nor a host that kube-proxy is kept off."""
    given = {**variables, "kernel_unchangeable": "warn", "agent_configuration": {"mode": "iptables"}}
    # The cluster has no pods, which would matter with policies.
    only = {
        **given,
        "service_proxy_network_policy_standalone": True,
        "service_proxy_ignore_findings": ["incomplete-snapshot"],
    }

    def played(playbook, given, failing=True):
        access = {"service_proxy_kubeconfig": variables["agent_kubeconfig"]}
        return run_playbook([node], f"kubenode.proxy.{playbook}", {**given, **access}, {}, failing=failing)[node.name]

    refused = played("agent", only)
    assert "no other service proxy runs, and with networkPolicy.standalone nothing" in refused.output, refused.output
    assert refused.changed == 0
    accepted = {**only, "service_proxy_ignore_findings": ["incomplete-snapshot", "kept-off"]}
    done = played("agent", accepted, failing=False)
    assert f"{node.name}: network policies only are enforced by the agent" in done.output, done.output
    assert status(node)["mode"] == "none"
    assert f"{node.name}: its agent enforces network policies only: remove it first" in played("migrate", given).output
    assert "nothing would serve the Services without kube-proxy" in played("migrate", only).output
    back = played("migrate", {**given, "migrate_direction": "back"})
    assert "kube-proxy is not kept off this host, so there is nothing to give back" in back.output
    # What was compared is not what the agent does.
    assert "(compared in iptables mode, but its agent runs in none mode" in played("verify", given).output
    # Its process may not run at the moment.
    refused = played("cleanup", given)
    assert "leaves this node's Services to another program, whose rules would be lost" in refused.output
    assert refused.changed == 0
    process = start_of(node)
    node.run("touch", KEPT_OFF_FILE)
    for playbook in ("agent", "verify"):
        refused = played(playbook, only)
        assert (
            f"kube-proxy is kept off this node ({KEPT_OFF_FILE}), and with networkPolicy.standalone" in refused.output
        ), refused.output
        assert playbook == "verify" or refused.changed == 0, (playbook, refused.changed_tasks)
    assert "kube-proxy is kept off this node" in played("cleanup", only).output
    assert start_of(node) == process
    node.run("rm", KEPT_OFF_FILE)
    node.role("agent", variables)
    node.role("kernel", {"kernel_state": "absent"})
    assert status(node)["mode"] == "iptables"
    node.run("systemctl", "stop", UNIT)
    node.run("touch", KEPT_OFF_FILE)
    cleaned = node.run(COMMAND, "cleanup", check=False)
    assert cleaned.returncode == 1 and "so nothing would serve it" in cleaned.stderr
    node.run("rm", KEPT_OFF_FILE)
    node.run("systemctl", "start", UNIT)
