# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rights of this process, and features of the node's kernel and programs."""

from __future__ import annotations

import os
from typing import Mapping, Sequence

from ..base.addresses import IPV6
from ..base.errors import KernelError
from ..kernel import facts
from ..kernel.modules.modules import ModulesResource, available_modules, present_modules
from ..kernel.programs import find_program
from ..kernel.xtables.variant import LEGACY, XtablesVariant, unsupported_reason
from .findings import ERROR, EXTENSIONS, IPSET, IPVS, KERNEL_VERSION, MODULES, RIGHTS, TOOLS, WARNING, Finding
from .findings import FAMILIES as FAMILIES_FINDING

# linux/capability.h
_CAPABILITIES = {"CAP_NET_ADMIN": facts.CAP_NET_ADMIN, "CAP_NET_RAW": 13}
_CAP_SYS_MODULE = 16

_BECOME = "run as root (in a playbook: become: true)"

Extensions = Mapping[str, tuple[str, ...]]
"""Extension as named in /proc/net/ip_tables_matches and _targets -> the modules that provide it."""

_MATCHES: Extensions = {
    "comment": ("xt_comment",),
    "conntrack": ("xt_conntrack",),
    "addrtype": ("xt_addrtype",),
    "mark": ("xt_mark",),
}
_TARGETS: Extensions = {"MARK": ("xt_mark",), "MASQUERADE": ("xt_MASQUERADE", "ipt_MASQUERADE")}
#: Extensions that the rules of iptables mode and of ipvs mode use.
IPTABLES_EXTENSIONS: Extensions = {**_MATCHES, **_TARGETS, "statistic": ("xt_statistic",), "recent": ("xt_recent",)}
IPVS_EXTENSIONS: Extensions = {**_MATCHES, **_TARGETS, "set": ("xt_set",)}


def rights_findings(effective: int, needed: Sequence[str] = tuple(_CAPABILITIES)) -> list[Finding]:
    """Return an error that names the capabilities for changing the network that ``effective`` lacks."""
    missing = [name for name in needed if not effective >> _CAPABILITIES[name] & 1]
    if not missing:
        return []
    what = f"this process (user id {os.geteuid()}) lacks {' and '.join(missing)}"
    return [Finding(RIGHTS, ERROR, what, _BECOME)]


def module_findings(names: Sequence[str], effective: int, release: str, root: str = "") -> list[Finding]:
    """Return errors for missing modules that cannot be loaded: not installed, no modprobe, or no CAP_SYS_MODULE."""
    resource = ModulesResource(names, release=release, root=root)
    missing = [name for name in resource.names if name not in present_modules(resource.names, release, root)]
    if not missing:
        return []
    findings: list[Finding] = []
    by_reason: dict[str, list[str]] = {}
    unavailable = resource.unavailable(missing)
    for name, reason in unavailable.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, absent in by_reason.items():
        fact, _semicolon, remedy = reason.partition("; ")
        findings.append(Finding(MODULES, ERROR, f"kernel module {', '.join(absent)} {fact}", remedy))
    loadable = [name for name in missing if name not in unavailable]
    if loadable:
        listed = ", ".join(loadable)
        if not find_program("modprobe"):
            what = f"kernel module {listed} is not loaded and modprobe is not installed"
            findings.append(Finding(TOOLS, ERROR, what, "install the package kmod"))
        if not effective >> _CAP_SYS_MODULE & 1:
            what = f"kernel module {listed} is not loaded and this process lacks CAP_SYS_MODULE"
            findings.append(
                Finding(RIGHTS, ERROR, what, f"{_BECOME}, or load it on the host: modprobe -a {' '.join(loadable)}")
            )
    return findings


def kernel_version_findings(mode: str, minimum: tuple[int, int, int], version: tuple[int, int, int]) -> list[Finding]:
    """Return an error if the kernel is older than ``minimum``, which the mode needs."""
    if version >= minimum:
        return []
    what = f"kernel {'.'.join(map(str, version))} is older than {minimum[0]}.{minimum[1]}, which mode {mode} needs"
    return [Finding(KERNEL_VERSION, ERROR, what, "use mode iptables, or a newer kernel")]


def family_findings(variants: Mapping[str, XtablesVariant]) -> list[Finding]:
    """Return errors for families in which iptables cannot do NAT on this node."""
    findings = []
    for family, variant in variants.items():
        reason = unsupported_reason(family, variant)
        if reason:
            remedy = "load the kernel's NAT support, or switch variants (update-alternatives --config iptables)"
            findings.append(Finding(FAMILIES_FINDING, ERROR, f"{family}: {reason}", remedy))
    return findings


def _registered(family: str, root: str) -> list[str]:
    prefix = "ip6" if family == IPV6 else "ip"
    found: list[str] = []
    for kind in ("matches", "targets"):
        found += (facts.read_text(f"{root}/proc/net/{prefix}_tables_{kind}") or "").split()
    return found


def extension_findings(
    needed: Extensions, variants: Mapping[str, XtablesVariant], release: str, root: str = ""
) -> list[Finding]:
    """Return errors for iptables matches and targets that a mode needs and the kernel neither has nor can load.

    Sources are the registered extensions and the list of installed modules. Without that list the nf_tables variant is
    not checked.
    """
    candidates = {module for modules in needed.values() for module in modules}
    usable = present_modules(candidates, release, root) | available_modules(release, root)
    listed = os.path.exists(f"{root}/lib/modules/{release}/modules.builtin")
    findings = []
    for family, variant in variants.items():
        registered = _registered(family, root)
        if not listed and not registered:
            continue
        if variant.name != LEGACY and not listed:
            continue
        missing = [
            name for name, modules in needed.items() if name not in registered and not usable.intersection(modules)
        ]
        if missing:
            modules = ", ".join(needed[name][0] for name in missing)
            what = f"{family}: kernel {release} has no iptables extension {', '.join(missing)}"
            findings.append(
                Finding(EXTENSIONS, ERROR, what, f"install the package that has the kernel module {modules}")
            )
    return findings


def ipvs_findings(release: str, root: str = "") -> list[Finding]:
    """Return an error if the kernel has IPVS but it does not answer in this network namespace.

    Modules that are not loaded yet are not checked, because a request would load them.
    """
    if "ip_vs" in present_modules(["ip_vs"], release, root):
        from ..kernel.ipvs.servers import IpvsSocket

        try:
            IpvsSocket().close()
        except KernelError as error:
            return [Finding(IPVS, ERROR, f"IPVS does not answer: {error}", "use mode nftables or iptables")]
    return []


def ipset_findings(release: str, root: str = "") -> list[Finding]:
    """Return an error if the kernel has ipsets but they do not answer, as for :func:`ipvs_findings`."""
    if "ip_set" in present_modules(["ip_set"], release, root):
        from ..kernel.ipset.sets import IpsetSocket

        try:
            IpsetSocket().close()
        except KernelError as error:
            remedy = "use the filter backend nftables of mode ipvs, or mode nftables or iptables"
            return [Finding(IPSET, ERROR, str(error), remedy)]
    return []


def iptables_findings(variants: Mapping[str, XtablesVariant]) -> list[Finding]:
    """Return warnings for iptables before 1.6.2, whose MASQUERADE does not use random ports.

    Its iptables-restore cannot wait for the xtables lock either, so the engine takes the lock itself.
    """
    findings = []
    for variant in variants.values():
        if not variant.restore_waits:
            what = f"{variant.main.rsplit('/', 1)[-1]} {'.'.join(map(str, variant.version))} is older than 1.6.2"
            findings.append(Finding(TOOLS, WARNING, what, "upgrade iptables for random source ports (--random-fully)"))
    return findings
