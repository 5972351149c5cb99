# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stages of the chains of iptables and ipvs mode, which write to the same tables, and of their removal."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple, Union

from ....base.addresses import IPV4
from ....base.errors import KernelError
from ....kernel.xtables.chains import ChainsResource
from ....kernel.xtables.empty_tables import EmptyTablesResource
from ....kernel.xtables.variant import NFT, Survey, XtablesVariant, detect_variant, unsupported_reason
from ....rendering.iptables.fixed import ownership as iptables_ownership
from ....rendering.iptables.tables import Ownership
from ....rendering.ipvs import chains as ipvs_chains
from ....rendering.settings import DataplaneSettings
from ....resources import ObservedOnce, Stage
from ...family import FamilyContext
from .localnet import localnet_stage

Desired = Union[Mapping[Any, Any], Callable[[Mapping[Any, Any]], Mapping[Any, Any]]]


def chain_ownership(settings: DataplaneSettings, with_shared: bool) -> Ownership:
    """Return the ownership of chains for iptables and ipvs mode: both write to the same tables with the same names."""
    ours = iptables_ownership(settings)
    both = ours._replace(fixed=ours.fixed | ipvs_chains.ownership().fixed)
    return both if with_shared else both._replace(shared=frozenset(), presence_only=frozenset())


def chain_stages(context: FamilyContext, desired: Desired, with_shared: bool) -> List[Stage]:
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


def xtables_families(families: Sequence[str]) -> Tuple[Dict[str, XtablesVariant], Dict[str, str]]:
    """Return the iptables of each family, and why a family has none that can do NAT."""
    variants: Dict[str, XtablesVariant] = {}
    missing: Dict[str, str] = {}
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


def chain_removal_stages(contexts: Sequence[FamilyContext]) -> List[Stage]:
    """Return stages that remove the chains of iptables and ipvs mode, and the jumps to them, of each family.

    Tables of iptables-nft that are empty afterwards are removed as well.
    """
    stages: List[Stage] = []
    for context in contexts:
        if context.variant is None:
            continue
        chains = ChainsResource(context.variant, chain_ownership(context.settings, True), for_removal=True)
        going = ObservedOnce(chains)
        if context.family == IPV4:
            stages.append(localnet_stage(going))
        stages.append(Stage(going, {}))
        if context.variant.name == NFT:
            stages.append(Stage(EmptyTablesResource(chains), {}))
    return stages


def shared_chain_stages(contexts: Sequence[FamilyContext]) -> List[Stage]:
    """Return stages that remove the chain that iptables mode shares with kubelet, unless kubelet uses it."""
    stages = []
    for context in contexts:
        if context.variant is None:
            continue
        ours = iptables_ownership(context.settings)
        shared = ours._replace(fixed=frozenset(), prefixes={}, presence_only=frozenset())
        resource = ChainsResource(context.variant, shared, for_removal=True)
        resource.qualifier = "shared with kubelet"
        going = ObservedOnce(resource)
        if context.family == IPV4:
            stages.append(localnet_stage(going))
        stages.append(Stage(going, {}))
    return stages
