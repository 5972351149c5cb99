# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Complete convergences: repeated, in check mode, across modes and removal, verified with the usual tools.

Rules of other programs exist in every table that a mode writes to, and must be byte-identical afterwards.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError, PreflightError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import converge as convergence
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.handles import KernelHandles
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.lock import ConvergenceLock
from ansible_collections.kubenode.proxy.plugins.module_utils.rollback.converged import converge
from tests.kernel.convergence_node import UML, add_external_rules, everything, refuse_writes, remove, request, rules
from tests.lab.system import run

# Each mode, and the iptables variant that the rules of other programs make the node use.
MODES = [
    ("iptables", "legacy"),
    ("iptables", "nft"),
    ("nftables", "nft"),
    pytest.param("iptables", "legacy", marks=(UML, pytest.mark.full), id="iptables-uml"),
    pytest.param("ipvs", "legacy", marks=UML, id="ipvs-uml"),
]


@pytest.mark.parametrize(("mode", "variant"), MODES)
def test_checked_converged_repeated_and_removed(tmp_path, mode, variant):
    add_external_rules(variant)
    external, before = rules(), everything(tmp_path)
    checked = converge(request(mode, tmp_path, check=True, describe=True))
    assert checked.changed and everything(tmp_path) == before
    done = converge(request(mode, tmp_path, describe=True))
    assert done.families == ("IPv4", "IPv6") and done.counts["services"] == 5
    tables = {change.table: change for change in done.changes if not change.table.startswith("sysctl")}
    assert tables == {item.table: item for item in checked.changes if not item.table.startswith("sysctl")}
    if mode == "iptables":
        assert str(done.xtables_variant).split("(")[1].startswith(variant)
    for again in (converge(request(mode, tmp_path)), converge(request(mode, tmp_path, check=True))):
        assert (again.changed, again.changes) == (False, ())
    converged = everything(tmp_path)
    removing = converge(request(mode, tmp_path, state="absent", check=True))
    assert removing.changed and everything(tmp_path) == converged
    assert remove(tmp_path / "state").changed
    assert rules() == external
    assert not remove(tmp_path / "state").changed


def switch_modes(directory: Path, *modes: str) -> None:
    """Switch from mode to mode; each must leave exactly what it leaves on a node that never ran another mode."""
    alone = {}
    for mode in dict.fromkeys(modes):
        converge(request(mode, directory))
        alone[mode] = rules()
        remove(directory / "state")
    nothing = rules()
    for mode in modes:
        assert converge(request(mode, directory)).changed
        assert sorted(rules()) == sorted(alone[mode])
        assert not converge(request(mode, directory)).changed
    remove(directory / "state")
    assert rules() == nothing


@pytest.mark.parametrize("variant", ("legacy", "nft"))
def test_modes_leave_nothing_of_each_other(tmp_path, variant):
    add_external_rules(variant)
    switch_modes(tmp_path, "iptables", "nftables", "iptables")


@pytest.mark.parametrize(("first", "then"), [("legacy", "nft"), ("nft", "legacy")])
def test_chains_in_the_variant_that_kubelet_does_not_use_are_removed(tmp_path, first, then):
    """At boot, and before kubelet's first start, nothing shows which variant that will be."""
    parameter = Path("/proc/sys/net/ipv4/conf/all/route_localnet")
    run([f"iptables-{first}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    converge(request("iptables", tmp_path))
    assert "KUBE-SVC-" in run([f"iptables-{first}-save"])
    run([f"iptables-{first}", "-t", "mangle", "-X", "KUBE-IPTABLES-HINT"])
    run([f"iptables-{then}", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    checked = converge(request("iptables", tmp_path, check=True))
    report = converge(request("iptables", tmp_path))
    assert (checked.changes, parameter.read_text()) == (report.changes, "1\n")
    assert {f"IPv4 chains ({first})", f"IPv6 chains ({first})"} <= {change.table for change in report.changes}
    assert "KUBE-" not in run([f"iptables-{first}-save"]) + run([f"ip6tables-{first}-save"])
    assert "KUBE-SVC-" in run([f"iptables-{then}-save"])
    assert not converge(request("iptables", tmp_path)).changed


def test_route_localnet_does_not_stay_without_the_rule_that_makes_it_safe(tmp_path):
    """The rule is one of the variant that is not in use, and the mode in effect needs neither."""
    parameter = Path("/proc/sys/net/ipv4/conf/all/route_localnet")
    run(["iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    converge(request("iptables", tmp_path))
    assert parameter.read_text() == "1\n"
    run(["iptables-legacy", "-t", "mangle", "-X", "KUBE-IPTABLES-HINT"])
    run(["iptables-nft", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    without = load({"mode": "iptables", "iptables": {"localhostNodePorts": False}}).configuration
    converge(request("iptables", tmp_path)._replace(configuration=without))
    assert "KUBE-FIREWALL" not in run(["iptables-legacy-save"])
    assert parameter.read_text() == "0\n"


def test_a_kernel_without_nf_tables_has_no_chains_of_iptables_nft(tmp_path, monkeypatch):
    """Its programs fail there, so nothing asks them."""
    monkeypatch.setattr(KernelHandles, "has_nftables", lambda _self: False)
    run(["iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    run(["iptables-nft", "-t", "nat", "-N", "KUBE-SVC-AAAAAAAAAAAAAAAA"])
    converge(request("iptables", tmp_path))
    assert "KUBE-SVC-" in run(["iptables-legacy-save"])
    assert "KUBE-SVC-AAAAAAAAAAAAAAAA" in run(["iptables-nft-save"])


@UML
@pytest.mark.full
def test_ipvs_and_iptables_leave_nothing_of_each_other(tmp_path):
    add_external_rules("legacy")
    switch_modes(tmp_path, "iptables", "ipvs", "iptables")


def test_convergences_wait_for_each_other(tmp_path):
    """Of several concurrent convergences exactly one changes something, and none fails."""
    wanted = request("nftables", tmp_path, lock_timeout=60.0)
    reports: list[Report] = []
    converging = [threading.Thread(target=lambda: reports.append(converge(wanted))) for _number in range(3)]
    for thread in converging:
        thread.start()
    for thread in converging:
        thread.join()
    assert sorted(report.changed for report in reports) == [False, False, True]


def test_a_held_lock_is_named_and_nothing_is_changed(tmp_path):
    before = rules()
    with ConvergenceLock(str(tmp_path / "state"), 0.1), pytest.raises(KernelError) as caught:
        converge(request("nftables", tmp_path, lock_timeout=0.2))
    assert f"held by process {os.getpid()}: another convergence of this node is running" in str(caught.value)
    assert rules() == before


def test_a_ledger_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    refuse_writes(monkeypatch)
    report = converge(request("nftables", tmp_path))
    assert report.changed
    (warning,) = [line for line in report.warnings if "ledger" in line]
    assert "No space left on device; the next run checks connections of UDP Services again" in warning
    assert not converge(request("nftables", tmp_path)).changed


def test_a_damaged_state_file_is_replaced(tmp_path):
    converge(request("nftables", tmp_path))
    path = tmp_path / "state" / "ledger.json"
    intact = path.read_text()
    assert '"10.96.0.3", 80' in intact
    for damaged in ("", "{", "[1]", '{"version": 99}', "\0" * 64):
        path.write_text(damaged)
        assert not converge(request("nftables", tmp_path)).changed
        assert path.read_text() == intact


@pytest.mark.parametrize("mode", ("iptables", "nftables", "auto"))
def test_a_check_creates_no_table(tmp_path, mode):
    """Listing a table with iptables-legacy would create it; kubelet's chain shows that legacy is in use."""
    for program in ("iptables-legacy", "ip6tables-legacy"):
        run([program, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    before = everything(tmp_path)
    for state in ("present", "absent"):
        checked = converge(request("iptables", tmp_path, state=state, check=True)._replace(mode=mode))
        assert checked.changed is (state == "present")
    assert everything(tmp_path) == before


def test_liberal_tracking_omits_the_rule_against_invalid_packets_from_the_first_run_on(tmp_path):
    """The parameter is set after the rules are rendered, or, in a check, not at all."""
    parameter = Path("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
    assert parameter.read_text() == "0\n"
    liberal = load({"mode": "iptables", "conntrack": {"maxPerCore": 0, "tcpBeLiberal": True}}).configuration
    wanted = request("iptables", tmp_path)._replace(configuration=liberal)
    checked = converge(wanted._replace(check=True))
    done = converge(wanted)
    assert parameter.read_text() == "1\n"
    forward = [line for line in rules() if line.startswith("-A KUBE-FORWARD")]
    assert forward and not [line for line in forward if "INVALID" in line]
    assert not converge(wanted).changed
    assert done.changes == checked.changes


def test_a_held_xtables_lock_is_named_and_nothing_is_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    run(["iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT"])
    run(["iptables-legacy", "-t", "nat", "-N", "OTHERS"])
    before = rules()
    with open(tmp_path / "xtables.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(KernelError, match=r"iptables: .*xtables lock.*held.*"):
            converge(request("iptables", tmp_path))
    assert rules() == before


def test_nothing_is_created_without_privileges(tmp_path, monkeypatch):
    monkeypatch.setattr(convergence, "capabilities", lambda: 0)
    for check in (True, False):
        for state in ("present", "absent"):
            with pytest.raises(PreflightError, match=r"lacks CAP_NET_ADMIN.*run as root"):
                converge(request("iptables", tmp_path, state=state, check=check))
    assert list(tmp_path.iterdir()) == []
