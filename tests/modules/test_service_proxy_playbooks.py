# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks, run by name against lab nodes: two in namespaces, and beside them a guest.

The tests of this file build on each other: each starts from the state that the previous one has left.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.lab.ansible_playbook import ansible_playbook, compiled_environment
from tests.lab.cluster import Lab
from tests.lab.demo.nodes import write_snapshot
from tests.lab.demo.playbooks import VARIABLES
from tests.lab.demo.traffic import WEB
from tests.lab.topology import demonstration_nodes
from tests.modules.harness import ROOT

RECAP = re.compile(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE)
LAYOUT = demonstration_nodes(host_has_ipvs=False)
NAMES = ("lab-iptables", "lab-nftables", "lab-ipvs")
# For each node: what it must hold, and a command that makes one entry differ from the cluster's state, with its name.
HELD = {"lab-iptables": "-A KUBE-SERVICES", "lab-nftables": "table ip kube-proxy", "lab-ipvs": "-A -t 10.96.0.10:53"}
DRIFT = {
    "lab-iptables": ("iptables -t nat -D KUBE-SERVICES 1", "iptables chains: 1 different"),
    "lab-nftables": ("nft flush chain ip kube-proxy services", ""),
    "lab-ipvs": (
        "ipvsadm -d -t 10.96.0.10:53 -r $(ipvsadm -Sn | awk '/-a -t 10.96.0.10:53/ {print $5; exit}')",
        "IPv4 real servers: 1 missing",
    ),
}
# The start of a line that verify prints with --diff.
MISSING = {
    "lab-iptables": "+-t nat -A KUBE-SERVICES",
    "lab-nftables": "+  ip daddr . meta l4proto . th dport vmap @service-frontends",
    "lab-ipvs": "+-a -t 10.96.0.10:53 -r",
}
# Everything a convergence may leave: rules and chains (the kernel creates empty tables when they are listed), sets,
# virtual servers, addresses, files.
LOOK = (
    "for save in iptables-nft-save ip6tables-nft-save iptables-legacy-save ip6tables-legacy-save; do "
    "$save 2>/dev/null | grep -e '^-' -e '^:[^ ]* -' | sed 's/\\[[0-9:]*\\]//'; done; "
    "ipset list 2>/dev/null | grep -v -e '^Size' -e '^References'; "
    "nft list tables | grep kube-proxy; "
    "test ! -e /proc/net/ip_vs || ipvsadm -Sn; lsmod 2>/dev/null | grep -o '^ip_vs *' | sort; "
    "ip -o address show dev kube-ipvs0 2>/dev/null; "
    "find /run /var/lib/kubenode-proxy -xdev -name '*kubenode*' -o -xdev -name 'snapshot*' 2>/dev/null | sort; "
    "cd /etc && ls -l --time-style=+ modules-load.d sysctl.d; md5sum modules-load.d/* sysctl.d/* 2>/dev/null; "
)


class Playbooks:
    """The lab, and ansible-playbook run against it."""

    def __init__(self, lab: Lab, scratch: Path) -> None:
        self.lab = lab
        self.scratch = scratch
        self.names = tuple(node.name for node in lab.nodes)
        self.python = scratch / "python"
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in compiled_environment().items())
        self.python.write_text(f'#!/bin/sh\nexec env {variables} /usr/bin/python3 "$@"\n', encoding="utf-8")
        self.python.chmod(0o755)

    def run(self, name, *options, snapshot=None):
        """Run a playbook of the collection; return its status, its output, and the number of changed tasks per host.

        ``snapshot``: by default that of the laboratory; empty if the inventory of an option has it.
        """
        argv = [*ansible_playbook(), "-i", str(self.lab.inventory), "-e", f"ansible_python_interpreter={self.python}"]
        argv += ["-e", f"@{VARIABLES}"]
        if snapshot != "":
            argv += ["-e", f"service_proxy_snapshot={snapshot or self.lab.snapshot}"]
        environment = {
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_LOCAL_TEMP": str(self.scratch / "local"),
            "ANSIBLE_NOCOLOR": "1",
            "TMPDIR": str(self.scratch),
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(
            [*argv, f"kubenode.proxy.{name}", *options], env=environment, capture_output=True, text=True, check=False
        )
        changed = {match[0]: int(match[1]) for match in RECAP.findall(done.stdout)}
        return done.returncode, done.stdout + done.stderr, changed

    def assert_controller_is_clean(self):
        """Check that no snapshot is left on the controller."""
        assert list(self.scratch.glob("kubenode-proxy-*")) == []

    def look(self):
        """Return the state of each node."""
        return {name: self.lab.output(name, f"{LOOK} true") for name in self.names}


@pytest.fixture(scope="module", params=[NAMES[:2], pytest.param(NAMES, marks=pytest.mark.full)], ids=" ".join)
def playbooks(request):
    # The path of an ssh control socket must be short, so the lab has a separate directory.
    name = f"p{os.getpid() % 10000000}"
    with tempfile.TemporaryDirectory(prefix="knp") as scratch:
        snapshot = Path(scratch, "cluster.json")
        write_snapshot(snapshot, LAYOUT)
        with Lab(name, snapshot, request.param, LAYOUT) as lab:
            yield Playbooks(lab, Path(scratch))


@pytest.fixture(scope="module")
def fresh(playbooks):
    """Provide the state of the nodes before any run, which is what a kubelet leaves on them.

    The guest's kernel has no nf_tables for iptables, and kubelet's chain indicates that.
    """
    hint = "-w -t mangle -N KUBE-IPTABLES-HINT"
    if "lab-ipvs" in playbooks.names:
        playbooks.lab.output("lab-ipvs", f"iptables-legacy {hint} && ip6tables-legacy {hint}")
    # The first listing makes the kernel load the modules that it needs to answer.
    playbooks.look()
    return playbooks.look()


def test_preview_shows_every_change_and_leaves_nothing(playbooks, fresh):
    status, text, changed = playbooks.run("converge", "--check", "--diff")
    assert status == 0, text
    for name in playbooks.names:
        assert changed[name] and HELD[name] in text and f"{name}: would serve" in text, text
    for name, held in playbooks.look().items():
        assert held.splitlines() == fresh[name].splitlines(), name
    playbooks.assert_controller_is_clean()


def test_convergence_is_idempotent(playbooks):
    status, text, changed = playbooks.run("converge")
    assert status == 0 and all(changed[name] for name in playbooks.names), text
    held = playbooks.look()
    for name in playbooks.names:
        assert HELD[name] in held[name]
        answer = playbooks.lab.ask("TCP", WEB, 80, playbooks.lab.node(name).client)
        assert answer.outcome == "answer" and answer.backend, f"{name}: {answer}"
    status, text, changed = playbooks.run("converge", "--diff")
    assert status == 0 and changed == dict.fromkeys(playbooks.names, 0), text
    # Of the modes that this node can run, auto prefers the one that it is in.
    node = "lab-nftables"
    automatic = ("-e", "service_proxy_mode=auto", "-e", "kernel_mode=nftables")
    status, text, changed = playbooks.run("converge", "--check", *automatic, "--limit", node)
    assert (status, changed) == (0, {node: 0}), text
    assert playbooks.look() == held
    playbooks.assert_controller_is_clean()


def test_verify_reports_drift_by_its_status(playbooks):
    held = playbooks.look()
    *others, name = playbooks.names
    command, difference = DRIFT[name]
    playbooks.lab.output(name, command)
    drifted = playbooks.look()
    # The drift in nftables mode removes the rule of every Service.
    unserved = name == "lab-nftables"
    traffic = ("-e", "verify_traffic=true", "-e", "verify_services=shop/web,shop/events") if unserved else ()
    status, text, changed = playbooks.run("verify", *traffic)
    assert status != 0 and not any(changed.values())
    assert f"{name} has drifted from the cluster's state: {difference}" in text, text
    for other in others:
        assert f"{other} serves" in text and f"{other} has drifted" not in text
    assert MISSING[name] not in text
    if unserved:
        assert "1 of 2 hosts reach shop/web, shop/events" in text, text
        assert re.search(r"lab-iptables  reached +reached\b", text), text
        assert re.search(rf"{name}  NOT REACHED +\S", text), text
        assert f"{name} does not reach shop/web (tcp://10.96.10.1:80: " in text, text
        assert "lab-iptables does not reach" not in text
    status, text, changed = playbooks.run("verify", "--diff", "--limit", name)
    assert status != 0 and not any(changed.values()) and text.count(f"\n{MISSING[name]}") == 1, text
    assert f"{name} does not reach" not in text
    assert playbooks.look() == drifted
    status, text, changed = playbooks.run("converge", "--limit", name)
    assert status == 0 and changed[name] and list(changed) == [name], text
    assert playbooks.look() == held
    status, text, changed = playbooks.run("verify", "--limit", "lab-iptables", "-e", "proxy_serial=1")
    assert status == 0 and changed == {"lab-iptables": 0}, text


def test_an_error_on_the_controller_stops_before_any_node(playbooks):
    held = playbooks.look()
    bad = playbooks.scratch / "bad.json"
    bad.write_text(playbooks.lab.snapshot.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    prepared = ("-e", "proxy_prepare_kernel=false")
    status, text, _changed = playbooks.run("converge", snapshot=bad)
    # The role that installs packages has not run on any node.
    assert status != 0 and "truncated" in text and "Look for the programs" not in text
    inventory = json.loads(playbooks.lab.inventory.read_text(encoding="utf-8"))
    for name, host in inventory["lab"]["hosts"].items():
        host["service_proxy_snapshot"] = str(bad if name == "lab-nftables" else playbooks.lab.snapshot)
    second = playbooks.scratch / "inventory.json"
    second.write_text(json.dumps(inventory), encoding="utf-8")
    status, text, _changed = playbooks.run("converge", *prepared, "-i", str(second), snapshot="")
    assert status != 0 and "different sources" in text, text
    assert playbooks.look() == held
    playbooks.assert_controller_is_clean()


def test_policies_are_read_if_any_host_of_the_play_needs_them(playbooks):
    """The first host, for which the controller reads the cluster's state, may need less than the others."""
    inventory = json.loads(playbooks.lab.inventory.read_text(encoding="utf-8"))
    inventory["lab"]["hosts"]["lab-nftables"]["service_proxy_network_policy"] = True
    inventory["lab"]["hosts"]["lab-iptables"]["service_proxy_outside_host"] = True
    mixed = playbooks.scratch / "mixed.json"
    mixed.write_text(json.dumps(inventory), encoding="utf-8")
    options = ("--check", "-e", "proxy_prepare_kernel=false", "-i", str(mixed))
    status, text, _changed = playbooks.run("converge", *options)
    # This snapshot has no policies.
    assert status != 0 and "the cluster state has no Pod" in text and "lab-iptables: would serve" not in text, text


def test_cleanup(playbooks):
    status, text, changed = playbooks.run("cleanup")
    assert status == 0 and all(changed[name] for name in playbooks.names), text
    for held in playbooks.look().values():
        ours = [line for line in held.splitlines() if "KUBE-" in line or "kube-ipvs0" in line]
        assert [line for line in ours if "KUBE-IPTABLES-HINT" not in line] == [], held
        assert not [line for line in held.splitlines() if "snapshot" in line or "kubenode-proxy.conf" in line], held
    status, text, changed = playbooks.run("cleanup", "--limit", "lab-iptables")
    assert status == 0 and changed == {"lab-iptables": 0}, text
