# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All checks in one call. The most fundamental findings come first."""

from __future__ import annotations

from typing import Iterable, Mapping, NamedTuple, Optional, Sequence

from ..base.addresses import IPV4, IPV6
from ..base.errors import KernelError
from ..kernel import facts
from ..kernel.facts import capabilities
from ..kernel.modules.module_profile import modules_for
from ..kernel.programs import find_program, run
from ..kernel.xtables.variant import LEGACY, NFT, Survey, XtablesVariant, detect_variant, run_save, table_names
from . import features
from .findings import ERROR, FORWARD_DROP, TOOLS, WARNING, Finding
from .limits import SetContribution, set_limit_findings
from .localhost import RefusedPorts, localhost_findings
from .processes import process_findings, processes, service_proxy_findings, ufw_findings


class ModeNeeds(NamedTuple):
    """What a mode requires of the node."""

    #: The mode's name, which selects the kernel modules.
    name: str
    #: The oldest supported release.
    kernel: tuple[int, int, int] = (0, 0, 0)
    #: The iptables matches and targets that the mode's rules use; empty for a mode without iptables.
    extensions: features.Extensions = {}
    #: Whether the mode uses IPVS, and ipsets.
    ipvs: bool = False
    ipsets: bool = False
    #: The filter backend of ipvs mode, which selects kernel modules, too.
    filter_backend: str = ""
    #: Capabilities of this process without which the mode cannot work.
    capabilities: tuple[str, ...] = ("CAP_NET_ADMIN", "CAP_NET_RAW")
    #: No other program may serve Services or change the firewall beside it.
    exclusive: bool = True


class Intention(NamedTuple):
    """What is about to be programmed.

    ``needs``: of the mode. ``families``: address families to program. ``schedulers``: IPVS schedulers in use.
    ``variants``: the iptables of each family if already detected; None to detect them.
    ``set_contributions``: the ipset elements of each Service port, in a stable order.
    ``refused_at_loopback``: node ports that do not answer at loopback addresses.
    """

    needs: ModeNeeds
    families: tuple[str, ...]
    schedulers: tuple[str, ...] = ()
    variants: Optional[Mapping[str, XtablesVariant]] = None
    set_contributions: Iterable[SetContribution] = ()
    refused_at_loopback: RefusedPorts = {}


def find_variants(families: Sequence[str]) -> tuple[dict[str, XtablesVariant], list[Finding]]:
    """Return the iptables to use for each family, and errors for families that have none installed."""
    variants: dict[str, XtablesVariant] = {}
    findings: list[Finding] = []
    survey = Survey()
    for family in families:
        try:
            variants[family] = detect_variant(family, survey=survey)
        except KernelError as error:
            findings.append(Finding(TOOLS, ERROR, str(error), "install the package iptables"))
    return variants, findings


def forward_policy(variant: XtablesVariant) -> str:
    """Return the policy of the chain FORWARD, ACCEPT or DROP; empty if table filter is missing or unreadable."""
    if variant.name == LEGACY and "filter" not in table_names(variant.family):
        return ""
    wait = ["-w", "5"] if variant.waits else []
    words = run([variant.main, *wait, "-t", "filter", "-S", "FORWARD"]).output.split()
    return words[2] if words[:2] == ["-P", "FORWARD"] and len(words) > 2 else ""


def _other_rules(variant: XtablesVariant) -> list[str]:
    """Return the rules of the variant that the node does not use, as iptables-save prints them, none if unused."""
    other = LEGACY if variant.name == NFT else NFT
    program = find_program(f"{'ip6tables' if variant.family == IPV6 else 'iptables'}-{other}-save")
    if not program or (other == LEGACY and not table_names(variant.family)):
        return []
    return run_save(program, other, variant.family).output.splitlines()


def forward_policies(variants: Mapping[str, XtablesVariant]) -> dict[str, str]:
    """Return the policy of the chain FORWARD for each family, IPv4 first; DROP if either variant of iptables has it.

    The kernel applies both: what one accepts, the other may still drop.
    """
    found = {family: forward_policy(variants[family]) for family in (IPV4, IPV6) if family in variants}
    for family in (family for family, policy in found.items() if policy != "DROP"):
        if any(line.startswith(":FORWARD DROP ") for line in _other_rules(variants[family])):
            found[family] = "DROP"
    return found


def forward_findings(policies: Mapping[str, str]) -> list[Finding]:
    """Return warnings for families (family to policy) whose chain FORWARD drops packets that no rule accepts."""
    findings = []
    for family, policy in policies.items():
        if policy == "DROP":
            program = "ip6tables" if family == IPV6 else "iptables"
            what = f"{family}: the policy of chain FORWARD in table filter is DROP (Docker and ufw set it), so that"
            what += " Service traffic that no rule accepts is lost"
            remedy = f"{program} -P FORWARD ACCEPT, in both variants, or accept the pods' address ranges in FORWARD"
            findings.append(Finding(FORWARD_DROP, WARNING, what, remedy))
    return findings


def preflight(intention: Intention, release: str = "") -> list[Finding]:
    """Return all findings about this intention; an empty list if the node is ready. Changes nothing.

    ``release``: of the kernel, for tests. If the process lacks capabilities, only these are reported, because other
    checks could not distinguish a missing feature from one that they may not read. Raises ConfigurationError for an
    unknown mode, KernelError if the state cannot be read at all.
    """
    release = release or facts.kernel_release()
    version = facts.kernel_version(release)
    effective = capabilities()
    needs = intention.needs
    findings = features.rights_findings(effective, needs.capabilities)
    if findings:
        return findings
    modules = modules_for(needs.name, intention.schedulers, version, filter_backend=needs.filter_backend)
    findings += features.kernel_version_findings(needs.name, needs.kernel, version)
    findings += features.module_findings(modules, effective, release)
    variants: Mapping[str, XtablesVariant] = {}
    if needs.extensions:
        variants = intention.variants or {}
        if intention.variants is None:
            variants, missing = find_variants(intention.families)
            findings += missing
        findings += features.iptables_findings(variants)
        findings += features.family_findings(variants)
        findings += features.extension_findings(needs.extensions, variants, release)
    if needs.ipvs:
        findings += features.ipvs_findings(release)
    if needs.ipsets:
        findings += features.ipset_findings(release)
        findings += set_limit_findings(intention.set_contributions)
    findings += localhost_findings(intention.refused_at_loopback)
    if needs.exclusive:
        findings += [*process_findings(processes()), *ufw_findings()]
        # An accept in another table of nf_tables does not overrule that chain either.
        used = variants if needs.extensions else find_variants(intention.families)[0]
        findings += forward_findings(forward_policies(used))
    else:
        findings += service_proxy_findings(standalone=True)
    return findings
