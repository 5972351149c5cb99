# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stages of the chains of iptables and ipvs mode, which write to the same tables, and of their removal.

For node ports on 127.0.0.1 kube-proxy sets ``route_localnet``, and a rule in KUBE-FIREWALL drops packets from other
hosts to loopback addresses (CVE-2020-8558). The parameter must not remain set without the rule, so it is the only
parameter that is reset, when that rule is removed.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence, Union, cast

from ....base.addresses import IPV4
from ....base.errors import KernelError
from ....base.whole_files import is_managed
from ....kernel.facts import read_text
from ....kernel.parameters.sysctl_files import boot_values
from ....kernel.parameters.sysctls import SysctlsResource, unchangeable
from ....kernel.xtables.chains import ChainsResource
from ....kernel.xtables.empty_tables import EmptyTablesResource
from ....kernel.xtables.variant import NFT, Survey, XtablesVariant, detect_variant, unsupported_reason
from ....rendering.iptables.fixed import CANARIES, KUBE_FIREWALL
from ....rendering.iptables.fixed import ownership as iptables_ownership
from ....rendering.iptables.tables import Ownership
from ....rendering.ipvs import chains as ipvs_chains
from ....rendering.settings import DataplaneSettings
from ....resources import ObservedOnce, Resource, Stage, WrappedResource
from ...family import FamilyContext

ROUTE_LOCALNET = "net.ipv4.conf.all.route_localnet"
#: Chains of iptables mode in tables that ipvs mode does not use, so that their removal may leave a table empty.
_BESIDE_IPVS = frozenset(CANARIES[:1])


class LocalnetRouting(WrappedResource[str, str]):
    """``route_localnet``, if it is set and the rule that makes it safe is about to be removed; else empty.

    ``chains``: the IPv4 chains that are removed. If the administrator has set the parameter in a file, it is kept.
    """

    def __init__(self, chains: Resource[Any, Any]) -> None:
        super().__init__(SysctlsResource([ROUTE_LOCALNET]))
        self._chains = chains

    def observe(self) -> dict[str, str]:
        """Return the running value. Raises KernelError."""
        running = self._resource.observe()
        if running.get(ROUTE_LOCALNET) != "1" or not self._chains.observe().get(KUBE_FIREWALL):
            return {}
        boot = boot_values([ROUTE_LOCALNET]).get(ROUTE_LOCALNET)
        by_others = boot is not None and boot.value == "1" and not is_managed(read_text(boot.file) or "")
        return {} if by_others or unchangeable([ROUTE_LOCALNET]) else running


def localnet_stage(chains: Resource[Any, Any]) -> Stage:
    """Return the stage that disables ``route_localnet``; it must come before the one that removes the chains."""
    return Stage(LocalnetRouting(chains), lambda observed: dict.fromkeys(observed, "0"))


Desired = Union[Mapping[Any, Any], Callable[[Mapping[Any, Any]], Mapping[Any, Any]]]


def chain_ownership(settings: DataplaneSettings, with_shared: bool) -> Ownership:
    """Return the ownership of chains for iptables and ipvs mode: both write to the same tables with the same names."""
    ours = iptables_ownership(settings)
    both = ours._replace(fixed=ours.fixed | ipvs_chains.ownership().fixed)
    if with_shared:
        return both
    return both._replace(fixed=both.fixed - _BESIDE_IPVS, shared=frozenset(), presence_only=frozenset())


def chain_stages(context: FamilyContext, desired: Desired, with_shared: bool) -> list[Stage]:
    """Return the stage of the chains of a family. ``with_shared``: chains shared with other programs are ours too."""
    if context.variant is None:
        return []
    resource = ChainsResource(context.variant, chain_ownership(context.settings, with_shared))

    def with_referenced(observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the desired table, with chains that are only kept because rules of other programs jump to them."""
        table = desired(observed) if callable(desired) else desired
        kept = [key for key in resource.referenced if key in observed and key not in table]
        return {**table, **dict.fromkeys(kept, ())} if kept else table

    return [Stage(resource, with_referenced)]


def xtables_families(families: Sequence[str]) -> tuple[dict[str, XtablesVariant], dict[str, str]]:
    """Return the iptables of each family, and why a family has none that can do NAT."""
    variants: dict[str, XtablesVariant] = {}
    missing: dict[str, str] = {}
    survey = Survey()
    for family in families:
        try:
            variant = detect_variant(family, survey=survey)
        except KernelError as error:
            missing[family] = str(error)
            continue
        reason = unsupported_reason(family, variant)
        if reason:
            missing[family] = reason
        else:
            variants[family] = variant
    return variants, missing


def removable_chains(context: FamilyContext) -> ChainsResource:
    """Return the chains of iptables and ipvs mode in the variant of a context, which has one, for their removal."""
    variant = cast(XtablesVariant, context.variant)
    return ChainsResource(variant, chain_ownership(DataplaneSettings(context.family), True), for_removal=True)


def chain_removal_stages(contexts: Sequence[FamilyContext], beside_others: bool = False) -> list[Stage]:
    """Return stages that remove the chains of iptables and ipvs mode, and the jumps to them, of each family.

    Tables of iptables-nft that are empty afterwards are removed as well. ``beside_others``: chains in the other variant
    of iptables stay in use, so ``route_localnet`` is kept where they need it, and tables are named with their variant.
    """
    stages: list[Stage] = []
    for context in contexts:
        if context.variant is None:
            continue
        resource = removable_chains(context)
        resource.qualifier = context.variant.name if beside_others else ""
        stages += _removed(resource, with_parameter=not (beside_others and context.settings.localhost_node_ports))
    return stages


def _removed(chains: ChainsResource, with_parameter: bool = True) -> list[Stage]:
    """Return the stages that remove chains, and tables of iptables-nft that are empty without them."""
    going = ObservedOnce(chains)
    stages = [localnet_stage(going)] if chains.family == IPV4 and with_parameter else []
    stages.append(Stage(going, {}))
    if chains.variant.name == NFT:
        stages.append(Stage(EmptyTablesResource(chains), {}))
    return stages


def iptables_remainder_stages(contexts: Sequence[FamilyContext], beside_kube_proxy: bool = False) -> list[Stage]:
    """Return stages that remove what ipvs mode does not use: empty tables, and KUBE-FIREWALL unless kubelet uses it.

    ``beside_kube_proxy``: beside the chains of its ipvs mode, which does not remove those of iptables mode, all of
    these as well.
    """
    stages = []
    for context in contexts:
        if context.variant is None:
            continue
        ours = iptables_ownership(context.settings)
        remainder = ours._replace(fixed=_BESIDE_IPVS, prefixes={}, presence_only=frozenset())
        if beside_kube_proxy:
            remainder = ours._replace(fixed=ours.fixed - ipvs_chains.ownership().fixed)
        resource = ChainsResource(context.variant, remainder, for_removal=True)
        resource.qualifier = "of iptables mode"
        stages += _removed(resource)
    return stages
