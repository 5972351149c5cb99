# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node with the programs of Debian 13: nft 1.1, iptables 1.8.11, Python 3.13, systemd 257.

The kernel is this machine's; ``make debian`` runs tests on that of Debian 13. The project is mounted in the container,
so that kernel tests run there as well, with Debian 13's Python and compared with the output of its programs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conformance.wirelab.cases import load_case
from tests.lab import recorded
from tests.molecule_support.portrait import differences
from tests.waiting import wait_for

from .agent import UNIT, differs, picture, start_pod, wait_for_activity
from .node import ROOT

FULL = pytest.mark.full
VERSIONS = {"nft": "nftables v1.1.", "iptables": "iptables v1.8.11 (nf_tables)", "python3": "Python 3.13."}
KUBE_PROXY = Path(load_case(str(ROOT / "tests/conformance/cases/nodeport-cluster")).file("state-iptables.txt"))
# Rules of another program in the syntax of nft 1.1, much of it unknown to Debian 12's nft.
EXTERNAL_RULES = """\
table inet guard {
    comment "of another program"
    counter seen { comment "kept" }
    quota monthly { over 500 mbytes }
    set blocked { type ipv4_addr . inet_service; flags interval; counter; elements = { 192.0.2.0/24 . 1-22 } }
    set talkers { typeof ip saddr . tcp dport; size 1024; flags dynamic; }
    map ports { typeof tcp dport : verdict; elements = { 2222 : accept, 2323 : drop } }
    chain input {
        type filter hook input priority filter + 5; policy accept;
        ip saddr . tcp dport @blocked drop comment "never here"
        tcp dport vmap @ports
        tcp dport 2424 counter name "seen" quota name "monthly" drop
        tcp dport 2525 add @talkers { ip saddr . tcp dport } last drop
        tcp dport 2626 ct mark set meta mark | 0x00000100
    }
    chain forward {
        type filter hook forward priority mangle; policy accept;
        tcp flags syn tcp option maxseg size set rt mtu
        tcp option mptcp subtype mp-capable counter packets 0 bytes 0 drop
    }
}
table netdev edge {
    chain ingress {
        type filter hook ingress device "lo" priority filter; policy accept;
        ip saddr 198.51.100.66 counter packets 0 bytes 0 drop
    }
}
"""
ASK = """
import socket
with socket.create_connection(("10.96.0.10", 80), 5) as sock:
    sock.sendall(b"is this Debian 13?\\n")
    print(sock.recv(100).decode(), end="")
"""


@pytest.fixture(scope="module")
def node(start):
    container = start("debian13", release="13", project=True)
    start_pod(container)
    return container


def test_programs_are_those_of_debian_13(node):
    for program, version in VERSIONS.items():
        assert node.output(program, "--version").startswith(version)


def inside(node, *command):
    """Run a program in a separate network namespace of the container, in the project's directory."""
    settings = [f"PYTHONPATH={ROOT}", "PYTHONPYCACHEPREFIX=/tmp/bytecode", f"FULL={os.environ.get('FULL', '')}"]
    return node.run("unshare", "--net", "env", f"--chdir={ROOT}", *settings, *command, check=False)


@pytest.mark.parametrize(
    "tests",
    [
        ["nftables_table", "preflight_kernel"],
        ["listed_chains", "legacy_table_names", "ipset_sets", "conntrack_stale", "iptables_nfacct"],
        pytest.param(["takeover", "nftables_packets"], marks=FULL),
        pytest.param(["living_with_others", "leaving", "guards"], marks=FULL),
    ],
    ids=" ".join,
)
def test_kernel_tests_pass_with_its_programs(node, tests):
    files = [f"tests/kernel/test_{name}.py" for name in tests]
    marks = "not uml" + ("" if os.environ.get("FULL") else " and not full")
    done = inside(node, "python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *files)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("mode", "variant"), [("nftables", "nft"), ("iptables", "nft"), pytest.param("iptables", "legacy", marks=FULL)]
)
def test_wire_behaviour_is_kube_proxys(node, mode, variant):
    cases = ["affinity", "cleanup", "lb-source-ranges"]
    if os.environ.get("FULL"):
        cases += ["clusterip-basic", "foreign-rules", "hairpin", "nodeport-local", "udp-endpoint-replaced"]
    words = [word for case in cases for word in ("--cases", case)]
    lab = ["python3", "tests/conformance/lab", "run", "--mode", mode, "--iptables", variant, "--jobs", "3"]
    done = inside(node, *lab, *words)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def rules(node):
    """Return the tables of the other program, as nft prints them without counters."""
    tables = (("inet", "guard"), ("netdev", "edge"))
    return [node.output("nft", "--stateless", "list", "table", *table) for table in tables]


def answers(node):
    return node.run("python3", "-c", ASK, check=False).stdout == "is this Debian 13?\n"


def test_agent_takes_over_beside_tables_of_nft_1_1_and_leaves_nothing(node, cluster):
    node.run("nft", "-f", "-", text=EXTERNAL_RULES)
    before, external = picture(node), rules(node)
    recorded.load(KUBE_PROXY, lambda words, text: node.output(*words, text=text or ""))
    variables = {"agent_kubeconfig": str(cluster.kubeconfig), "agent_configuration": {"mode": "nftables"}}
    node.role("agent", variables)
    wait_for_activity(node)
    wait_for(lambda: answers(node), what="the Service answers")
    assert rules(node) == external and not differs(node)
    assert "KUBE-SERVICES" not in node.output("iptables-save")
    listed = node.output("nft", "list", "ruleset")
    assert "table ip kube-proxy {" in listed and "table inet guard {" in listed
    # nft accepts its own listing.
    node.run("nft", "--check", "-f", "-", text=f"flush ruleset\n{listed}")
    node.run("nft", "delete", "table", "ip", "kube-proxy")
    wait_for(lambda: answers(node), what="the table is back and serves")
    wait_for(lambda: not differs(node), what="all of it")
    assert rules(node) == external
    node.role("agent", {**variables, "agent_state": "absent", "agent_remove_dataplane": True})
    assert node.unit(UNIT, "LoadState")["LoadState"] == "not-found"
    assert rules(node) == external
    # The state before the change of mode is kept, to roll back to.
    changed = differences(before, picture(node))
    assert all("/var/lib/kubenode-proxy-history" in item for item in changed), changed


@FULL
def test_agent_in_iptables_mode(node, cluster):
    node.run("nft", "-f", "-", text="destroy table inet guard\ndestroy table netdev edge\n" + EXTERNAL_RULES)
    before, external = picture(node), rules(node)
    variables = {"agent_kubeconfig": str(cluster.kubeconfig), "agent_configuration": {"mode": "iptables"}}
    node.role("agent", variables)
    wait_for(lambda: answers(node), what="the Service answers")
    assert node.role("agent", variables).changed_tasks == []
    node.run("iptables", "-t", "nat", "-F", "KUBE-SERVICES")
    wait_for(lambda: answers(node) and not differs(node), what="the rules are back and serve")
    node.role("agent", {**variables, "agent_state": "absent", "agent_remove_dataplane": True})
    assert rules(node) == external
    # The state before the change of mode is kept, to roll back to.
    changed = differences(before, picture(node))
    assert all("/var/lib/kubenode-proxy-history" in item for item in changed), changed
