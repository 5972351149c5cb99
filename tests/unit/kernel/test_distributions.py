# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Specifics of nodes like Red Hat Enterprise Linux 10 and Ubuntu 24.04, for which no test has a complete system.

Red Hat 9: test_red_hat.py. Both have Python 3.12, which is between the versions of ``make pythons``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import IPV4
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel import facts
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.modules import modules
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.variant import NFT, XtablesVariant
from ansible_collections.kubenode.proxy.plugins.module_utils.preflight import features

ROOT = Path(__file__).resolve().parents[3]
# os-release, kernel release, suffix of its modules, and the packages with those that a minimal installation lacks.
SYSTEMS: dict[str, tuple[str, str, str, str]] = {
    "Red Hat 10": (
        'ID="rhel"\nID_LIKE="centos fedora"\nVERSION_ID="10.0"\n',
        "6.12.0-55.9.1.el10_0.x86_64",
        ".ko.xz",
        "install the packages kernel-modules-{0} and kernel-modules-extra-{0}",
    ),
    "Ubuntu 24.04": (
        'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n',
        "6.8.0-51-generic",
        ".ko.zst",
        "install the package linux-modules-extra-{0}",
    ),
}


def node(root: Path, name: str, *files: str) -> str:
    """Create the root of such a node with these modules, and return its kernel's release."""
    release_file, kernel, suffix, _remedy = SYSTEMS[name]
    listed = "".join(f"kernel/net/{file}{suffix}:\n" for file in files)
    contents = {
        "etc/os-release": release_file,
        "proc/modules": "nf_tables 376832 0 - Live 0x0000000000000000\n",
        f"lib/modules/{kernel}/modules.builtin": "kernel/net/ipv6/ipv6.ko\n",
        f"lib/modules/{kernel}/modules.dep": listed,
    }
    for path, text in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return kernel


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_missing_module_is_named_with_its_package(tmp_path: Path, name: str) -> None:
    kernel = node(tmp_path, name, "netfilter/ipvs/ip_vs", "netfilter/ipvs/ip_vs_rr")
    assert facts.distribution(str(tmp_path)).version == re.search('VERSION_ID="(.*)"', SYSTEMS[name][0])[1]
    assert modules.available_modules(kernel, str(tmp_path)) == {"ip_vs", "ip_vs_rr"}
    found = modules.ModulesResource(["ip_vs", "ip_set"], release=kernel, root=str(tmp_path)).unavailable(
        ["ip_vs", "ip_set"]
    )
    assert found == {"ip_set": f"not available for kernel {kernel}; {SYSTEMS[name][3].format(kernel)}"}


def test_iptables_on_a_kernel_with_nf_tables_only(tmp_path: Path) -> None:
    """There is no ip_tables and no ip_set: iptables mode works, and the missing modules of ipvs mode are named."""
    compatible = [f"netfilter/{name}" for name in ("nft_compat", "xt_comment", "xt_conntrack", "xt_statistic")]
    kernel = node(tmp_path, "Red Hat 10", *compatible)
    programs = [f"/usr/sbin/iptables{suffix}" for suffix in ("", "-save", "-restore")]
    only = {IPV4: XtablesVariant(IPV4, NFT, "the only variant installed", (1, 8, 11), *programs)}
    needed = {"comment": ("xt_comment",), "conntrack": ("xt_conntrack",), "statistic": ("xt_statistic",)}
    assert features.extension_findings(needed, only, kernel, str(tmp_path)) == []
    (found,) = features.extension_findings({**needed, "set": ("xt_set",)}, only, kernel, str(tmp_path))
    assert found.what == f"IPv4: kernel {kernel} has no iptables extension set"


# Of the reference policy's file contexts (SELinux project, policy/modules: corecommands.fc, systemd.fc, libraries.fc,
# files.fc; Red Hat's policy treats /usr/local like /usr), the last match: init may execute bin_t, and its services
# without a separate domain run unconfined; it may not execute other types.
CONTEXTS = (
    ("/usr/.*", "usr_t"),
    ("/usr/(local/)?s?bin(/.*)?", "bin_t"),
    ("/usr/(local/)?lib(/.*)?", "lib_t"),
    ("/etc(/.*)?", "etc_t"),
    ("/etc/systemd/system(/.*)?", "systemd_unit_file_t"),
    ("/var/lib(/.*)?", "var_lib_t"),
    ("/run(/.*)?", "var_run_t"),
)


def context(path: str) -> str:
    return [kind for pattern, kind in CONTEXTS if re.fullmatch(pattern, path)][-1]


def test_selinux_lets_systemd_start_the_agent_by_the_default_contexts() -> None:
    """No file needs a separate context: neither semanage nor restorecon is called."""
    variables = yaml.safe_load((ROOT / "roles/agent/vars/main.yml").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((ROOT / "roles/agent/defaults/main.yml").read_text(encoding="utf-8"))
    unit = (ROOT / "roles/agent/templates/kubenode-proxy.service.j2").read_text(encoding="utf-8")
    assert [line.split()[0] for line in unit.splitlines() if line.startswith("ExecStart=")] == ["ExecStart={{"]
    assert "ExecStart={{ agent_python }} -I -B {{ __agent_archive }}" in unit
    assert context(defaults["agent_python"]) == context(variables["__agent_command"]) == "bin_t"
    assert context(variables["__agent_unit"]) == "systemd_unit_file_t"
    assert context(variables["__agent_archive"]) == "lib_t"
    assert context(variables["__agent_state_directory"]) == "var_lib_t"
