# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role agent on a node with systemd: install, keep running, change, remove."""

from __future__ import annotations

import re
import shutil
import signal

import pytest
import yaml

from tests.apiserver.tls import write_kubeconfig
from tests.molecule_support.portrait import differences
from tests.waiting import wait_for

from .agent import UNIT, KubeProxy, dataplane, log_since, mark, picture, rules, start_of, status
from .cluster import POD, endpoint_slice
from .node import collection, play, run_playbook

# By user and whether it may load modules (docs/security.md).
EXPOSURES = {
    ("kubenode-proxy", False): 1.8,
    ("kubenode-proxy", True): 2.4,
    ("root", False): 2.1,
    ("root", True): 2.7,
}
LIBRARY = "/usr/local/lib/kubenode-proxy"
COMMAND = "/usr/local/bin/kubenode-proxy"
ARCHIVE = f"{LIBRARY}/kubenode-proxy.pyz"
# The path of a module that was imported from bytecode ends in .pyc.
WHERE_FROM = "import sys; sys.path.insert(0, sys.argv[1]); from kubenode_proxy.command import cli; print(cli.__file__)"
# Kernel state, as it appears in the differences of a picture.
OF_THE_DATAPLANE = re.compile("(iptables|ip6tables|nftables): new: ")


@pytest.fixture(scope="module")
def node(start):
    return start("agent")


@pytest.fixture(scope="module")
def before(node):
    """Provide the state of the node with nothing installed."""
    return picture(node)


@pytest.fixture(scope="module")
def installed(node, before, variables):
    """Apply the role to a fresh node, after a check-mode run that must not change anything."""
    preview = node.role("agent", variables, "--check")
    assert preview.changed > 5
    assert differences(before, picture(node)) == []
    return node.role("agent", variables)


def test_nothing_is_installed_beside_kube_proxy(node, before, variables):
    with KubeProxy(node) as kube_proxy:
        refused = node.role("agent", variables, failing=True)
        assert "kube-proxy runs on this node (process " in refused.output and "[kube-proxy]" in refused.output
        assert "with kubenode.proxy.migrate" in refused.output and refused.changed == 0
        assert kube_proxy.serves()
    node.run("iptables", "-t", "nat", "-F")
    node.run("iptables", "-t", "nat", "-X")
    node.run("iptables", "-t", "mangle", "-X")
    assert differences(before, picture(node)) == []


def test_an_account_of_others_is_refused(node, before, variables):
    for options in ((), ("--home-dir", "/var/lib/kubenode-proxy")):
        node.run("useradd", *options, "kubenode-proxy")
        refused = node.role("agent", variables, failing=True)
        node.run("userdel", "kubenode-proxy")
        assert "the account kubenode-proxy exists, and is not the agent's own" in refused.output
        assert refused.changed == 0


def endpoint_is_served(node, address):
    return wait_for(lambda: f"--to-destination {address}:8080" in rules(node), what=f"{address} is an endpoint")


def test_installed_agent_is_active_and_serves(node, installed):
    assert node.unit(UNIT, "ActiveState", "Type", "UnitFileState") == {
        "Type": "notify",
        "ActiveState": "active",
        "UnitFileState": "enabled",
    }
    endpoint_is_served(node, POD)
    assert "10.96.0.10/32" in rules(node)


@pytest.mark.full
def test_second_run_changes_and_restarts_nothing(node, installed, variables):
    before = start_of(node)
    again = node.role("agent", variables)
    assert (again.changed, again.changed_tasks) == (0, [])
    assert start_of(node) == before


def test_agent_reports_the_hash_of_the_source_that_the_controller_has(node, installed):
    from ansible_collections.kubenode.proxy.plugins.module_utils.packaging.archive import pack

    expected = pack(str(collection() / "ansible_collections/kubenode/proxy/plugins/module_utils")).identity
    assert node.output("cat", "/usr/local/lib/kubenode-proxy/VERSION").strip() == expected.record
    assert expected.text in node.output("kubenode-proxy", "--version")
    look = {"kubenode.proxy.service_proxy_info": {"configuration": {"mode": "iptables"}}, "register": "found"}
    play([node], [look, {"ansible.builtin.assert": {"that": f"found.agent_version == '{expected.text}'"}}], {})


def test_a_comparison_in_another_mode_than_the_agents_says_so(node, installed, cluster):
    other = {"service_proxy_kubeconfig": str(cluster.kubeconfig), "service_proxy_mode": "nftables"}
    verified = run_playbook([node], "kubenode.proxy.verify", other, {}, failing=True)[node.name]
    assert "(compared in nftables mode, but its agent runs in iptables mode: set service_proxy_mode" in verified.output


def test_a_check_of_a_convergence_is_refused_beside_the_agent_as_the_run_is(node, installed, cluster):
    given = {"service_proxy_kubeconfig": str(cluster.kubeconfig), "service_proxy_mode": "iptables"}
    reasons = []
    for options in (["--check"], []):
        refused = node.role("service_proxy", given, *options, failing=True)
        reasons += re.findall(r'"msg": "([^"]*held by process [^"]*)"', refused.output)
        assert refused.changed == 0
    assert len(reasons) == 2 and reasons[0] == reasons[1], reasons
    checked = node.run("kubenode-proxy", "converge", "--check", check=False)
    assert checked.returncode == 1 and reasons[0] in checked.stderr


@pytest.mark.full
def test_an_agent_that_cannot_apply_changes_fails_the_playbook(node, installed, variables, cluster):
    program, away = "/usr/sbin/xtables-nft-multi", "/srv/xtables-nft-multi"
    node.run("mv", program, away)
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.77"]))
    wait_for(lambda: status(node)["lastError"], what="a sync has failed")
    given = {**variables, "kernel_install_packages": False, "kernel_unchangeable": "warn"}
    failed = run_playbook([node], "kubenode.proxy.agent", given, {}, failing=True)[node.name]
    node.run("mv", away, program)
    assert "the agent does not apply changes: " in failed.output, failed.output
    endpoint_is_served(node, "10.244.1.77")
    cluster.store.put(endpoint_slice("web", [POD]))
    node.role("kernel", {"kernel_state": "absent"})


def test_an_agent_without_the_cluster_fails_the_playbook(node, installed, variables, cluster, tmp_path):
    node.run("systemctl", "stop", UNIT)
    node.run("rm", "/var/lib/kubenode-proxy/agent/cluster.json.gz")
    wrong = write_kubeconfig(tmp_path / "kubeconfig", cluster.url, cluster.admin[0], "wrong")
    given = {**variables, "agent_kubeconfig": str(wrong), "proxy_prepare_kernel": False}
    failed = run_playbook([node], "kubenode.proxy.agent", given, {}, failing=True)[node.name]
    assert f"the agent has not programmed anything yet: API server {cluster.url}: " in failed.output
    assert "Unauthorized" in failed.output
    node.role("agent", variables)
    endpoint_is_served(node, POD)


def imported_from(node):
    return node.output("python3", "-I", "-B", "-c", WHERE_FROM, ARCHIVE).strip()


def test_the_engine_starts_from_bytecode_that_only_root_can_write(node, installed):
    listing = node.output("stat", "-c", "%a %U %G", LIBRARY, f"{LIBRARY}/source.pyz", ARCHIVE)
    assert listing.splitlines() == ["755 root root", "644 root root", "644 root root"]
    assert imported_from(node) == f"{ARCHIVE}/kubenode_proxy/command/cli.pyc"


def test_agent_is_not_root_and_has_two_capabilities(node, installed):
    status = node.output("cat", f"/proc/{start_of(node)['MainPID']}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split()[0] != "0"
    assert {int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {1 << 12 | 1 << 13}
    assert fields["NoNewPrivs"] == "1"


def score(node, *unit):
    """Return the exposure that systemd-analyze computes, from 0 (best) to 10."""
    text = node.output("systemd-analyze", "security", "--no-pager", "--threshold=100", *unit)
    found = re.search(r"Overall exposure level for .*: ([0-9.]+) ", text)
    assert found is not None, text
    return float(found[1])


def test_security_score(node, installed):
    assert score(node, UNIT) <= EXPOSURES["kubenode-proxy", False]


def test_only_the_agent_can_read_secrets(node, installed):
    listing = node.output("stat", "-c", "%a %U %G", "/etc/kubenode-proxy", "/etc/kubenode-proxy/kubeconfig")
    assert listing.splitlines() == ["750 root kubenode-proxy", "640 root kubenode-proxy"]


def test_change_in_the_cluster_reaches_the_kernel(node, installed, cluster):
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.3"]))
    endpoint_is_served(node, "10.244.1.3")


@pytest.mark.full
def test_an_archive_without_bytecode_of_an_earlier_version_is_replaced(node, installed, variables):
    node.run("mv", f"{LIBRARY}/source.pyz", ARCHIVE)
    assert imported_from(node).endswith("/cli.py")
    tasks = [f"kubenode.proxy.agent : {name}" for name in ("Copy the engine to the host", "Restart")]
    tasks.insert(1, "kubenode.proxy.agent : Add bytecode of the host's Python")
    preview = node.role("agent", variables, "--check")
    # The source is not there yet, so its bytecode cannot be predicted.
    assert preview.changed_tasks == [tasks[0], tasks[2]]
    before = start_of(node)
    assert node.role("agent", variables).changed_tasks == tasks
    assert start_of(node) != before
    assert imported_from(node).endswith("/cli.pyc")
    assert node.output("ls", LIBRARY).split() == ["VERSION", "kubenode-proxy.pyz", "source.pyz"]


def test_killed_agent_is_restarted_and_keeps_the_dataplane(node, installed):
    before, rules_before = start_of(node), dataplane(node)
    node.run("kill", f"-{signal.SIGKILL.value}", before["MainPID"])
    wait_for(lambda: node.unit(UNIT, "MainPID")["MainPID"] not in ("0", before["MainPID"]), what="a new process")
    assert dataplane(node) == rules_before
    wait_for(lambda: node.unit(UNIT, "ActiveState")["ActiveState"] == "active", what="active")
    assert dataplane(node) == rules_before


def test_a_kube_proxy_that_returns_is_named_and_the_agent_does_not_start_beside_it(node, installed, variables, cluster):
    wanted, cursor = dataplane(node), mark(node)
    with KubeProxy(node) as kube_proxy:
        wait_for(lambda: status(node)["otherProxy"], what="the agent notices it")
        shown = node.run("kubenode-proxy", "status", check=False)
        assert shown.returncode == 4 and "not healthy: another program writes the rules of Services" in shown.stdout
        assert "another service proxy runs on this node" in log_since(node, cursor)
        # It is not fought: its rules, once they are back, are in use and stay.
        wait_for(kube_proxy.serves, what="its rules are back")
        assert all(kube_proxy.serves() for _time in range(5))
        node.run("systemctl", "restart", UNIT, check=False)
        wait_for(lambda: "kube-proxy runs on this node (process " in log_since(node, cursor), what="the reason")
        assert node.unit(UNIT, "MainPID")["MainPID"] == "0" and kube_proxy.serves()
        kubeconfig = {"service_proxy_kubeconfig": str(cluster.kubeconfig), "service_proxy_keep_states": 0}
        verified = run_playbook([node], "kubenode.proxy.verify", kubeconfig, {}, failing=True)[node.name]
        assert " is not verified: kube-proxy runs on this node (process " in verified.output
        # Refused before the first change, and not only when the rules are removed.
        kept = node.output("find", COMMAND, LIBRARY, f"/etc/systemd/system/{UNIT}", "/etc/kubenode-proxy")
        cleaned = run_playbook([node], "kubenode.proxy.cleanup", kubeconfig, {}, failing=True)[node.name]
        assert "the rules with which it serves would be removed" in cleaned.output and cleaned.changed == 0
        removal = {**variables, "agent_state": "absent", "agent_remove_dataplane": True}
        removed = node.role("agent", removal, failing=True)
        assert "the rules with which it serves would be removed" in removed.output and removed.changed == 0
        assert node.output("find", COMMAND, LIBRARY, f"/etc/systemd/system/{UNIT}", "/etc/kubenode-proxy") == kept
        assert node.unit(UNIT, "UnitFileState")["UnitFileState"] == "enabled" and kube_proxy.serves()
    wait_for(lambda: dataplane(node) == wanted, what="what was served before")


def test_external_removal_is_repaired(node, installed):
    before = dataplane(node)
    node.run("iptables", "-t", "nat", "-F", "KUBE-SERVICES")
    wait_for(lambda: dataplane(node) == before, what="repaired")


def test_lock_of_iptables_is_shared_with_the_agent(node, installed):
    assert node.output("stat", "-c", "%a %U %G", "/run/xtables.lock").split() == ["660", "root", "kubenode-proxy"]


def _is_drained(node):
    return status(node)["drain"]["drained"]


def test_the_agent_reads_the_drain_of_root_in_its_sandbox(node, installed):
    node.run("kubenode-proxy", "drain", "start")
    assert _is_drained(node)
    node.run("systemctl", "restart", UNIT)
    assert _is_drained(node) and "drained until" in node.unit(UNIT, "StatusText")["StatusText"]
    user = ("setpriv", "--reuid", "kubenode-proxy", "--regid", "kubenode-proxy", "--clear-groups")
    refused = node.run(*user, "kubenode-proxy", "drain", "stop", check=False)
    assert refused.returncode == 1 and "only root" in refused.stderr and _is_drained(node)
    node.run("kubenode-proxy", "drain", "stop")
    assert not _is_drained(node)


def test_boot_without_the_api_server(node, installed, cluster):
    node.run("systemctl", "stop", UNIT)
    node.run("systemctl", "start", UNIT)
    rules_before = dataplane(node)
    node.run("kubenode-proxy", "drain", "start")
    cluster.go_away()
    node.restart()
    wait_for(lambda: dataplane(node) == rules_before, 90, what="the rules of before")
    assert node.unit(UNIT, "ActiveState")["ActiveState"] == "active"
    assert _is_drained(node)
    node.run("kubenode-proxy", "drain", "stop")
    cluster.come_back()
    cluster.store.put(endpoint_slice("web", [POD, "10.244.1.10"]))
    wait_for(lambda: "--to-destination 10.244.1.10:8080" in rules(node), 90, what="what the server says now")


def test_another_user_gets_what_the_former_one_has_written(node, installed, variables):
    """The next test removes both accounts, with the default as agent_user."""
    state = "/var/lib/kubenode-proxy/agent"
    node.run("install", "-m", "0600", "-o", "kubenode-proxy", "-g", "kubenode-proxy", "/dev/null", f"{state}/other")
    node.role("agent", {**variables, "agent_user": "svcproxy"})
    assert node.output("find", state, "-not", "-user", "svcproxy") == ""
    assert node.output("find", state, "-perm", "0600", "-name", "other").split() == [f"{state}/other"]
    node.run("rm", f"{state}/other")
    assert node.unit(UNIT, "ActiveState", "User") == {"ActiveState": "active", "User": "svcproxy"}


def test_absent_leaves_only_the_dataplane_unless_its_removal_is_requested(node, before, installed, variables):
    rules_before = dataplane(node)
    kept = "/var/lib/kubenode-proxy/of-the-operator"
    node.run("mkdir", kept)
    node.role("agent", {**variables, "agent_state": "absent"})
    assert node.output("ls", "/var/lib/kubenode-proxy").split() == ["of-the-operator"]
    node.run("rmdir", kept, "/var/lib/kubenode-proxy")
    left = differences(before, picture(node))
    assert [line for line in left if not OF_THE_DATAPLANE.match(line)] == []
    assert node.unit(UNIT, "LoadState")["LoadState"] == "not-found"
    assert dataplane(node) == rules_before
    again = node.role("agent", {**variables, "agent_state": "absent", "agent_remove_dataplane": True})
    assert again.changed_tasks == [
        "kubenode.proxy.service_proxy : Remove everything that the service proxy has programmed"
    ]
    assert differences(before, picture(node)) == []


@pytest.mark.full
def test_absent_again_changes_nothing(node, before, installed, variables):
    """An account of others, which the role has not created, stays."""
    node.run("useradd", "alice")
    node.run("useradd", "--home-dir", "/var/lib/kubenode-proxy", "bob")
    again = node.role(
        "agent", {**variables, "agent_state": "absent", "agent_remove_dataplane": True, "agent_user": "alice"}
    )
    node.run("userdel", "alice")
    node.run("userdel", "bob")
    assert again.changed_tasks == []


@pytest.mark.full
def test_every_kind_of_unit_has_a_good_score(node):
    """Check the unit for every user, right to load modules and mode against docs/security.md."""
    role = collection() / "ansible_collections/kubenode/proxy/roles/agent"
    # A template searches for others beside the playbook.
    shutil.copytree(role / "templates", node.scratch / "templates")
    settings = {}
    for part in ("vars", "defaults"):
        settings.update(yaml.safe_load((role / part / "main.yml").read_text()))
    settings["role_path"] = str(role)
    kinds = [
        {"user": user, "modules": modules, "mode": mode, "exposure": exposure}
        for (user, modules), exposure in EXPOSURES.items()
        for mode in ("nftables", "userspace", "ipvs", "auto")
    ]
    task = {
        "ansible.builtin.template": {
            "src": "kubenode-proxy.service.j2",
            "dest": "/srv/{{ item.user }}-{{ item.modules }}-{{ item.mode }}.service",
        },
        "loop": kinds,
        "vars": {
            "agent_user": "{{ item.user }}",
            "agent_load_modules": "{{ item.modules }}",
            "agent_configuration": {"mode": "{{ item.mode }}"},
        },
    }
    play([node], [task], settings)
    for kind in kinds:
        unit = f"/srv/{kind['user']}-{kind['modules']}-{kind['mode']}.service"
        assert score(node, "--offline=true", unit) <= kind["exposure"], kind


@pytest.mark.full
def test_as_root_and_with_modules_it_works_in_the_same_sandbox(node, before, variables, cluster):
    cluster.store.put(endpoint_slice("web", [POD]))
    rooted = {**variables, "agent_user": "root", "agent_load_modules": True}
    node.role("agent", rooted)
    endpoint_is_served(node, POD)
    capabilities = node.unit(UNIT, "User", "CapabilityBoundingSet")
    assert capabilities == {"User": "root", "CapabilityBoundingSet": "cap_net_admin cap_net_raw cap_sys_module"}
    assert score(node, UNIT) <= EXPOSURES["root", True]
    node.role("agent", {**rooted, "agent_state": "absent", "agent_remove_dataplane": True})
    left = differences(before, picture(node))
    assert [line for line in left if " /srv/" not in line] == []


def test_nothing_is_started_without_an_api_server_address(node):
    result = node.role("agent", {}, failing=True)
    assert "set agent_kubeconfig" in " ".join(result.output.split())
