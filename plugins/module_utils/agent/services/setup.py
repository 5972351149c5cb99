# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Creation of the node's proxiers from a configuration and the cluster state."""

from __future__ import annotations

from typing import Mapping, NamedTuple

from ...cluster.account import SLOTS, NodeFactors, Rates, rates_of
from ...cluster.model import NamespacedName
from ...cluster.state import ClusterState
from ...configuration.model import KubeProxyConfiguration
from ...configuration.validate import in_mode
from ...convergence.family import FamilyContext, FamilyServices
from ...convergence.handles import KernelHandles
from ...convergence.modes.choose import choose_mode
from ...convergence.modes.mode import Mode
from ...convergence.modes.stages.sysctls import sysctl_stage
from ...convergence.node import NodeView, family_context, family_settings, node_addresses_now, view_node
from ...convergence.prepare import check_node, missing_node, node_modules, wanted_node_sysctls
from ...convergence.removal import leaving_stages, leftover_contexts, leftover_stages
from ...convergence.request import Request
from ...kernel.parameters.sysctls import Wanted
from ...rendering.ipvs.model import DEVICE
from ...rendering.settings import DataplaneSettings
from ...resources import Kind, apply_plan, plan
from .portions import Size
from .proxier import Proxier


class Proxiers(NamedTuple):
    """The node as the agent serves it.

    ``configuration``: that of ``mode``, the mode in effect. ``node_view``: what is known of the node. ``families``: one
    proxier for each family that is served. ``sysctls``: the kernel parameters that the mode wants, by key.
    """

    configuration: KubeProxyConfiguration
    mode: Mode
    mode_reason: str
    node_view: NodeView
    families: tuple[Proxier, ...]
    warnings: tuple[str, ...]
    sysctls: Mapping[str, Wanted]

    @property
    def rates(self) -> Rates:
        """What Services cost in the mode in effect on this node."""
        found = [proxier.settings for proxier in self.families]
        owned = [{address for name, address in item.node_addresses if name != DEVICE} for item in found]
        sources = len(self.configuration.node_proxy.service_policy.node_port_sources)
        counters = 2 if any(item.count_bytes for item in found) else 0
        factors = NodeFactors(max([1, *map(len, owned)]), counters, sources)
        return rates_of(self.mode.name, factors)

    def size_of(self, state: ClusterState, service: NamespacedName) -> Size:
        """Return how many entries a Service makes, 0 if there are not more than the size of its objects suggests."""
        lists = sum([proxier.slot_limit.slot_lists(service) for proxier in self.families])
        entries = state.entries_of(service) + lists * SLOTS
        known = state.services.get(service) if entries else None
        return Size(entries, len(known.ports) if known is not None else 1)

    @property
    def lists_of_slots(self) -> int:
        """The number of lists of slots for stable hashing in the tables of all families."""
        return sum(proxier.slot_limit.admitted for proxier in self.families)


def set_up(request: Request, handles: KernelHandles) -> Proxiers:
    """Inspect the node, load modules, set kernel parameters, and create proxiers without any Service yet.

    Raises PreflightError if the mode cannot work here (before anything is changed), ConfigurationError, KernelError.
    """
    chosen = choose_mode(request)
    mode = chosen.mode
    configuration = in_mode(request.configuration, mode.name)
    view = view_node(request, configuration, mode)
    contexts = _contexts(request, configuration, view)
    nothing = [FamilyServices(context, {}) for context in contexts]
    warnings = [*chosen.warnings, *view.warnings]
    warnings += check_node(configuration, mode, nothing, request.ignore_findings)
    # Serve without a Node, which may be created later.
    warnings += [str(finding) for finding in missing_node(request, view)]
    apply_plan(plan([node_modules(mode, configuration, view)]))
    if mode.make_counters():
        view = view._replace(nfacct_counters=mode.counters())
        contexts = _contexts(request, configuration, view)
    sysctls = wanted_node_sysctls(configuration, view, contexts)
    stage, sysctl_warnings = sysctl_stage(sysctls)
    apply_plan(plan([stage]))
    proxiers = tuple(Proxier(configuration, mode, context, handles) for context in contexts)
    return Proxiers(
        configuration=configuration,
        mode=mode,
        mode_reason=chosen.reason,
        node_view=view,
        families=proxiers,
        warnings=(*warnings, *sysctl_warnings),
        sysctls=sysctls,
    )


def _contexts(request: Request, configuration: KubeProxyConfiguration, view: NodeView) -> list[FamilyContext]:
    return [family_context(request.cluster, configuration, view, family) for family in view.families]


class Leftovers(NamedTuple):
    """Leftovers of other modes: entries that were removed, and real servers that are kept until connections end."""

    removed: int
    draining: int


def remove_leftovers(proxiers: Proxiers, agent: KernelHandles) -> Leftovers:
    """Remove leftovers of other modes from the node, using handles like ``agent``. Raises KernelError."""
    with KernelHandles(agent.progress, agent.listeners) as handles:
        leaving = plan(leaving_stages(proxiers.mode, handles))
        apply_plan(leaving)
        contexts = [proxier.context for proxier in proxiers.families]
        stages = leftover_stages(proxiers.mode, handles, leftover_contexts(proxiers.mode, contexts))
        stages += proxiers.mode.extra_stages(contexts)
        for stage in stages:
            stage.resource.report_to(agent.progress)
        planned = plan(stages)
        apply_plan(planned)
    servers = [item for item in planned if item.resource.kind == Kind.REAL_SERVERS]
    return Leftovers(
        sum(len(item.change) for item in [*leaving, *planned]),
        sum(item.entries - len(item.change.removed) for item in servers),
    )


def with_current_addresses(proxiers: Proxiers, cluster: ClusterState) -> tuple[Proxiers, dict[str, DataplaneSettings]]:
    """Return the node with its current addresses, and the resulting settings for each family.

    Raises ConfigurationError, KernelError.
    """
    view = proxiers.node_view._replace(addresses=node_addresses_now())
    settings = {
        proxier.family: family_settings(cluster, proxiers.configuration, view, proxier.family)
        for proxier in proxiers.families
    }
    return proxiers._replace(node_view=view), settings
