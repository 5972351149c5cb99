# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Complete convergences: repeated, in check mode, across modes and removal, verified with the usual tools.

Rules of other programs exist in every table that a mode writes to, and must be byte-identical afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.load import load
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence import converge as convergence
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.history.converged import converge
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.request import Report, Request
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime import ledger
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.runtime.lock import ConvergenceLock
from ansible_collections.kubenode.proxy.plugins.module_utils.errors import KernelError, PreflightError
from ansible_collections.kubenode.proxy.plugins.module_utils.regular_files import open_regular
from tests.kernel.external_rules import has_nftables, parameters, variants
from tests.lab import manifests

UML = pytest.mark.uml
# Each mode, and the iptables variant that the rules of other programs make the node use.
MODES = [
    ("iptables", "legacy"),
    ("iptables", "nft"),
    ("nftables", "nft"),
    pytest.param("iptables", "legacy", marks=(UML, pytest.mark.full), id="iptables-uml"),
    pytest.param("ipvs", "legacy", marks=UML, id="ipvs-uml"),
]
FOREIGN_CHAINS = (
    ("nat", ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")),
    ("filter", ("INPUT", "FORWARD", "OUTPUT")),
    ("mangle", ("PREROUTING", "OUTPUT")),
)
EXTERNAL_TABLE = "table inet external { chain kept { type filter hook input priority 10; tcp dport 9 counter drop; }; }"


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def has_ipvs() -> bool:
    return os.path.exists("/proc/net/ip_vs")


def service(name: str, number: int, kind: str = "ClusterIP", protocol: str = "TCP", **spec: Any) -> Dict[str, Any]:
    port = manifests.port(80, name="main", protocol=protocol)
    if kind != "ClusterIP":
        port["nodePort"] = 30000 + number
    addresses = (f"10.96.0.{number}", f"fd00:96::{number}")
    return manifests.service(name, addresses, [port], namespace="shop", type=kind, **spec)


def endpoint_slices(name: str, number: int, count: int, protocol: str = "TCP") -> List[Dict[str, Any]]:
    return [
        manifests.endpoint_slice(
            name,
            [manifests.endpoint(f"{prefix}{last}", f"node-{last % 2}") for last in range(1, count + 1)],
            [manifests.port(8080, name="main", protocol=protocol)],
            name=f"{name}-{family}",
            namespace="shop",
        )
        for family, prefix in (("ipv4", f"10.244.{number}."), ("ipv6", f"fd00:244:{number}::"))
    ]


def cluster() -> ClusterState:
    """Return the state of a cluster with every kind of Service, in both families."""
    affinity = {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}}}
    balanced = service(
        "balanced", 4, "LoadBalancer", loadBalancerSourceRanges=["192.0.2.0/24"], externalTrafficPolicy="Local"
    )
    balanced["spec"]["healthCheckNodePort"] = 31004
    balanced["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.4"}, {"ip": "2001:db8::4"}]}}
    objects = [
        service("plain", 1),
        service("sticky", 2, externalIPs=["198.51.100.2"], **affinity),
        service("node", 3, "NodePort", "UDP"),
        balanced,
        service("deserted", 5),
        *endpoint_slices("plain", 1, 3),
        *endpoint_slices("sticky", 2, 2),
        *endpoint_slices("node", 3, 2, "UDP"),
        *endpoint_slices("balanced", 4, 2),
        {"kind": "Node", "metadata": {"name": "node-1"}, "status": {"addresses": []}},
    ]
    state = ClusterState.from_objects(objects)
    assert state.refusals == ()
    return state


def request(mode: str, directory: Path, **more: Any) -> Request:
    configuration = load({"mode": mode, "nodePortAddresses": ["primary"]}).configuration
    values = {"cluster": cluster(), "node_name": "node-1", "state_directory": str(directory / "state"), **more}
    return Request(configuration=configuration, whole_cluster=False, **values)


def remove(directory: Path) -> Report:
    return converge(Request(ClusterState(), load({}).configuration, state="absent", state_directory=str(directory)))


def add_external_rules(preferred: str) -> None:
    """Add rules of other programs to every table and variant; the one with most of them is the variant in use."""
    for program in ("iptables", "ip6tables"):
        for variant in variants():
            for table, chains in FOREIGN_CHAINS:
                for chain in chains:
                    words = ["-p", "tcp", "--dport", "9", "-m", "comment", "--comment", f'of "others" in {chain}']
                    run(f"{program}-{variant}", "-t", table, "-A", chain, *words)
        run(f"{program}-{preferred}", "-t", "filter", "-N", "OTHERS")
        run(f"{program}-{preferred}", "-t", "filter", "-A", "OTHERS", "-j", "ACCEPT")
    if has_nftables():
        run("nft", EXTERNAL_TABLE)
    if has_ipvs():
        run("ipvsadm", "-A", "-f", "7", "-s", "rr")
        run("ipset", "create", "EXTERNAL", "hash:ip")
        run("ipset", "add", "EXTERNAL", "192.0.2.99")


def rules() -> List[str]:
    """Return everything in this network namespace that a mode may write to, as the usual tools print it."""
    commands = [[f"{program}-{variant}-save"] for program in ("iptables", "ip6tables") for variant in variants()]
    if has_nftables():
        commands.append(["nft", "list", "ruleset"])
    if has_ipvs():
        commands += [["ipvsadm", "-Sn"], ["ipset", "save"]]
    commands.append(["ip", "-o", "address"])
    lines = [line for command in commands for line in run(*command).splitlines()]
    # Comments contain the time, and a recreated device or set has another number.
    return [re.sub(r"^\d+: | initval \w+", "", line) for line in lines if not line.startswith("#")]


def everything(directory: Path) -> Tuple[List[Any], ...]:
    """Return everything that a check must not change: rules, kernel parameters, modules, files."""
    values = parameters(re.compile("count|expect"), re.compile("conntrack|vs|conf/(all|lo)"))
    modules = os.listdir("/sys/module")
    files = [str(path) for top in (directory, Path("/run")) for path in sorted(top.glob("**/kubenode*"))]
    return rules(), sorted(values.items()), sorted(modules), files, sorted(map(str, directory.rglob("*")))


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
        assert done.xtables_variant.split("(")[1].startswith(variant)
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


@UML
def test_ipvs_and_iptables_leave_nothing_of_each_other(tmp_path):
    add_external_rules("legacy")
    switch_modes(tmp_path, "iptables", "ipvs", "iptables")


def test_convergences_wait_for_each_other(tmp_path):
    """Of several concurrent convergences exactly one changes something, and none fails."""
    wanted = request("nftables", tmp_path, lock_timeout=60.0)
    reports: List[Report] = []
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


def refuse_writes(patch: pytest.MonkeyPatch) -> None:
    """Let the ledger lie on a full disk."""

    def opened(path: str, flags: int = os.O_RDONLY) -> int:
        if flags & os.O_WRONLY:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_regular(path, flags)

    patch.setattr(ledger, "open_regular", opened)


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
    assert "shop/node" in path.read_text()
    for damaged in ("", "{", "[1]", '{"version": 99}', "\0" * 64):
        path.write_text(damaged)
        assert not converge(request("nftables", tmp_path)).changed
        assert "shop/node" in path.read_text()


@pytest.mark.parametrize("mode", ("iptables", "nftables", "auto"))
def test_a_check_creates_no_table(tmp_path, mode):
    """Listing a table with iptables-legacy would create it; kubelet's chain shows that legacy is in use."""
    for program in ("iptables-legacy", "ip6tables-legacy"):
        run(program, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    before = everything(tmp_path)
    for state in ("present", "absent"):
        checked = converge(request("iptables", tmp_path, state=state, check=True)._replace(mode=mode))
        assert checked.changed is (state == "present")
    assert everything(tmp_path) == before


def test_a_held_xtables_lock_is_named_and_nothing_is_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    run("iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    run("iptables-legacy", "-t", "nat", "-N", "OTHERS")
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
