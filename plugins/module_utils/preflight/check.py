# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All checks in one call. The most fundamental findings come first."""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..base.errors import KernelError
from ..kernel import facts
from ..kernel.facts import capabilities
from ..kernel.modules.module_profile import modules_for
from ..kernel.xtables.variant import Survey, XtablesVariant, detect_variant
from .conflicts import conflict_findings, forward_findings, forward_policies
from .features import (
    Extensions,
    extension_findings,
    family_findings,
    ipset_findings,
    iptables_findings,
    ipvs_findings,
    kernel_version_findings,
    module_findings,
    rights_findings,
)
from .findings import ERROR, TOOLS, Finding
from .limits import SetContribution, set_limit_findings
from .localhost import RefusedPorts, localhost_findings
from .processes import service_proxy_findings


class ModeNeeds(NamedTuple):
    """What a mode requires of the node."""

    #: The mode's name, which selects the kernel modules.
    name: str
    #: The oldest supported release.
    kernel: Tuple[int, int, int] = (0, 0, 0)
    #: The iptables matches and targets that the mode's rules use; empty for a mode without iptables.
    extensions: Extensions = {}
    #: Whether the mode uses IPVS, and ipsets.
    ipvs: bool = False
    ipsets: bool = False
    #: The filter backend of ipvs mode, which selects kernel modules, too.
    filter_backend: str = ""
    #: Capabilities of this process without which the mode cannot work.
    capabilities: Tuple[str, ...] = ("CAP_NET_ADMIN", "CAP_NET_RAW")
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
    families: Tuple[str, ...]
    schedulers: Tuple[str, ...] = ()
    variants: Optional[Mapping[str, XtablesVariant]] = None
    set_contributions: Iterable[SetContribution] = ()
    refused_at_loopback: RefusedPorts = {}


def find_variants(families: Sequence[str]) -> Tuple[Dict[str, XtablesVariant], List[Finding]]:
    """Return the iptables to use for each family, and errors for families that have none installed."""
    variants: Dict[str, XtablesVariant] = {}
    findings: List[Finding] = []
    survey = Survey()
    for family in families:
        try:
            variants[family] = detect_variant(family, survey=survey)
        except KernelError as error:
            findings.append(Finding(TOOLS, ERROR, str(error), "install the package iptables"))
    return variants, findings


def _foreign_chain_findings(families: Sequence[str]) -> List[Finding]:
    """Return a warning for each family whose iptables chain FORWARD drops packets that none of its rules accepts.

    For a mode that does not use iptables: an accept in another table of nf_tables does not overrule that chain. Without
    iptables on the node there are none.
    """
    variants, _missing = find_variants(families)
    return forward_findings(forward_policies(variants))


def preflight(intention: Intention, release: str = "") -> List[Finding]:
    """Return all findings about this intention; an empty list if the node is ready. Changes nothing.

    ``release``: of the kernel, for tests. If the process lacks capabilities, only these are reported, because other
    checks could not distinguish a missing feature from one that they may not read. Raises ConfigurationError for an
    unknown mode, KernelError if the state cannot be read at all.
    """
    release = release or facts.kernel_release()
    version = facts.kernel_version(release)
    effective = capabilities()
    needs = intention.needs
    findings = rights_findings(effective, needs.capabilities)
    if findings:
        return findings
    modules = modules_for(needs.name, intention.schedulers, version, filter_backend=needs.filter_backend)
    findings += kernel_version_findings(needs.name, needs.kernel, version)
    findings += module_findings(modules, effective, release)
    variants: Mapping[str, XtablesVariant] = {}
    if needs.extensions:
        variants = intention.variants or {}
        if intention.variants is None:
            variants, missing = find_variants(intention.families)
            findings += missing
        findings += iptables_findings(variants)
        findings += family_findings(variants)
        findings += extension_findings(needs.extensions, variants, release)
    if needs.ipvs:
        findings += ipvs_findings(release)
    if needs.ipsets:
        findings += ipset_findings(release)
        findings += set_limit_findings(intention.set_contributions)
    findings += localhost_findings(intention.refused_at_loopback)
    if needs.exclusive:
        findings += conflict_findings(variants)
        findings += [] if needs.extensions else _foreign_chain_findings(intention.families)
    else:
        findings += service_proxy_findings(standalone=True)
    return findings
