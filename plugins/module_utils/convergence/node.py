# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node: its identity in the cluster, its addresses and kernel, and the settings of each family that it serves."""

from __future__ import annotations

import os
from typing import Mapping, NamedTuple, Optional

from ..base.errors import PreflightError
from ..cluster.model import Node
from ..cluster.state import ClusterState
from ..configuration.consistency import check_consistency
from ..configuration.model import KubeProxyConfiguration
from ..kernel.facts import NodeFacts, interface_addresses, node_facts
from ..kernel.xtables.variant import XtablesVariant
from ..rendering.build_settings import dataplane_settings, node_context
from ..rendering.ipvs import model as ipvs
from ..rendering.settings import DataplaneSettings
from ..rendering.userspace import model as userspace
from ..serviceports.node import node_addresses, node_name
from ..serviceports.table import all_service_ports
from .family import FamilyContext, FamilyServices
from .modes.mode import Mode
from .modes.stages.sysctls import tracks_liberally
from .request import Request

#: Devices whose addresses belong to Services and not to the node.
_OWN_DEVICES = (ipvs.DEVICE, userspace.DEVICE)


def node_addresses_now() -> tuple[tuple[str, str], ...]:
    """Return (interface, address) of all interfaces except the proxy's own. Raises KernelError."""
    return tuple((item.interface, item.address) for item in interface_addresses() if item.interface not in _OWN_DEVICES)


class NodeView(NamedTuple):
    """Facts about this node.

    ``node``: its Node object, None if the cluster state has none. ``addresses``: (interface, address) of all interfaces
    except the proxy's own. ``families``: those that are served, the primary one first. ``variants``: the iptables of
    each family, in modes that need it. ``nfacct_counters``: names of the nfacct counters that iptables rules may use.
    """

    name: str
    node: Optional[Node]
    addresses: tuple[tuple[str, str], ...]
    facts: NodeFacts
    families: tuple[str, ...]
    variants: Mapping[str, XtablesVariant]
    warnings: tuple[str, ...]
    nfacct_counters: tuple[str, ...] = ()


def view_node(request: Request, configuration: KubeProxyConfiguration, mode: Mode) -> NodeView:
    """Return facts about the node. ``configuration`` is the one for ``mode``, the mode in effect.

    A family that the host cannot serve is omitted, with a warning. Raises PreflightError if that is the primary family,
    ConfigurationError if the configuration does not fit the node, KernelError if facts cannot be read.
    """
    request.confine()
    name = node_name(request.node_name or configuration.hostname_override, os.uname().nodename)
    node = request.cluster.nodes.get(name)
    facts = node_facts()
    addresses = request.interfaces or node_addresses_now()
    primary = node_addresses(node, configuration.bind_address).primary_family
    variants, missing = mode.find_families(facts.families)
    if primary in missing:
        raise PreflightError(f"{primary}: {missing[primary]}")
    served = [family for family in facts.families if family not in missing] if mode.serves else []
    families = tuple(sorted(served, key=lambda family: family != primary))
    warnings = [f"{family} is not served: {reason}" for family, reason in missing.items()]
    if mode.serves:
        used = any(port.node_port for service in request.cluster.services.values() for port in service.ports)
        pod_cidrs = node.pod_cidrs if node else ()
        warnings += check_consistency(configuration, primary, families, pod_cidrs, has_node_ports=used)
    return NodeView(
        name=name,
        node=node,
        addresses=addresses,
        facts=facts,
        families=families,
        variants=variants,
        warnings=tuple(warnings),
        nfacct_counters=mode.counters(),
    )


def family_settings(
    cluster: ClusterState, configuration: KubeProxyConfiguration, view: NodeView, family: str
) -> DataplaneSettings:
    """Return the settings of one family that the node serves. Raises ConfigurationError."""
    variant = view.variants.get(family)
    return dataplane_settings(
        configuration,
        family,
        node_name=view.name,
        node=view.node,
        node_addresses=view.addresses,
        service_cidrs=cluster.service_cidr_list(family),
        conntrack_liberal=tracks_liberally(configuration, view.facts),
        random_fully=variant is None or variant.random_fully,
        nfacct_counters=view.nfacct_counters,
    )


def family_context(
    cluster: ClusterState, configuration: KubeProxyConfiguration, view: NodeView, family: str
) -> FamilyContext:
    """Return settings, node context and iptables of one family that the node serves. Raises ConfigurationError."""
    return FamilyContext(
        family_settings(cluster, configuration, view, family),
        node_context(configuration, family, view.name, view.node),
        view.variants.get(family),
    )


def family_services(
    cluster: ClusterState, configuration: KubeProxyConfiguration, view: NodeView
) -> list[FamilyServices]:
    """Return every family that the node serves, with its ServicePorts. Raises ConfigurationError."""
    contexts = [family_context(cluster, configuration, view, family) for family in view.families]
    return [FamilyServices(context, all_service_ports(cluster, context.node)) for context in contexts]
