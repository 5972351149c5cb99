# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Modules that need a separate kernel; ``test_in_guest.py`` runs these tests inside user-mode Linux.

``ipvs_services`` is verified with ipvsadm, ``kernel_modules`` with /proc/modules, ``sysctls`` with sysctl.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tests.modules.examples import LOADED, PAGE, faults_of_examples
from tests.modules.second_runs import Options, declared, faults, in_pairs

IPVS = "kubenode.proxy.ipvs_services"
MODULES = "kubenode.proxy.kernel_modules"
SYSCTLS = "kubenode.proxy.sysctls"

SERVICES = [
    {
        "address": "192.0.2.10",
        "port": 443,
        "scheduler": "wrr",
        "persistence": 300,
        "persistence_prefix": 24,
        "real_servers": [
            {"address": "10.0.0.21", "port": 8443, "weight": 3},
            {"address": "10.0.0.22", "port": 8443, "weight": 0},
        ],
    },
    {
        "address": "2001:DB8::0:10",
        "port": 53,
        "protocol": "udp",
        "scheduler": "mh",
        "flags": ["mh-port"],
        "real_servers": [{"address": "2001:db8:1::53", "forwarding": "dr"}],
    },
    {
        "address": "192.0.2.11",
        "port": 5060,
        "protocol": "udp",
        "scheduler": "rr",
        "one_packet": True,
        "real_servers": [{"address": "10.0.0.30", "forwarding": "tunnel"}],
    },
]


def loaded() -> set[str]:
    return {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}


def test_modules_sysctls_and_virtual_servers(node):
    # Kernel modules, derived from the schedulers; none is loaded yet.
    assert "ip_vs" not in loaded()
    schedulers = ["wrr", "mh", "rr", "sh"]
    early, check, first, second, unknown = node.play(
        {SYSCTLS: {"profile": {"mode": "ipvs"}}, "check_mode": True},
        {MODULES: {"mode": "ipvs", "schedulers": schedulers}, "check_mode": True},
        {MODULES: {"mode": "ipvs", "schedulers": schedulers}},
        {MODULES: {"mode": "ipvs", "schedulers": schedulers}},
        {MODULES: {"mode": "ipvs", "schedulers": ["nosuch"]}, "check_mode": True},
    )
    assert not early.get("failed") and early["changed"], early
    assert any("needs the kernel module ip_vs, which is not loaded yet" in warning for warning in early["warnings"])
    assert check["changed"] and first["changed"] and not second["changed"], (check, first, second)
    assert check["loaded"] == first["loaded"] and {"ip_vs", "ip_vs_wrr", "ip_vs_mh"} <= set(first["loaded"])
    assert {"ip_vs", "ip_vs_wrr", "ip_vs_mh", "ip_vs_rr", "ip_vs_sh", "dummy", "xt_set"} <= loaded()
    assert "ip_vs_nosuch: not available for kernel" in unknown["msg"]
    lines = node.run("cat", "/etc/modules-load.d/kubenode-proxy.conf").stdout.splitlines()
    assert lines[1:] == first["modules"]

    # Virtual servers: check, apply, check, apply.
    node.run("ipvsadm", "-A", "-t", "192.0.2.10:80", "-s", "rr")
    node.run("ipvsadm", "-a", "-t", "192.0.2.10:80", "-r", "10.9.9.9:80", "-m", "-w", "7")
    external = ["-A -t 192.0.2.10:80 -s rr", "-a -t 192.0.2.10:80 -r 10.9.9.9:80 -m -w 7"]
    runs = node.four_runs("ipvs_services", {"services": SERVICES}, verify=["ipvsadm", "-Sn"])
    assert sorted(runs.before.splitlines()) == sorted(external)
    assert sorted(runs.after.splitlines()) == sorted(
        [
            *external,
            "-A -t 192.0.2.10:443 -s wrr -p 300 -M 255.255.255.0",
            "-a -t 192.0.2.10:443 -r 10.0.0.21:8443 -m -w 3",
            "-a -t 192.0.2.10:443 -r 10.0.0.22:8443 -m -w 0",
            "-A -u [2001:db8::10]:53 -s mh -b mh-port",
            "-a -u [2001:db8::10]:53 -r [2001:db8:1::53]:53 -g -w 1",
            "-A -u 192.0.2.11:5060 -s rr -o",
            "-a -u 192.0.2.11:5060 -r 10.0.0.30:5060 -i -w 1 --tun-type ipip",
        ]
    )
    assert (runs.first["virtual_servers"], runs.first["real_servers"]) == (3, 4)
    entry = next(entry for entry in runs.first["diff"] if entry["after_header"] == "IPv4 real servers")
    assert "-a -t 192.0.2.10:443 -r 10.0.0.21:8443 -m -w 3\n" in entry["after"] and entry["before"] == ""


@pytest.mark.full
def test_changes_purging_removal_and_unloading(node):
    """Change in place, fail, purge and remove; then check the modules' parameters, and unload the modules."""
    node.run("ipvsadm", "-A", "-t", "192.0.2.10:80", "-s", "rr")
    node.run("ipvsadm", "-a", "-t", "192.0.2.10:80", "-r", "10.9.9.9:80", "-m", "-w", "7")
    node.play({MODULES: {"mode": "ipvs", "schedulers": ["wrr", "mh", "rr", "sh"]}}, {IPVS: {"services": SERVICES}})
    changed = [dict(SERVICES[0], scheduler="sh", real_servers=[SERVICES[0]["real_servers"][1]])]
    purge = {"services": [dict(changed[0], real_servers=None)], "purge": ["192.0.2.10"]}
    look = {"ansible.builtin.command": "ipvsadm -Sn", "changed_when": False}
    parameters = {SYSCTLS: {"profile": {"mode": "ipvs", "strict_arp": True}, "unchangeable": "warn"}}
    file = "/etc/modules-load.d/kubenode-proxy.conf"
    gone = {"state": "absent", "persistent_file": file}
    unload = {MODULES: {**gone, "modules": ["ip_vs_wrr", "ip_vs_mh"], "unload": True}}
    found = node.play(
        {IPVS: {"services": changed}},
        {IPVS: {"services": [dict(changed[0], scheduler="nosuch")]}, "check_mode": True},
        {IPVS: purge, "check_mode": True},
        {IPVS: purge},
        look,
        {IPVS: {"services": SERVICES, "state": "absent"}},
        look,
        parameters,
        parameters,
        {MODULES: {"modules": ["nf_conntrack"], "state": "absent", "unload": True, "persistent": False}},
        {**unload, "check_mode": True},
        unload,
        unload,
    )
    replaced, scheduler, check, purged, after_purge, gone, after_gone = found[:7]
    assert [change["replaced"] for change in replaced["changes"]] == [1, 0]
    assert [change["removed"] for change in replaced["changes"]] == [0, 1]
    assert replaced["changes"][1]["entries"] == ["192.0.2.10:443/TCP/10.0.0.21:8443"]
    assert "IPVS scheduler nosuch: module ip_vs_nosuch not available for kernel" in scheduler["msg"]
    assert check["changed"] and purged["changed"] and check["diff"] == purged["diff"]
    left = after_purge["stdout_lines"]
    assert "-A -t 192.0.2.10:443 -s sh -p 300 -M 255.255.255.0" in left
    assert "-a -t 192.0.2.10:443 -r 10.0.0.22:8443 -m -w 0" in left
    assert [line for line in left if "192.0.2.10:80" in line] == [] and len(left) == 6
    assert gone["changed"] and after_gone["stdout"] == ""
    first, same, busy, check, unloaded, nothing = found[7:]
    assert first["changed"] and not same["changed"], (first, same)
    keys = ("net.ipv4.vs.conntrack", "net.ipv4.vs.expire_nodest_conn", "net.ipv4.conf.all.arp_announce")
    assert node.run("sysctl", "-n", *keys).stdout.split() == ["1", "1", "2"]
    assert any("5.9" in row["why"] for row in first["explanations"] if row["key"].endswith("conn_reuse_mode"))
    assert busy["failed"] and "nf_conntrack: cannot be unloaded, it has" in busy["msg"]
    assert check["changed"] and unloaded["changed"] and not nothing["changed"]
    assert set(unloaded["unloaded"]) == {"ip_vs_wrr", "ip_vs_mh"}
    assert not {"ip_vs_wrr", "ip_vs_mh"} & loaded()


def test_only_the_selected_modules_are_unloaded(node):
    """Those that they use stay, although nothing uses them any more."""
    node.run("ipvsadm", "-C", check=False)
    node.run("modprobe", "-a", "ip_vs_sh", "ip_vs_wlc")
    before = loaded()
    others = sorted(name for name in before if name.startswith("ip_vs_") and name != "ip_vs_wlc")
    task = {"modules": others, "state": "absent", "unload": True, "persistent": False}
    first, last = node.play({MODULES: task}, {MODULES: {**task, "modules": ["ip_vs_wlc"]}})
    assert set(first["unloaded"]) == set(others) and last["unloaded"] == ["ip_vs_wlc"], (first, last)
    assert before - loaded() == {*others, "ip_vs_wlc"} and "ip_vs" in loaded()


BALANCER = {"address": "192.0.2.20", "port": 443}
MARKED = {
    "firewall_mark": 7,
    "scheduler": "rr",
    "persistence": 60,
    "real_servers": [{"address": "10.0.0.51"}, {"address": "10.0.0.52", "port": 8080, "weight": 2}],
}


@pytest.mark.full
def test_virtual_servers_by_several_tasks(node):
    """Use tasks for single real servers, firewall marks and timeouts, and the file that the service loads at boot."""
    node.run("modprobe", "-a", "ip_vs", "ip_vs_sh", "ip_vs_rr", "ip_vs_wlc")
    node.run("ipvsadm", "-C")

    def real(last: int, **more: object) -> dict[str, object]:
        server = {"address": f"10.0.0.{last}", "port": 8443, **more}
        return {IPVS: {"services": [dict(BALANCER, exclusive=False, real_servers=[server])]}}

    whole = dict(BALANCER, scheduler="sh", persistence=300, real_servers=[{"address": "10.0.0.41", "port": 8443}])
    look = {"ansible.builtin.command": "ipvsadm -Sn", "changed_when": False}
    marked6 = {"firewall_mark": 7, "family": "ipv6", "scheduler": "rr", "real_servers": [{"address": "fd00::51"}]}
    every = {"address": "192.0.2.30", "port": 0, "scheduler": "rr", "persistence": 60}
    others = [MARKED, marked6, {**every, "real_servers": [{"address": "10.0.0.61"}]}]
    found = node.play(
        {IPVS: {"services": [whole]}},
        real(42),
        {**real(42), "check_mode": True},
        real(42, weight=0),
        look,
        real(41, state="absent"),
        real(41, state="absent"),
        look,
        {f"{IPVS}_info": {"address": "192.0.2.20"}},
        real(43),
        {IPVS: {"services": others}},
        {IPVS: {"services": others}},
        {f"{IPVS}_info": {"firewall_mark": 7}},
    )
    assert not any(result.get("failed") for result in found), found
    changed = [result["changed"] for result in found]
    expected = [True, True, False, True, False, True, False, False, False, True, True, False, False]
    assert changed == expected, changed
    settings = "-A -t 192.0.2.20:443 -s sh -p 300"
    reals = [f"-a -t 192.0.2.20:443 -r 10.0.0.{last}:8443 -m -w {weight}" for last, weight in ((41, 1), (42, 0))]
    assert sorted(found[4]["stdout_lines"]) == sorted([settings, *reals])
    assert sorted(found[7]["stdout_lines"]) == sorted([settings, reals[1]])
    (record,) = found[8]["services"]
    assert (record["scheduler"], record["persistence"], record["family"]) == ("sh", 300, "ipv4")
    assert record["real_servers"] == [
        {"address": "10.0.0.42", "port": 8443, "weight": 0, "forwarding": "nat", "connections": 0}
    ]
    shown = [(item["firewall_mark"], item["family"], len(item["real_servers"])) for item in found[12]["services"]]
    assert shown == [(7, "ipv4", 2), (7, "ipv6", 1)]

    # Persist everything over a reboot: the file has the format that ipvsadm saves and restores.
    timeouts = {"tcp": 1234, "tcp_fin": 56, "udp": 78}
    save = {IPVS: {"timeouts": timeouts, "save": True}}
    first, check, second = node.play({**save, "check_mode": True}, save, save)
    assert first["changed"] and check["changed"] and not second["changed"]
    assert first["diff"] == check["diff"] and first["save_file"] == "/etc/ipvsadm.rules"
    before = sorted(node.run("ipvsadm", "-Sn").stdout.splitlines())
    saved = node.run("cat", "/etc/ipvsadm.rules").stdout
    assert saved.splitlines()[0] == "--set 1234 56 78" and sorted(saved.splitlines()[1:]) == before
    assert any(line.startswith("-A -f 7 -s rr -p 60") for line in before), before
    assert "-A -t 192.0.2.30:0 -s rr -p 60" in before and "-a -t 192.0.2.30:0 -r 10.0.0.61:0 -m -w 1" in before
    node.run("ipvsadm", "-C")
    node.run("ipvsadm", "--set", "900", "120", "300")
    node.run("ipvsadm-restore", text=saved)
    assert sorted(node.run("ipvsadm", "-Sn").stdout.splitlines()) == before
    assert "Timeout (tcp tcpfin udp): 1234 56 78" in node.run("ipvsadm", "-L", "--timeout").stdout
    gone = node.play({IPVS: {"services": [*others, whole], "state": "absent", "save": True}})
    assert gone[0]["changed"], gone
    assert node.run("ipvsadm", "-Sn").stdout == ""
    assert node.run("cat", "/etc/ipvsadm.rules").stdout == "--set 1234 56 78\n"


def test_module_parameters(node):
    """Set parameters when a module is loaded, change them in place where the kernel can, and persist them."""
    node.run("ipvsadm", "-C")
    node.run("modprobe", "-r", "ip_vs_sh", "ip_vs_rr", "ip_vs_wrr", "ip_vs_wlc", "ip_vs_mh", "ip_vs", check=False)
    assert "ip_vs" not in loaded()
    own = "/etc/modules-load.d/load-balancer.conf"
    # ip_vs_rr is listed first, and would load ip_vs without its parameters.
    task = {"modules": ["ip_vs_rr", "ip_vs"], "parameters": {"ip_vs": {"conn_tab_bits": 9}}, "persistent_file": own}
    shown = "/sys/module/ip_vs/parameters/conn_tab_bits"
    look = {"ansible.builtin.command": f"cat {shown} /etc/modprobe.d/load-balancer.conf", "changed_when": False}
    other = {**task, "parameters": {"ip_vs": {"conn_tab_bits": 10}}}
    accounting = {"modules": ["nf_conntrack"], "parameters": {"nf_conntrack": {"acct": True}}, "persistent": False}
    found = node.play(
        {MODULES: task, "check_mode": True},
        {MODULES: task},
        look,
        {MODULES: task},
        {MODULES: other},
        {MODULES: {**other, "unchangeable": "warn"}},
        look,
        {MODULES: accounting},
        {MODULES: accounting},
        {MODULES: {**other, "state": "absent"}},
    )
    check, first, after, second, refused, warned, file, live, same, gone = found
    assert check["changed"] and first["changed"] and not second["changed"], found
    assert check["diff"] == first["diff"] and first["parameters_file"] == "/etc/modprobe.d/load-balancer.conf"
    assert after["stdout_lines"][0] == "9" and after["stdout_lines"][-1] == "options ip_vs conn_tab_bits=9"
    assert refused["msg"].startswith("parameter ip_vs.conn_tab_bits: is 9, wanted 10: can only be set when")
    assert warned["changed"] and any("is 9, wanted 10" in warning for warning in warned["warnings"])
    assert file["stdout_lines"][0] == "9" and file["stdout_lines"][-1] == "options ip_vs conn_tab_bits=10"
    assert live["changed"] and not same["changed"], (live, same)
    assert live["changes"][-1]["entries"] == ["nf_conntrack.acct"] and live["parameters_file"] == ""
    assert gone["changed"]
    left = node.run(
        "sh", "-c", "ls /etc/modprobe.d/load-balancer.conf /etc/modules-load.d/load-balancer.conf", check=False
    )
    assert left.stdout == ""


def test_a_second_run_changes_nothing_whatever_the_parameters_are(node):
    """Parameters that the kernel does not show, adjusts or does not know, and rules that forbid a module."""
    own = {"persistent_file": "/etc/modules-load.d/own.conf"}
    tasks = [
        {"modules": ["dummy"], "parameters": {"dummy": {"numdummies": 2}}, **own},
        {"modules": ["dummy"], "parameters": {"dummy": {"numdummies": 2}}, "persistent": False},
        {"modules": ["dummy"], "parameters": {"dummy": {"numdummies": 3}}, "unchangeable": "warn", **own},
        {"modules": ["bonding"], "parameters": {"bonding": {"max_bonds": 0, "miimon": 100}}, **own},
        {"modules": ["dummy", "bonding"], **own},
        {"modules": ["dummy"], "parameters": {"dummy": {"nosuch": 1}}, "unchangeable": "warn", **own},
    ]
    reset = {"state": "absent", "modules": ["dummy", "bonding"], "unload": True, **own}
    assert faults(node, "kernel_modules", tasks, [reset]) == []
    node.run("sh", "-c", "printf 'install dummy /bin/false\\n' > /etc/modprobe.d/cis.conf")
    node.run("modprobe", "-r", "dummy", check=False)
    check, refused, unknown = node.play(
        {MODULES: {"modules": ["dummy"], **own}, "check_mode": True},
        {MODULES: {"modules": ["dummy"], **own}},
        {MODULES: {"modules": ["bonding"], "parameters": {"bonding": {"nosuch": 1}}, **own}},
    )
    rule = (
        'kernel module dummy: must not be loaded here: /etc/modprobe.d/cis.conf has the rule "install dummy /bin/false"'
    )
    assert check["msg"] == refused["msg"] == rule
    assert "neither shows nor declares a parameter nosuch" in unknown["msg"]


FORMS: Options = {
    "address": ["2001:DB8:0:0::1", "192.0.2.9"],
    "port": [1, 65535],
    "protocol": ["udp"],
    "scheduler": ["rr", "sh", "mh"],
    "flags": [[], ["sh-port"], ["sh-port", "sh-fallback"], ["flag-1"]],
    "persistence": [0, 300, 7],
    "persistence_prefix": [24, 32],
    "one_packet": [True, False],
    "exclusive": [False],
    "family": ["ipv4", "ipv6"],
    "firewall_mark": [7],
    "real_servers": [
        [],
        [{"address": "10.0.0.1", "port": 8080, "weight": 0}, {"address": "10.0.0.2"}],
        [{"address": "10.0.0.1", "forwarding": "dr"}, {"address": "10.0.0.3", "forwarding": "tunnel"}],
        [{"address": "2001:DB8::2", "state": "absent"}],
    ],
}


def test_a_second_run_changes_nothing_whatever_the_virtual_servers_are(node):
    assert set(FORMS) == declared("ipvs_services", "_SERVICE")
    base = {"address": "192.0.2.10", "port": 80, "real_servers": [{"address": "10.0.0.1"}]}
    services = list(in_pairs(base, FORMS, 1 + bool(os.environ.get("FULL"))))
    marked = [{"firewall_mark": 9, "family": family, "persistence": 60} for family in ("ipv4", "ipv6")]
    tasks = [{"services": [each]} for each in (*services, *marked)]
    tasks += [
        {"services": [base], "purge": ["192.0.2.10", "2001:DB8::0:1"]},
        {"services": [base], "timeouts": {"tcp": 900}},
        {"services": [base], "timeouts": {"udp": 60, "tcp_fin": 30}, "save": True},
        {"services": [base], "save": True, "save_file": "/etc/own.rules"},
        {"services": [base], "state": "absent"},
    ]
    node.play({MODULES: {"modules": ["ip_vs", "ip_vs_rr", "ip_vs_sh", "ip_vs_mh", "ip_vs_wlc"], "persistent": False}})
    assert faults(node, "ipvs_services", tasks) == []


#: Another virtual server beside that of the base, by what it has in common with it.
BESIDE: list[Options] = [
    {"address": "192.0.2.10", "port": 80, "protocol": "udp"},
    {"address": "192.0.2.10", "port": 81},
    {"address": "192.0.2.10", "port": 0, "persistence": 60},
    {"address": "192.0.2.10", "port": 80},
    {"address": "192.0.2.11", "port": 80},
    {"address": "2001:DB8::10", "port": 80},
    {"address": "2001:db8:0:0::10", "port": 80, "protocol": "udp"},
    {"firewall_mark": 7},
    {"firewall_mark": 7, "family": "ipv6", "real_servers": [{"address": "2001:db8::2"}]},
    {"firewall_mark": 80, "persistence": 60},
]
SETTINGS: list[Options] = [
    {},
    {"scheduler": "sh", "flags": ["sh-port"]},
    {"real_servers": []},
    {"real_servers": [{"address": "10.0.0.1", "weight": 0}, {"address": "10.0.0.2", "forwarding": "dr"}]},
    {"exclusive": False, "real_servers": [{"address": "10.0.0.1", "state": "absent"}]},
]


@pytest.mark.full
def test_a_second_run_changes_nothing_for_two_virtual_servers_of_a_task(node):
    """Each pair in both orders, with servers of its own and with the same, and with purge of the addresses."""
    real = {False: [{"address": "10.0.0.1"}], True: [{"address": "2001:db8::1"}]}
    tasks = []
    for first, second in itertools.combinations(BESIDE, 2):
        for one, other in ((each, SETTINGS[0]) for each in SETTINGS):
            pair = [
                {"real_servers": real[":" in each.get("address", "")], **each, **settings}
                for each, settings in ((first, one), (second, other))
            ]
            addresses = [each["address"] for each in pair if "address" in each]
            tasks.append({"services": pair} if len(tasks) % 2 else {"services": pair[::-1], "purge": addresses})
    node.play({MODULES: {"modules": ["ip_vs", "ip_vs_wlc", "ip_vs_sh"], "persistent": False}})
    assert faults(node, "ipvs_services", tasks) == []


@pytest.mark.full
@pytest.mark.parametrize("source", ["kernel_modules", "ipvs_services", "sysctls", PAGE])
def test_examples_do_what_a_check_predicts_and_then_nothing(node, source):
    assert faults_of_examples(node, source, LOADED) == []
