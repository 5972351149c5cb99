# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Other programs that handle this node's Service traffic, change its firewall, or drop the traffic."""

from __future__ import annotations

from typing import Dict, List, Mapping, Tuple

from ..base.addresses import IPV4, IPV6
from ..kernel.programs import find_program, run
from ..kernel.xtables.variant import LEGACY, NFT, XtablesVariant, run_save, table_names
from .findings import FORWARD_DROP, OTHER_IPTABLES, WARNING, Finding
from .processes import process_findings, processes, ufw_findings


def forward_policy(variant: XtablesVariant) -> str:
    """Return the policy of the chain FORWARD, ACCEPT or DROP; empty if table filter is missing or unreadable."""
    if variant.name == LEGACY and "filter" not in table_names(variant.family):
        return ""
    wait = ["-w", "5"] if variant.waits else []
    words = run([variant.main, *wait, "-t", "filter", "-S", "FORWARD"]).output.split()
    return words[2] if words[:2] == ["-P", "FORWARD"] and len(words) > 2 else ""


def _other_variant(variant: XtablesVariant) -> Tuple[str, List[str]]:
    """Return the variant that the node does not use, and its rules as iptables-save prints them, none if unused."""
    other = LEGACY if variant.name == NFT else NFT
    program = find_program(f"{'ip6tables' if variant.family == IPV6 else 'iptables'}-{other}-save")
    if not program or (other == LEGACY and not table_names(variant.family)):
        return other, []
    return other, run_save(program, other, variant.family).output.splitlines()


def forward_policies(variants: Mapping[str, XtablesVariant]) -> Dict[str, str]:
    """Return the policy of the chain FORWARD for each family, IPv4 first; DROP if either variant of iptables has it.

    The kernel applies both: what one accepts, the other may still drop.
    """
    found = {family: forward_policy(variants[family]) for family in (IPV4, IPV6) if family in variants}
    for family in (family for family, policy in found.items() if policy != "DROP"):
        if any(line.startswith(":FORWARD DROP ") for line in _other_variant(variants[family])[1]):
            found[family] = "DROP"
    return found


def forward_findings(policies: Mapping[str, str]) -> List[Finding]:
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


def other_variant_findings(variants: Mapping[str, XtablesVariant]) -> List[Finding]:
    """Return warnings for kube-proxy's chains in the iptables variant that the node does not use.

    They are stale, but the kernel still applies them.
    """
    findings = []
    for family, variant in variants.items():
        prefix = "ip6tables" if family == IPV6 else "iptables"
        other, lines = _other_variant(variant)
        if any(line.startswith(":KUBE-SERVICES ") for line in lines):
            what = f"{family}: kube-proxy's chains are also in the {other} variant of iptables (in use: {variant.name})"
            remedy = f"remove them: {prefix}-{other}-save | grep -v KUBE- | {prefix}-{other}-restore"
            findings.append(Finding(OTHER_IPTABLES, WARNING, what, remedy))
    return findings


def conflict_findings(variants: Mapping[str, XtablesVariant], root: str = "") -> List[Finding]:
    """Return all findings about other programs on this node, each with its remedy."""
    return [
        *process_findings(processes(root)),
        *ufw_findings(root),
        *forward_findings(forward_policies(variants)),
        *other_variant_findings(variants),
    ]
