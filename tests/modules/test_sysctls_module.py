# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module sysctls, through Ansible, in a network namespace; verified with the program sysctl."""

from __future__ import annotations

from tests.modules.harness import UNPRIVILEGED

FORWARD = "net.ipv4.ip_forward"
LOCALNET = "net.ipv4.conf.all.route_localnet"
OWN = "/etc/sysctl.d/99-kubenode-proxy.conf"
LOOK = ["sh", "-c", f"sysctl {FORWARD} {LOCALNET} net.ipv4.tcp_rmem; ls -la /etc/sysctl.d; cat /etc/sysctl.d/* || true"]


def test_values_are_written_once_and_predicted_by_check_mode(node):
    options = {
        "values": {FORWARD: 1, "net/ipv4/conf/all/route_localnet": True, "net.ipv4.tcp_rmem": "4096 131072  6000000"},
        "persistent_file": OWN,
    }
    runs = node.four_runs("sysctls", options, verify=LOOK)
    assert f"{FORWARD} = 0" in runs.before and "99-kubenode" not in runs.before
    for line in (f"{FORWARD} = 1", f"{LOCALNET} = 1", "net.ipv4.tcp_rmem = 4096\t131072\t6000000", "-rw-r--r--"):
        assert line in runs.after
    headers = [entry["before_header"] for entry in runs.first["diff"]]
    assert headers == ["sysctls", OWN]
    assert f"{FORWARD} = 0\n" in runs.first["diff"][0]["before"]
    assert f"{FORWARD} = 1\n" in runs.first["diff"][0]["after"]
    assert runs.first["sysctls"] == {FORWARD: "1", LOCALNET: "1", "net.ipv4.tcp_rmem": "4096 131072 6000000"}
    assert [change["table"] for change in runs.first["changes"]] == ["sysctls", "files"]
    assert runs.second["changes"] == [] and runs.second["diff"] == []


def test_profile_conflicts_and_absence(node):
    node.run("sh", "-c", f"echo '{LOCALNET} = 0' > /etc/sysctl.d/99-zz.conf")
    module = "kubenode.proxy.sysctls"
    profile = {"mode": "iptables", "conntrack": {"max_per_core": 0}}
    keep = {"net.netfilter.nf_conntrack_tcp_timeout_established": None, FORWARD: 1}
    found = node.play(
        {module: {"profile": profile, "values": keep}},
        {module: {"profile": profile, "values": keep}},
        {module: {"state": "absent", "persistent_file": OWN}, "check_mode": True},
        {module: {"state": "absent", "persistent_file": OWN}},
        {module: {"state": "absent", "persistent_file": OWN}},
    )
    first, second, check, absent, again = found
    assert first["changed"] and not second["changed"], found
    assert first["sysctls"][LOCALNET] == "1" and first["sysctls"][FORWARD] == "1"
    assert first["sysctls"]["net.netfilter.nf_conntrack_tcp_timeout_close_wait"] == "3600"
    why = {row["key"]: row for row in first["explanations"]}
    assert why["net.netfilter.nf_conntrack_tcp_timeout_established"]["value"] == ""
    assert "localhostNodePorts" in why[LOCALNET]["why"]
    assert any("/etc/sysctl.d/99-zz.conf is read after" in warning for warning in first["warnings"])
    assert check["changed"] and absent["changed"] and not again["changed"]
    assert node.run("sysctl", "-n", FORWARD).stdout.strip() == "1"
    assert node.run("ls", "/etc/sysctl.d").stdout.split() == ["99-zz.conf"]


def test_tasks_with_different_purposes_keep_each_others_files(node):
    module = "kubenode.proxy.sysctls"
    profile = {"mode": "iptables", "conntrack": {"max_per_core": 0}}
    other = "/etc/sysctl.d/50-web.conf"
    values = {"values": {"net.ipv4.tcp_syncookies": 0}}
    tasks = [{module: {"profile": profile}}, {module: {**values, "persistent_file": other}}]
    found = node.play(*tasks, *tasks, {module: values}, {module: {"state": "absent"}})
    assert [result["changed"] for result in found[:4]] == [True, True, False, False], found
    for refused in found[4:]:
        assert refused["msg"].endswith(
            f"{OWN} is only for a task with profile, since it belongs to the service proxy"
        ), found
    assert LOCALNET in node.run("cat", OWN).stdout and "tcp_syncookies" not in node.run("cat", OWN).stdout
    assert "net.ipv4.tcp_syncookies = 0" in node.run("cat", other).stdout


def test_optional_parameters_are_set_only_on_request(node):
    module, ports = "kubenode.proxy.sysctls", "net.ipv4.ip_local_reserved_ports"
    node.run("sysctl", "-w", f"{ports}=8472,40000-40001")
    profile = {"mode": "nftables", "conntrack": {"max_per_core": 0}, "reserved_node_ports": "30000-32767"}
    first, again = node.play({module: {"profile": profile}}, {module: {"profile": profile}})
    assert first["changed"] and not again["changed"], (first, again)
    assert node.run("sysctl", "-n", ports).stdout.strip() == "8472,30000-32767,40000-40001"
    assert f"{ports} = 8472,30000-32767,40000-40001" in node.run("cat", OWN).stdout
    (bad,) = node.play({module: {"profile": {**profile, "reserved_node_ports": "30000-99999"}}})
    assert bad["failed"] and "'30000-99999' is not a port or a range of ports" in bad["msg"]


def test_parameters_that_only_the_host_may_change(node):
    module = "kubenode.proxy.sysctls"
    values = {"net.netfilter.nf_conntrack_max": 12345, FORWARD: 1}
    fails, warns, check = node.play(
        {module: {"values": values, "persistent": False}},
        {module: {"values": values, "persistent": False, "unchangeable": "warn"}},
        {module: {"values": values, "persistent": False, "unchangeable": "warn"}, "check_mode": True},
    )
    assert fails["failed"]
    assert "nf_conntrack_max" in fails["msg"] and "cannot be changed here" in fails["msg"]
    assert "kernel_unchangeable" in fails["msg"], "the remedy"
    assert "\n" not in fails["msg"]
    assert warns["changed"] and list(warns["unchanged_here"]) == ["net.netfilter.nf_conntrack_max"]
    assert warns["persistent_file"] == ""
    assert not check["changed"]
    assert node.run("sysctl", "-n", FORWARD).stdout.strip() == "1"


def test_the_result_has_the_values_that_the_kernel_has_after_all_changes(node):
    redirects, secret = "net.ipv4.conf.all.accept_redirects", "net.ipv6.conf.default.stable_secret"
    node.run("sysctl", "-w", f"{FORWARD}=1", f"{redirects}=0")
    values = {FORWARD: 0, redirects: 0, secret: "2001:db8::1"}
    first, again, action = node.play(
        {"kubenode.proxy.sysctls": {"values": values, "persistent": False}},
        {"kubenode.proxy.sysctls": {"values": values, "persistent": False}},
        {"kubenode.proxy.sysctls": {"values": {"net.ipv4.route.flush": 1}, "persistent": False}},
    )
    assert first["changed"] and not again["changed"], (first, again)
    assert first["sysctls"] == {FORWARD: "0", redirects: "0", secret: "2001:0db8:0000:0000:0000:0000:0000:0001"}
    assert node.run("sysctl", "-n", FORWARD, redirects).stdout.split() == ["0", "0"]
    assert action["msg"].startswith("sysctl net.ipv4.route.flush: is an action, not a setting"), action


def test_values_in_other_forms_of_the_kernel_are_set_once(node):
    module, ports, fastopen = "kubenode.proxy.sysctls", "net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_fastopen"
    options = {"values": {ports: "8080,8081,9000", fastopen: "0x5"}, "persistent_file": "/etc/sysctl.d/50-web.conf"}
    runs = node.four_runs("sysctls", options, verify=["sysctl", ports, fastopen])
    assert f"{ports} = 8080-8081,9000\n{fastopen} = 5" in runs.after
    assert runs.first["keys_set"] == [ports, fastopen] and runs.second["keys_set"] == []
    assert runs.first["sysctls"] == {ports: "8080-8081,9000", fastopen: "5"}
    values = {FORWARD: 1, "net.ipv4.tcp_congestion_control": "no_such", LOCALNET: 1}
    failed, check = node.play(
        {module: {"values": values, "persistent": False}},
        {module: {"values": {FORWARD: 0}, "persistent": False}, "check_mode": True},
    )
    assert failed["failed"] and failed["changed"] and failed["keys_set"] == [FORWARD], failed
    assert check["changed"] and check["keys_set"] == [FORWARD]
    assert node.run("sysctl", "-n", FORWARD, LOCALNET).stdout.split() == ["1", "0"]


def test_files_that_are_not_read_at_boot_are_refused_or_warned_of(node):
    module, values = "kubenode.proxy.sysctls", {"values": {FORWARD: 1}}
    node.run("touch", "/etc/sysctl.d/60-web.conf")
    elsewhere = str(node.scratch / "60-web.conf")
    suffix, relative, outside, masked, read, kept, gone = node.play(
        {module: {**values, "persistent_file": "/etc/sysctl.d/60-web"}},
        {module: {**values, "persistent_file": "rel.conf"}},
        {module: {**values, "persistent_file": elsewhere}},
        {module: {**values, "persistent_file": "/run/sysctl.d/60-web.conf"}, "check_mode": True},
        {module: {**values, "persistent_file": "/etc/sysctl.d/60-web.conf"}},
        {module: {"state": "absent", "persistent": False, "persistent_file": "/etc/sysctl.d/60-web.conf"}},
        {module: {"state": "absent", "persistent_file": elsewhere}},
    )
    assert suffix["msg"].startswith("persistent_file: /etc/sysctl.d/60-web would not be read at boot: "), suffix
    assert relative["msg"] == "persistent_file: rel.conf is not an absolute path" and not relative["changed"]
    (warning,) = outside["warnings"]
    assert warning.startswith(f"persistent_file: {elsewhere} is not read at boot: only files in /etc/sysctl.d, ")
    (warning,) = masked["warnings"]
    assert warning.endswith("is not read at boot: /etc/sysctl.d/60-web.conf takes its place")
    assert "warnings" not in read and "warnings" not in gone and gone["changed"]
    assert not kept["changed"] and kept["persistent_file"] == ""
    assert FORWARD in node.run("cat", "/etc/sysctl.d/60-web.conf").stdout


def test_a_file_of_others_is_not_replaced(node):
    """A task cannot know what else the lines of an administrator's file are for."""
    theirs = "/etc/sysctl.d/60-theirs.conf"
    task = {"kubenode.proxy.sysctls": {"values": {FORWARD: 1}, "persistent_file": theirs}}
    look = {"ansible.builtin.command": f"cat {theirs}", "changed_when": False}
    write = {"ansible.builtin.copy": {"content": "kernel.panic = 10\n", "dest": theirs}}
    _written, check, refused, kept, _emptied, accepted = node.play(
        write,
        {**task, "check_mode": True},
        task,
        look,
        {"ansible.builtin.copy": {"content": "\n", "dest": theirs}},
        task,
    )
    assert check["msg"] == refused["msg"] and refused["msg"].startswith(f"{theirs}: would be replaced as a whole, but")
    assert not refused["changed"] and kept["stdout"] == "kernel.panic = 10"
    assert accepted["changed"], accepted


def test_errors_are_one_clear_line_and_change_nothing(node):
    module = "kubenode.proxy.sysctls"
    found = node.play(
        {module: {}},
        {module: {"values": {"net.ipv4.no_such_key": 1, FORWARD: 1}, "persistent": False}},
        {module: {"values": {"net.ipv4.vs.conntrack": 1, FORWARD: 1}, "persistent": False}},
        {module: {"values": {"net.ipv4.no_such_key": 1, FORWARD: 1}, "persistent": False}, "check_mode": True},
        {module: {"values": {"../../etc/passwd": 1}, "persistent": False}},
        {module: {"values": {FORWARD: "1\n2"}, "persistent": False}},
        {module: {"values": {FORWARD: {"a": 1}}, "persistent": False}},
        {module: {"values": {FORWARD: 7777777777777}, "persistent": False}},
        {module: {"profile": {"mode": "ebpf"}}},
        {module: {"profile": {"mode": "ipvs", "conntrack": {"min": -1}}}},
        {module: {"values": {FORWARD: 1}, "persistent_file": "/proc/nowhere/x.conf"}},
        {module: {"values": {FORWARD: 1}, "persistent": False}, **UNPRIVILEGED},
    )
    messages = [result["msg"] for result in found]
    assert all(result["failed"] for result in found), messages
    assert "values is empty and profile is not given" in messages[0]
    assert "sysctl net.ipv4.no_such_key: this kernel has no such key (wanted 1)" in messages[1]
    assert "module ip_vs provides it" in messages[2]
    assert "no such key" in messages[3]
    assert "not a key such as" in messages[4]
    assert "not one line of text" in messages[5]
    assert "must be text or a number" in messages[6]
    assert f"sysctl {FORWARD}: is 0, wanted 7777777777777: the kernel refused it: Invalid argument" in messages[7]
    assert "profile" in messages[8] and "ebpf" in messages[8]
    assert "profile.conntrack.min: -1 is negative" in messages[9]
    assert "/proc/nowhere/x.conf: cannot be written" in messages[10]
    assert "needs root: run the task with become: true" in messages[11]
    assert node.run("ls", "/etc/sysctl.d").stdout == ""


def test_values_and_their_boot_files_are_returned(node):
    node.run(
        "sh", "-c", f"echo '{FORWARD} = 1' > /etc/sysctl.d/50-a.conf; echo '{FORWARD} = 0' > /etc/sysctl.d/60-b.conf"
    )
    info = {"kubenode.proxy.sysctls_info": {"keys": ["net/ipv4/ip_forward", "no.such.key", LOCALNET]}}
    shown, bad = node.play(info, {"kubenode.proxy.sysctls_info": {"keys": ["../etc"]}})
    forward = {"value": "0", "boot_value": "0", "boot_file": "/etc/sysctl.d/60-b.conf"}
    assert shown["sysctls"][FORWARD] == forward and not shown["changed"]
    assert shown["sysctls"]["no.such.key"] == {"value": None, "boot_value": None, "boot_file": ""}
    assert shown["sysctls"][LOCALNET]["value"] == "0"
    assert bad["failed"] and "../etc" in bad["msg"] and "\n" not in bad["msg"]
