# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Preflight: missing features and conflicts, and their evaluation."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError, PreflightError
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.family import FamilyContext, FamilyServices
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.choose import mode_named
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.ipvs import IpvsMode
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.ipvs_iptables import IPVS_MODE
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.modes.ipvs_nftables import IPVS_WITH_NFTABLES
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import LEGACY, NFT, XtablesVariant
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight import (
    check,
    features,
    findings,
    ipvs_sets,
    limits,
    localhost,
    processes,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.settings import DataplaneSettings
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.info import ServicePortInfo, ServicePortName
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.table import NodeContext

RELEASE = "6.1.0-13-amd64"
ALL_RIGHTS = (1 << 40) - 1


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def process(name: str, *arguments: str) -> processes.Process:
    return processes.Process(7, name, arguments or (name,))


def names(found: list[findings.Finding]) -> list[tuple[str, str]]:
    return [(finding.name, finding.severity) for finding in found]


# -- evaluation --------------------------------------------------------------------------------------------------------

ERROR = findings.Finding(findings.KUBE_PROXY, findings.ERROR, "kube-proxy runs", "stop it")
WARNING = findings.Finding(findings.FIREWALLD, findings.WARNING, "firewalld is active", "disable it")


def test_errors_are_one_line_with_remedy_and_name() -> None:
    other = findings.Finding(findings.MODULES, findings.ERROR, "module x\nis missing", "install it")
    with pytest.raises(PreflightError) as raised:
        findings.judge([ERROR, WARNING, other])
    assert str(raised.value) == "kube-proxy runs: stop it [kube-proxy]; module x is missing: install it [modules]"


def test_ignored_findings_do_not_stop() -> None:
    assert findings.judge([WARNING]) == ["firewalld is active: disable it [firewalld]"]
    assert findings.judge([ERROR, WARNING], ["kube-proxy", "firewalld"]) == [
        "ignored: kube-proxy runs: stop it [kube-proxy]"
    ]


def test_unknown_names_to_ignore_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="ignore_findings: firewall: not the name of a finding"):
        findings.judge([], ["firewall"])


# -- limits ------------------------------------------------------------------------------------------------------------


def test_set_limit_names_the_first_service_that_no_longer_fits() -> None:
    contributions = [
        (f"shop/s{number}:http", [("KUBE-CLUSTER-IP", number), ("KUBE-LOOP-BACK", 0)]) for number in range(5)
    ]
    assert limits.set_limit_findings(contributions, limit=5) == []
    (found,) = limits.set_limit_findings(contributions, limit=3)
    assert found.name == findings.SET_LIMIT and found.severity == findings.ERROR
    assert (
        "ipset KUBE-CLUSTER-IP holds at most 3 elements, 5 are needed; Service shop/s3:http is the first" in found.what
    )


def test_shared_elements_count_once() -> None:
    assert limits.set_limit_findings([("a", [("S", 1)]), ("b", [("S", 1)])], limit=1) == []


def route(number: int) -> ServicePortInfo:
    address = f"10.96.{number >> 8}.{number & 255}"
    key = ServicePortName("shop", f"s{number}", "http", "TCP")
    none = ((),) * 4
    return ServicePortInfo(
        key, "IPv4", address, 80, 0, (), (), (), 0, False, False, False, True, False, 0, *none, has_any=False
    )


def test_sets_of_ipvs_mode_are_counted_from_the_routes() -> None:
    routes = {item.key: item for item in map(route, range(40))}
    settings = DataplaneSettings("IPv4")
    assert list(ipvs_sets.ipvs_set_contributions(routes, settings)) == []  # far from the limit: nothing is rendered
    found = limits.set_limit_findings(ipvs_sets.ipvs_set_contributions(routes, settings, limit=30), limit=30)
    assert {finding.name for finding in found} == {findings.SET_LIMIT}
    assert any("ipset KUBE-CLUSTER-IP holds at most 30 elements, 40 are needed" in finding.what for finding in found)
    assert all("Service shop/s30:http is the first" in finding.what for finding in found)


@pytest.mark.parametrize(("mode", "refused"), [(IPVS_MODE, True), (IPVS_WITH_NFTABLES, False)])
def test_only_the_filter_backend_of_ipsets_has_the_limit(mode: IpvsMode, refused: bool) -> None:
    key = ServicePortName("shop", "s", "http", "TCP")
    few = {key: route(0)}
    many = {key._replace(port_name=str(number)): route(number) for number in range(limits.ELEMENTS_LIMIT + 1)}
    for service_ports, expected in ((few, False), (many, refused)):
        context = FamilyContext(DataplaneSettings("IPv4"), NodeContext("IPv4", "node1"), None)
        families = [FamilyServices(context, service_ports)]
        found = limits.set_limit_findings(mode.set_contributions(families))
        assert bool(found) is expected
        assert all("use ipvsFilterBackend nftables" in finding.remedy for finding in found)
    assert mode.needs.ipsets is refused


# -- features ----------------------------------------------------------------------------------------------------------


def test_rights_name_the_capabilities() -> None:
    assert features.rights_findings(ALL_RIGHTS) == []
    (found,) = features.rights_findings(1 << 13)
    assert "lacks CAP_NET_ADMIN" in found.what and "become: true" in found.remedy


def test_modules_not_installed_and_not_loadable(tmp_path: Path) -> None:
    put(tmp_path, "proc/modules", "")
    put(tmp_path, f"lib/modules/{RELEASE}/modules.builtin", "kernel/dummy.ko\n")
    put(tmp_path, f"lib/modules/{RELEASE}/modules.dep", "kernel/ip_vs.ko:\n")
    put(tmp_path, "etc/os-release", "ID=rocky\nID_LIKE='rhel centos'\n")
    found = features.module_findings(["ip_vs", "ip_vs_mh", "ip_vs_wrr", "dummy"], 0, RELEASE, str(tmp_path))
    assert names(found) == [("modules", "error"), ("rights", "error")]
    assert found[0].what == f"kernel module ip_vs_mh, ip_vs_wrr not available for kernel {RELEASE}"
    assert f"kernel-modules-extra-{RELEASE}" in found[0].remedy
    assert "modprobe -a ip_vs" in found[1].remedy
    assert features.module_findings(["ip_vs", "dummy"], ALL_RIGHTS, RELEASE, str(tmp_path)) == []


def test_nftables_needs_a_newer_kernel() -> None:
    minimum = mode_named("nftables").needs.kernel
    (found,) = features.kernel_version_findings("nftables", minimum, (5, 12, 19))
    assert (found.name, found.severity) == ("kernel-version", "error")
    assert "kernel 5.12.19 is older than 5.13" in str(found)
    assert features.kernel_version_findings("nftables", minimum, (5, 13, 0)) == []
    assert features.kernel_version_findings("ipvs", mode_named("ipvs").needs.kernel, (4, 18, 0)) == []


def variant(name: str = LEGACY, version: tuple[int, int, int] = (1, 8, 9)) -> XtablesVariant:
    return XtablesVariant(
        family="IPv4",
        name=name,
        reason="",
        version=version,
        main="/sbin/iptables",
        save="/sbin/iptables-save",
        restore="/sbin/iptables-restore",
    )


def test_missing_extensions_are_named(tmp_path: Path) -> None:
    put(tmp_path, "proc/net/ip_tables_matches", "comment\nmark\nstatistic\n")
    put(tmp_path, "proc/net/ip_tables_targets", "MARK\nMASQUERADE\n")
    put(tmp_path, f"lib/modules/{RELEASE}/modules.builtin", "kernel/xt_conntrack.ko\n")
    put(tmp_path, f"lib/modules/{RELEASE}/modules.dep", "kernel/xt_addrtype.ko:\n")
    (found,) = features.extension_findings(features.IPTABLES_EXTENSIONS, {"IPv4": variant()}, RELEASE, str(tmp_path))
    assert found.what == f"IPv4: kernel {RELEASE} has no iptables extension recent"
    assert "xt_recent" in found.remedy
    (found,) = features.extension_findings(features.IPVS_EXTENSIONS, {"IPv4": variant()}, RELEASE, str(tmp_path))
    assert found.what.endswith("extension set")


def test_extensions_are_not_checked_without_a_list(tmp_path: Path) -> None:
    variants = {"IPv4": variant(NFT)}
    assert features.extension_findings(features.IPTABLES_EXTENSIONS, variants, RELEASE, str(tmp_path)) == []


def test_old_programs_are_a_warning() -> None:
    assert names(features.iptables_findings({"IPv4": variant(version=(1, 6, 1))})) == [("tools", "warning")]
    assert features.iptables_findings({"IPv4": variant()}) == []


# -- conflicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        (process("kube-proxy", "/usr/local/bin/kube-proxy", "--config=/x"), [("kube-proxy", "error")]),
        (process("kube-router", "/kube-router", "--run-router"), [("kube-router", "error")]),
        (process("kube-router", "/kube-router", "--run-service-proxy=false"), []),
        (process("k3s-server", "/usr/local/bin/k3s", "server"), [("embedded-kube-proxy", "warning")]),
        (process("k3s-server", "/usr/local/bin/k3s", "server", "--disable-kube-proxy"), []),
        (process("kubelite", "/snap/microk8s/8612/kubelite"), [("embedded-kube-proxy", "warning")]),
        (process("firewalld", "/usr/bin/python3", "-s", "/usr/sbin/firewalld", "--nofork"), [("firewalld", "warning")]),
        (process("cilium-agent"), [("cilium", "warning")]),
        (process("less", "less", "kube-proxy"), []),
        (process("kubenode-proxy", "/usr/bin/python3", "/usr/bin/kubenode-proxy", "run"), []),
    ],
)
def test_other_managers(running: processes.Process, expected: list[tuple[str, str]]) -> None:
    found = processes.process_findings([running])
    assert names(found) == expected
    assert all(finding.remedy for finding in found)


def test_processes_of_other_network_namespaces_do_not_count(tmp_path: Path) -> None:
    for number, namespace in (("self", "net:[1]"), ("10", "net:[1]"), ("11", "net:[2]")):
        put(tmp_path, f"proc/{number}/cmdline", "/usr/bin/kube-proxy\0--config=x\0")
        put(tmp_path, f"proc/{number}/comm", "kube-proxy\n")
        (tmp_path / f"proc/{number}/ns").mkdir()
        (tmp_path / f"proc/{number}/ns/net").symlink_to(namespace)
        (tmp_path / f"proc/{number}/ns/user").symlink_to("user:[1]")
        put(tmp_path, f"proc/{number}/status", "CapEff:\t0000000000003000\n")
    assert [item.number for item in processes.processes(str(tmp_path))] == [10]


KUBE_PROXY = process("kube-proxy", "/usr/local/bin/kube-proxy")
CILIUM = process("cilium-agent")
SERVES = "networkPolicy:\n  enabled: true\n  # standalone: true\n"
LEAVES = "networkPolicy:\n  enabled: true\n  standalone: true\n"


@pytest.mark.parametrize(
    ("configuration", "kept_off", "running", "here", "standalone", "removed"),
    [
        (None, False, [], [], [], []),
        (SERVES, False, [], [], ["kept-off"], []),
        (SERVES, False, [CILIUM], [], [], []),
        (SERVES, True, [], [], ["kept-off"], ["kept-off"]),
        (LEAVES, False, [], [], [], ["kube-proxy"]),
        ("networkPolicy: {enabled: yes, standalone: yes}\n", False, [], [], [], ["kube-proxy"]),
        (LEAVES, False, [KUBE_PROXY], ["kube-proxy"], [], ["kube-proxy", "kube-proxy"]),
        (
            "networkPolicy: {enabled: true, 'standalone': True}\n",
            True,
            [],
            [],
            ["kept-off"],
            ["kube-proxy", "kept-off"],
        ),
        # No configuration that could be loaded.
        ("networkPolicy: {standalone: true\n", False, [], [], [], ["kube-proxy"]),
    ],
)
def test_a_node_is_never_left_without_a_service_proxy(
    configuration: str | None,
    kept_off: bool,
    running: list[processes.Process],
    here: list[str],
    standalone: list[str],
    removed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the agent's configuration, the mark of a migration, and what runs."""
    for name, text in (("CONFIGURATION_FILE", configuration), ("KEPT_OFF_FILE", "x" if kept_off else None)):
        monkeypatch.setattr(processes, name, str(tmp_path / name))
        if text is not None:
            put(tmp_path, name, text)
    monkeypatch.setattr(processes, "processes", lambda _root="": running)
    assert [finding.name for finding in processes.service_proxy_findings()] == here
    assert [finding.name for finding in processes.service_proxy_findings(standalone=True)] == standalone
    assert [finding.name for finding in processes.removal_findings(running)] == removed


@pytest.mark.parametrize(
    ("running", "found"),
    [
        (process("k3s", "/usr/local/bin/k3s", "server"), ["embedded-kube-proxy"]),
        (process("k3s", "/usr/local/bin/k3s", "server", "--disable-kube-proxy"), []),
        (process("kubelite"), ["embedded-kube-proxy"]),
        (process("kube-router", "kube-router", "--run-service-proxy=true"), ["kube-router"]),
        (CILIUM, ["cilium"]),
        (KUBE_PROXY, ["kube-proxy"]),
        (process("kubelet"), []),
    ],
)
def test_rules_that_may_be_those_of_a_running_program_are_kept(running: processes.Process, found: list[str]) -> None:
    assert names(processes.removal_findings([running], ours=False)) == [(name, "error") for name in found]
    assert [finding.name for finding in processes.removal_findings([running])] == [
        name for name in found if name == "kube-proxy"
    ]


def test_ufw_dropping_forwarded_traffic_is_found(tmp_path: Path) -> None:
    assert processes.ufw_findings(str(tmp_path)) == []
    put(tmp_path, "etc/ufw/ufw.conf", "# ENABLED\nENABLED=yes\n")
    assert names(processes.ufw_findings(str(tmp_path))) == [("ufw", "warning")]
    put(tmp_path, "etc/default/ufw", 'DEFAULT_FORWARD_POLICY="ACCEPT"\n')
    assert processes.ufw_findings(str(tmp_path)) == []


def test_forward_policy_names_chain_and_family() -> None:
    (found,) = check.forward_findings({"IPv4": "DROP", "IPv6": "ACCEPT"})
    assert "IPv4: the policy of chain FORWARD in table filter is DROP" in found.what
    assert "iptables -P FORWARD ACCEPT" in found.remedy


@pytest.mark.parametrize(
    ("address", "kind", "families"),
    [
        ("127.0.0.1", socket.SOCK_STREAM, (IPV4,)),
        ("127.0.0.9", socket.SOCK_DGRAM, (IPV4,)),
        ("0.0.0.0", socket.SOCK_STREAM, (IPV4,)),
        ("::1", socket.SOCK_STREAM, (IPV6,)),
        ("::", socket.SOCK_DGRAM, (IPV4, IPV6)),
    ],
)
def test_programs_at_node_ports_that_are_refused_are_named(address: str, kind: int, families: tuple[str, ...]) -> None:
    protocol = "tcp" if kind == socket.SOCK_STREAM else "udp"
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind) as listening:
        listening.bind((address, 0))
        if protocol == "tcp":
            listening.listen()
        port = listening.getsockname()[1]
        for family in (IPV4, IPV6):
            found = localhost.localhost_findings({(family, protocol, port): "shop/cart:http"})
            assert [(item.name, item.severity) for item in found] == (
                [("localhost-node-port", "warning")] if family in families else []
            )
            for item in found:
                place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
                assert f"(process {os.getpid()}) listens at {place} ({protocol.upper()}), which" in str(item)
                assert "Service shop/cart:http has that node port" in str(item)
        other = "udp" if protocol == "tcp" else "tcp"
        assert not localhost.localhost_findings({(IPV4, other, port): "a/b", (IPV6, other, port): "a/b"})


def test_every_check_runs_with_and_without_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "capabilities", lambda: 0)
    assert names(check.preflight(check.Intention(mode_named("iptables").needs, ("IPv4",)))) == [("rights", "error")]
    monkeypatch.setattr(check, "capabilities", lambda: ALL_RIGHTS)
    found = check.preflight(check.Intention(mode_named("nftables").needs, ("IPv4",)), "5.10.0-1-none")
    assert ("kernel-version", "error") in names(found)
    with pytest.raises(ConfigurationError, match="mode 'kernelspace'"):
        check.preflight(check.Intention(check.ModeNeeds("kernelspace"), ("IPv4",)))
