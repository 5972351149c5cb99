# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Specifics of nodes like Red Hat Enterprise Linux 9: packages, paths, and iptables-nft as the only variant.

Their Python 3.9 runs all tests of the engine in ``make pythons``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4, IPV6
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import facts, programs
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules import modules
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.parameters import sysctl_files
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import variant
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight import features, findings, processes

ROOT = Path(__file__).resolve().parents[3]
RELEASE = "5.14.0-503.11.1.el9_5.x86_64"
OS_RELEASE = """\
NAME="Red Hat Enterprise Linux"
VERSION="9.5 (Plow)"
ID="rhel"
ID_LIKE="fedora"
VERSION_ID="9.5"
PRETTY_NAME="Red Hat Enterprise Linux 9.5 (Plow)"
"""
CONFIGURATION = "CONFIG_IP_SET=m\nCONFIG_NF_CONNTRACK=y\nCONFIG_DUMMY=m\n# CONFIG_IP_VS_MH is not set\n"


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Return the root directory of such a node, with the files that the engine reads."""
    put(tmp_path, "usr/lib/os-release", OS_RELEASE)
    put(tmp_path, "proc/modules", "nf_conntrack 200704 1 nf_nat, Live 0x0000000000000000\n")
    directory = f"lib/modules/{RELEASE}"
    put(tmp_path, f"{directory}/modules.builtin", "kernel/net/ipv6/ipv6.ko\n")
    put(
        tmp_path,
        f"{directory}/modules.dep",
        "kernel/net/netfilter/ipvs/ip_vs.ko.xz: kernel/net/netfilter/nf_conntrack.ko.xz\n"
        "kernel/net/netfilter/ipvs/ip_vs_rr.ko.xz: kernel/net/netfilter/ipvs/ip_vs.ko.xz\n"
        "extra/ip_vs_sed.ko.xz:\n",
    )
    put(tmp_path, f"{directory}/config", CONFIGURATION)
    return tmp_path


def test_distribution_is_read_from_the_vendors_file(node: Path) -> None:
    found = facts.distribution(str(node))
    assert found == facts.Distribution("rhel", ("fedora",), "9.5", "Red Hat Enterprise Linux 9.5 (Plow)")
    assert found.is_like("rhel")


def test_compressed_modules_are_found_and_missing_ones_named_by_package(node: Path) -> None:
    assert modules.available_modules(RELEASE, str(node)) == {"ip_vs", "ip_vs_rr", "ip_vs_sed"}
    resource = modules.ModulesResource(["ip_vs", "ip_vs_rr", "ip_vs_mh"], release=RELEASE, root=str(node))
    assert resource.unavailable(resource.names) == {
        "ip_vs_mh": (
            f"not available for kernel {RELEASE}; "
            f"install the packages kernel-modules-{RELEASE} and kernel-modules-extra-{RELEASE}"
        )
    }
    (found,) = features.module_findings(["ip_vs_mh"], (1 << 40) - 1, RELEASE, str(node))
    assert (found.name, found.severity) == (findings.MODULES, findings.ERROR)
    assert f"kernel-modules-extra-{RELEASE}" in found.remedy


def test_kernel_configuration_is_found_next_to_the_modules(node: Path) -> None:
    (node / f"lib/modules/{RELEASE}/modules.builtin").unlink()
    names = ["nf_conntrack", "ip_set", "dummy"]
    (node / "proc/modules").write_text("")
    assert modules.present_modules(names, RELEASE, str(node)) == {"nf_conntrack"}


def test_our_parameters_override_those_of_the_vendor(node: Path) -> None:
    put(node, "usr/lib/systemd/systemd-sysctl", "")
    put(node, "usr/lib/sysctl.d/50-redhat.conf", "net.ipv4.conf.default.rp_filter = 1\n")
    put(node, "usr/lib/sysctl.d/50-default.conf", "net.ipv4.ip_forward = 0\n")
    (node / "etc/sysctl.d").mkdir(parents=True)
    (node / "etc/sysctl.conf").write_text("# sysctl settings are defined through files in\n")
    (node / "etc/sysctl.d/99-sysctl.conf").symlink_to("../sysctl.conf")
    ours = "/etc/sysctl.d/99-kubenode-proxy.conf"
    key = "net.ipv4.ip_forward"
    put(node, ours.lstrip("/"), f"{key} = 1\n")
    assert sysctl_files.boot_values([key], str(node)) == {key: sysctl_files.BootValue("1", ours)}
    # An administrator's sysctl.conf is read after it.
    (node / "etc/sysctl.conf").write_text(f"{key} = 0\n")
    found = sysctl_files.boot_values([key], str(node))
    assert found == {key: sysctl_files.BootValue("0", "/etc/sysctl.d/99-sysctl.conf")}


def test_firewalld_is_reported() -> None:
    process = processes.Process(811, "firewalld", ("/usr/bin/python3", "-s", "/usr/sbin/firewalld", "--nofork"))
    (found,) = processes.process_findings([process])
    assert (found.name, found.severity) == (findings.FIREWALLD, findings.WARNING)


@pytest.fixture
def system_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install programs of iptables-nft outside of the user's PATH; there are no legacy ones."""
    directory = tmp_path / "usr/sbin"
    directory.mkdir(parents=True)
    multi = directory / "xtables-nft-multi"
    multi.write_text("#!/bin/sh\necho 'iptables v1.8.10 (nf_tables)'\n")
    multi.chmod(0o755)
    for family in ("iptables", "ip6tables"):
        for suffix in ("", "-save", "-restore", "-nft", "-nft-save", "-nft-restore"):
            (directory / (family + suffix)).symlink_to(multi.name)
    empty = tmp_path / "usr/local/bin"
    empty.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(programs, "_SBIN", (str(directory),))
    return directory


@pytest.mark.parametrize("family", [IPV4, IPV6])
def test_the_only_iptables_is_found_outside_of_the_path(system_programs: Path, family: str) -> None:
    found = variant.detect_variant(family)
    assert (found.name, found.reason, found.version) == (variant.NFT, "the only variant installed", (1, 8, 10))
    assert Path(found.restore).parent == system_programs
    assert found.restore_waits and found.random_fully


def test_legacy_is_refused_if_not_installed(system_programs: Path) -> None:
    with pytest.raises(KernelError, match="iptables: the legacy variant is not installed"):
        variant.detect_variant(IPV4, variant.LEGACY)


@pytest.mark.parametrize("role, name", [("kernel", "kernel_package_names"), ("agent", "__agent_package_names")])
def test_packages_are_known_for_every_family(role: str, name: str) -> None:
    known = yaml.safe_load((ROOT / "roles" / role / "vars/main.yml").read_text(encoding="utf-8"))[name]
    assert {"Debian", "RedHat", "Suse", "Archlinux"} <= set(known)
    assert all(packages and len(set(packages)) == len(packages) for packages in known.values())


def test_names_of_packages_are_those_of_the_family() -> None:
    kernel = yaml.safe_load((ROOT / "roles/kernel/vars/main.yml").read_text(encoding="utf-8"))
    agent = yaml.safe_load((ROOT / "roles/agent/vars/main.yml").read_text(encoding="utf-8"))
    assert kernel["kernel_package_names"]["RedHat"] == ["kmod", "iptables-nft"]
    assert agent["__agent_package_names"]["RedHat"] == ["python3-pyyaml", "python3-prometheus_client"]
