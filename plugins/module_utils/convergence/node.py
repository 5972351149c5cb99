# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node as it is: who it is in the cluster, its addresses and kernel, and what follows for each family."""

from __future__ import annotations

import os
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..addresses import FAMILIES, IPV6
from ..cluster.model import Node
from ..cluster.state import ClusterState
from ..configuration.consistency import check_consistency
from ..configuration.model import IPTABLES, NFTABLES, KubeProxyConfiguration
from ..errors import KernelError, PreflightError
from ..kernel.facts import NodeFacts, interface_addresses, node_facts
from ..kernel.nftables.probe import unsupported_reason as nftables_unsupported_reason
from ..kernel.xtables.nfacct import usable_nfacct_counters
from ..kernel.xtables.variant import VARIANTS, Survey, XtablesVariant, detect_variant, unsupported_reason
from ..rendering.build_settings import dataplane_settings, routing_context
from ..rendering.ipvs.model import DEVICE
from ..rendering.settings import DataplaneSettings
from ..serviceports.node import node_addresses, node_name
from ..serviceports.table import all_routes
from .request import Request
from .stages import FamilyPlan


class NodeView(NamedTuple):
    """What is known of this node.

    ``node``: its Node object, None if the cluster state has none. ``addresses``: (interface, address) of all interfaces
    except the proxy's own. ``families``: those that can be served, the primary one first. ``variants``: the iptables of
    each family, in modes that need it. ``nfacct_counters``: names of those that rules of iptables mode count with.
    """

    name: str
    node: Optional[Node]
    addresses: Tuple[Tuple[str, str], ...]
    facts: NodeFacts
    families: Tuple[str, ...]
    variants: Mapping[str, XtablesVariant]
    warnings: Tuple[str, ...]
    nfacct_counters: Tuple[str, ...] = ()


def view_node(request: Request, configuration: KubeProxyConfiguration) -> NodeView:
    """Look at the node, with a configuration whose mode is the one in effect.

    A family that the host cannot serve is left out with a warning. Raises PreflightError if that is the primary one,
    ConfigurationError if the configuration does not fit the node, KernelError if something cannot be read.
    """
    name = node_name(request.node_name or configuration.hostname_override, os.uname().nodename)
    node = request.cluster.nodes.get(name)
    facts = node_facts()
    addresses = tuple((item.interface, item.address) for item in interface_addresses() if item.interface != DEVICE)
    primary = node_addresses(node, configuration.bind_address).primary_family
    if configuration.mode == NFTABLES:
        variants: Dict[str, XtablesVariant] = {}
        refused = {family: nftables_unsupported_reason(family) for family in facts.families}
        missing = {family: reason for family, reason in refused.items() if reason}
    else:
        variants, missing = _variants(facts.families)
    if primary in missing:
        raise PreflightError(f"{primary}: {missing[primary]}")
    families = tuple(sorted((f for f in facts.families if f not in missing), key=lambda family: family != primary))
    warnings = [f"{family} is not served: {reason}" for family, reason in missing.items()]
    warnings += check_consistency(configuration, primary, families, node.pod_cidrs if node else ())
    counters = usable_nfacct_counters() if configuration.mode == IPTABLES else ()
    return NodeView(name, node, addresses, facts, families, variants, tuple(warnings), counters)


def _variants(families: Tuple[str, ...]) -> Tuple[Dict[str, XtablesVariant], Dict[str, str]]:
    """The iptables of each family, and why a family has none that can do NAT."""
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


def family_settings(
    cluster: ClusterState, configuration: KubeProxyConfiguration, view: NodeView, family: str
) -> DataplaneSettings:
    """The settings of one family that the node serves. Raises ConfigurationError."""
    variant = view.variants.get(family)
    return dataplane_settings(
        configuration,
        family,
        view.name,
        view.node,
        view.addresses,
        service_cidrs=cluster.service_cidr_list(family),
        conntrack_liberal=view.facts.conntrack_liberal,
        random_fully=variant is None or variant.random_fully,
        nfacct_counters=view.nfacct_counters,
    )


def family_plans(cluster: ClusterState, configuration: KubeProxyConfiguration, view: NodeView) -> List[FamilyPlan]:
    """Settings and routes of every family that the node serves. Raises ConfigurationError."""
    plans = []
    for family in view.families:
        settings = family_settings(cluster, configuration, view, family)
        context = routing_context(configuration, family, view.name, view.node)
        plans.append(FamilyPlan(settings, all_routes(cluster, context), view.variants.get(family)))
    return plans


def removal_plans(families: Sequence[str] = FAMILIES) -> List[FamilyPlan]:
    """For taking chains away: each family with every iptables variant that is installed, and no routes."""
    plans = []
    survey = Survey()
    for family in families:
        for name in VARIANTS:
            try:
                variant = detect_variant(family, name, survey)
            except KernelError:
                continue  # not installed, so none of our chains are in it
            if family == IPV6 and not os.path.exists("/proc/net/if_inet6"):
                continue
            plans.append(FamilyPlan(DataplaneSettings(family), {}, variant))
    return plans
