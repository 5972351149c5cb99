# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module kernel_modules, through Ansible, on the host's kernel: files, check mode and errors.

Loading and unloading needs a separate kernel: see the guest tests.
"""

from __future__ import annotations

from tests.modules.harness import UNPRIVILEGED

OWN = "/etc/modules-load.d/kubenode-proxy.conf"
LOOK = ["sh", "-c", "ls -la /etc/modules-load.d; cat /etc/modules-load.d/* || true"]
MODULE = "kubenode.proxy.kernel_modules"


def test_file_is_written_once_and_predicted_by_check_mode(node):
    runs = node.four_runs("kernel_modules", {"modules": ["nf-conntrack"], "persistent_file": OWN}, verify=LOOK)
    assert "kubenode-proxy.conf" not in runs.before
    assert "\nnf_conntrack" in runs.after
    assert [entry["after_header"] for entry in runs.first["diff"]] == [OWN]
    assert runs.first["modules"] == ["nf_conntrack"] and runs.first["loaded"] == []
    assert runs.first["changes"][0]["entries"] == [OWN]


def test_derived_and_absent(node):
    other = "/etc/modules-load.d/other.conf"
    check, present, not_ours, gone, again = node.play(
        {MODULE: {"mode": "iptables", "bridge_netfilter": True}, "check_mode": True},
        {MODULE: {"mode": "iptables", "bridge_netfilter": True, "persistent_file": other}},
        {MODULE: {"state": "absent", "persistent_file": OWN}},
        {MODULE: {"state": "absent", "persistent_file": other}},
        {MODULE: {"state": "absent", "persistent_file": other}},
    )
    assert check["modules"] == present["modules"] == ["nf_conntrack", "br_netfilter"], present
    assert not not_ours["changed"]
    assert gone["changed"] and "br_netfilter" in gone["diff"][0]["before"] and not again["changed"]
    assert node.run("ls", "/etc/modules-load.d").stdout == ""


def test_tasks_with_different_purposes_keep_each_others_files(node):
    other = "/etc/modules-load.d/other.conf"
    tasks = [{MODULE: {"mode": "iptables"}}, {MODULE: {"modules": ["nf_conntrack"], "persistent_file": other}}]
    refused = [{MODULE: {"modules": ["nf_conntrack"]}}, {MODULE: {"state": "absent"}}]
    found = node.play(*tasks, *tasks, *refused, {MODULE: {"modules": ["nf_conntrack"], "persistent": False}})
    assert [result["changed"] for result in found[:4]] == [True, True, False, False], found
    for result in found[4:6]:
        assert result["msg"].endswith(f"{OWN} is only for a task with mode, since it belongs to the service proxy"), (
            found
        )
    assert not found[6]["changed"] and found[6]["persistent_file"] == ""
    assert sorted(node.run("ls", "/etc/modules-load.d").stdout.split()) == ["kubenode-proxy.conf", "other.conf"]


def test_files_that_are_not_read_at_boot_are_refused_or_warned_of(node):
    task = {"modules": ["nf_conntrack"], "parameters": {"itest_module": {"size": 5}}}
    suffix, relative, options, elsewhere, read = node.play(
        {MODULE: {**task, "persistent_file": "/etc/modules-load.d/web"}},
        {MODULE: {**task, "persistent_file": "web.conf"}},
        {MODULE: {**task, "persistent_file": OWN, "parameters_file": "/etc/modprobe.d/web.options"}},
        {MODULE: {**task, "persistent_file": "/etc/web.conf", "parameters_file": "/etc/x.conf"}, "check_mode": True},
        {MODULE: {**task, "persistent_file": OWN}, "check_mode": True},
    )
    assert suffix["msg"].startswith("persistent_file: /etc/modules-load.d/web would not be read at boot: "), suffix
    assert relative["msg"] == "persistent_file: web.conf is not an absolute path"
    assert options["msg"].startswith("parameters_file: /etc/modprobe.d/web.options would not be read at boot: ")
    assert [warning.partition(":")[0] for warning in elsewhere["warnings"]] == ["persistent_file", "parameters_file"]
    assert "warnings" not in read, read


def test_errors_are_one_clear_line_and_change_nothing(node):
    found = node.play(
        {MODULE: {}},
        {MODULE: {"modules": ["no_such_module", "nf_conntrack"], "persistent": False}},
        {MODULE: {"modules": ["no_such_module", "nf_conntrack"], "persistent": False}, "check_mode": True},
        {MODULE: {"modules": ["a;reboot"], "persistent": False}},
        {MODULE: {"mode": "ipvs", "schedulers": ["rr\nwrr"]}},
        {MODULE: {"mode": "iptables", "schedulers": ["rr"]}},
        {MODULE: {"mode": "ebpf"}},
        {MODULE: {"modules": ["nf_conntrack"], "persistent": False}, **UNPRIVILEGED},
    )
    messages = [result["msg"] for result in found]
    assert all(result["failed"] for result in found), messages
    assert "modules is empty and mode is not given" in messages[0]
    release = node.run("uname", "-r").stdout.strip()
    for message in messages[1:3]:
        assert message.startswith(f"kernel module no_such_module: not available for kernel {release}; ")
        assert "\n" not in message
    assert "'a;reboot': not a module name" in messages[3]
    assert "not a scheduler name" in messages[4]
    assert "schedulers: only allowed with mode ipvs" in messages[5]
    assert "ebpf" in messages[6]
    assert "needs root" in messages[7]
    assert node.run("ls", "/etc/modules-load.d").stdout == ""


def test_module_states_are_returned(node):
    shown, bad = node.play(
        {f"{MODULE}_info": {"modules": ["nf-conntrack", "no_such_module"]}},
        {f"{MODULE}_info": {"modules": ["a b"]}},
    )
    modules = shown["modules"]
    assert modules["nf_conntrack"]["present"] and "hashsize" in modules["nf_conntrack"]["parameters"]
    absent = {"present": False, "loaded": False, "installed": False, "users": 0, "parameters": {}}
    assert modules["no_such_module"] == absent and not shown["changed"]
    assert shown["kernel_release"] == node.run("uname", "-r").stdout.strip()
    assert "'a b': not a module name" in bad["msg"]


def test_what_filters_beside_ipvs_is_determined_without_a_change(node):
    info = {"kubenode.proxy.kernel_modules_info": {"modules": ["ip_vs"], "ipvs_filter_backend": True}}
    loaded = ["sh", "-c", "test ! -e /proc/modules || cut -d' ' -f1 /proc/modules"]
    before = node.run(*loaded).stdout
    found, plain = node.play(info, {"kubenode.proxy.kernel_modules_info": {"modules": ["ip_vs"]}})
    # Both need IPVS, so where the kernel has none it is the last one.
    assert found["ipvs_filter_backend"] == ("nftables" if found["modules"]["ip_vs"]["present"] else "iptables"), found
    assert "filter backend nftables" in found["ipvs_filter_backend_reason"] and "ipvs_filter_backend" not in plain
    assert node.run(*loaded).stdout == before
    unload = {"mode": "ipvs", "state": "absent", "unload": True}
    (chosen,) = node.play({MODULE: unload, "check_mode": True})
    assert {"ip_set", "nf_tables", "ip_vs_rr"} <= set(chosen["modules"]), chosen
