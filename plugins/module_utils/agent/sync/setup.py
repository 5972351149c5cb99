# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From a configuration and the cluster state to the families that the agent keeps true."""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

from ...cluster.model import Node
from ...cluster.state import ClusterState
from ...configuration.model import IPTABLES, IPVS, NFTABLES, KubeProxyConfiguration
from ...convergence.handles import KernelHandles
from ...convergence.modes import choose_mode
from ...convergence.node import NodeView, family_settings, removal_plans, view_node
from ...convergence.prepare import check_node, missing_node, node_modules, wanted_node_sysctls
from ...convergence.request import Request
from ...convergence.stages import FamilyPlan, leftover_stages, shared_chain_stages
from ...convergence.sysctls import sysctl_stage
from ...kernel.facts import interface_addresses
from ...kernel.sysctls import Wanted
from ...kernel.xtables.nfacct import make_nfacct_counters, usable_nfacct_counters
from ...rendering.build_settings import routing_context
from ...rendering.iptables.fixed import INVALID_COUNTER, LOCALHOST_COUNTER
from ...rendering.ipvs.model import DEVICE
from ...rendering.settings import DataplaneSettings
from ...resources import Kind, Progress, apply_plan, plan
from .proxier import Proxier

#: Made at the start of iptables mode where the kernel can have them, as kube-proxy does; nothing ever removes them.
NFACCT_COUNTERS = (INVALID_COUNTER, LOCALHOST_COUNTER)


class NodeProxy(NamedTuple):
    """The node as the agent serves it: configuration with the mode in effect, what is known of the node, families.

    ``sysctls``: the kernel parameters that the mode wants, by key.
    """

    configuration: KubeProxyConfiguration
    mode_reason: str
    view: NodeView
    families: Tuple[Proxier, ...]
    warnings: Tuple[str, ...]
    sysctls: Mapping[str, Wanted]


def set_up(request: Request, handles: KernelHandles) -> NodeProxy:
    """Look at the node, load modules, set kernel parameters, and make families without any Service yet.

    Raises PreflightError if the mode cannot work here (nothing has been touched then), ConfigurationError, KernelError.
    """
    chosen = choose_mode(request)
    configuration = request.configuration.with_mode(chosen.mode)
    view = view_node(request, configuration)
    plans = [_empty_plan(request.cluster, configuration, view, family) for family in view.families]
    warnings = [*chosen.warnings, *view.warnings, *check_node(configuration, plans, request.ignore_findings)]
    # The Node may come later, so that it is missing is no reason not to serve.
    warnings += [str(finding) for finding in missing_node(request, view)]
    apply_plan(plan([node_modules(configuration, view)]))
    if configuration.mode == IPTABLES and make_nfacct_counters(NFACCT_COUNTERS):
        view = view._replace(nfacct_counters=usable_nfacct_counters())
        plans = [_empty_plan(request.cluster, configuration, view, family) for family in view.families]
    sysctls = wanted_node_sysctls(configuration, view, plans)
    stage, sysctl_warnings = sysctl_stage(sysctls)
    apply_plan(plan([stage]))
    zone = view.node.zone if view.node is not None else ""
    families = tuple(make_family(configuration, view, item, handles, zone) for item in plans)
    return NodeProxy(configuration, chosen.reason, view, families, (*warnings, *sysctl_warnings), sysctls)


def _empty_plan(
    cluster: ClusterState, configuration: KubeProxyConfiguration, view: NodeView, family: str
) -> FamilyPlan:
    settings = family_settings(cluster, configuration, view, family)
    return FamilyPlan(settings, {}, view.variants.get(family))


def make_family(
    configuration: KubeProxyConfiguration, view: NodeView, empty_plan: FamilyPlan, handles: KernelHandles, zone: str
) -> Proxier:
    """A family without any Service yet. ``zone``: that of the node as it is now. Raises KernelError."""
    context = routing_context(configuration, empty_plan.family, view.name, view.node)._replace(zone=zone)
    return Proxier(configuration, empty_plan, context, handles)


class Leftovers(NamedTuple):
    """What other modes left: entries that were taken away, and real servers that stay until connections end."""

    removed: int
    draining: int


def remove_leftovers(proxy: NodeProxy, progress: Progress) -> Leftovers:
    """Remove what other modes left on the node, calling ``progress`` between the parts. Raises KernelError."""
    others = removal_plans(proxy.view.families) if proxy.configuration.mode == NFTABLES else ()
    with KernelHandles(progress) as handles:
        stages = leftover_stages(proxy.configuration.mode, handles, others)
        if proxy.configuration.mode == IPVS:
            stages += shared_chain_stages([FamilyPlan(item.settings, {}, item.variant) for item in proxy.families])
        for stage in stages:
            stage.resource.report_to(progress)
        planned = plan(stages)
        apply_plan(planned)
    servers = [item for item in planned if item.resource.kind == Kind.REAL_SERVERS]
    return Leftovers(
        sum(len(item.change) for item in planned), sum(item.entries - len(item.change.removed) for item in servers)
    )


def look_again(proxy: NodeProxy, cluster: ClusterState) -> Tuple[NodeProxy, Dict[str, DataplaneSettings]]:
    """Return the node with the addresses that it has now, and the settings that follow for each family.

    Raises ConfigurationError, KernelError.
    """
    addresses = tuple((item.interface, item.address) for item in interface_addresses() if item.interface != DEVICE)
    view = proxy.view._replace(addresses=addresses)
    settings = {
        family.family: family_settings(cluster, proxy.configuration, view, family.family) for family in proxy.families
    }
    return proxy._replace(view=view), settings


def node_differences(before: Optional[Node], now: Node) -> List[str]:
    """What changed in a Node that only takes effect with a restart, in words."""
    if before is None:
        return []
    found = []
    if (before.internal_ips, before.external_ips) != (now.internal_ips, now.external_ips):
        found.append("its addresses changed")
    if before.pod_cidrs != now.pod_cidrs:
        found.append("its podCIDRs changed")
    return found
