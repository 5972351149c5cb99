# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prerequisites of a mode on a node: preflight checks, kernel modules and kernel parameters."""

from __future__ import annotations

import os
from typing import Sequence

from ..configuration.model import KubeProxyConfiguration
from ..kernel.modules.module_profile import modules_for
from ..kernel.modules.modules import ModulesResource
from ..kernel.parameters.sysctls import Wanted
from ..preflight.check import Intention, preflight
from ..preflight.cluster_state import Host, completeness_findings, node_findings, origin_findings, origin_of
from ..preflight.findings import CONFLICTS, NODE, WARNING, Finding, judge
from ..preflight.processes import processes, removal_findings, service_proxy_findings
from ..resources import Stage
from .family import FamilyContext, FamilyServices
from .handles import KernelHandles
from .modes.mode import Mode
from .modes.stages.sysctls import wanted_sysctls
from .node import NodeView
from .removal import serves
from .request import Request
from .runtime.ledger import has_converged, read_origin


def check_cluster(request: Request, view: NodeView) -> list[str]:
    """Return warnings about the cluster state; change nothing.

    Raises PreflightError if the state is incomplete, is of another cluster than what is programmed, or has no Node of
    this host, unless these findings are ignored or the request does not need a whole cluster.
    """
    missing = missing_node(request, view)
    if not request.whole_cluster:
        return [str(finding) for finding in missing]
    now = origin_of(request.cluster.services)
    other = origin_findings(read_origin(request.state_directory), now) if now else []
    return judge([*_incomplete(request), *missing, *other], request.ignore_findings)


def _incomplete(request: Request) -> list[Finding]:
    """Return a finding if the cluster state has no object of a kind that every cluster has."""
    policies = request.configuration.node_proxy.network_policy
    return completeness_findings(
        request.cluster.kinds, request.needs_no_node, policies=policies.enabled, services=not policies.standalone
    )


def missing_node(request: Request, view: NodeView) -> list[Finding]:
    """Return a finding if the cluster has no Node of this host although it should have one.

    An agent may read only the Node of its own name. Otherwise the lack of all Nodes is an incomplete cluster state.
    """
    if request.needs_no_node or not (request.agent or request.cluster.nodes):
        return []
    host = Host(view.name, (os.uname().nodename,), {address for _interface, address in view.addresses})
    found = node_findings(request.cluster, host)
    # Nor does any other Node say by its address that it is this host's; an agent may read no other.
    own = request.cluster.nodes.get(view.name)
    if not found and own is not None and own.addresses and set(own.addresses).isdisjoint(host.addresses):
        remedy = "set hostnameOverride (role: service_proxy_node_name) to the name of this host's Node"
        found = [Finding(NODE, WARNING, f"Node {own.name} has no address of this host", remedy)]
    return found


def rendering_warnings(request: Request, node_name: str) -> list[str]:
    """Return warnings about the cluster state where no node is read: the findings of :func:`check_cluster`.

    They refuse nothing, since nothing is programmed.
    """
    findings = _incomplete(request) if request.whole_cluster else []
    if not request.needs_no_node and request.cluster.nodes:
        findings += node_findings(request.cluster, Host(node_name, (), request.node_addresses))
    return judge([finding._replace(severity=WARNING) for finding in findings], request.ignore_findings)


def check_node(
    configuration: KubeProxyConfiguration,
    mode: Mode,
    families: Sequence[FamilyServices],
    ignored: Sequence[str] = (),
    compare: bool = False,
) -> list[str]:
    """Return warnings about the node and the ServicePorts to be served; change nothing.

    ``ignored``: names of findings to ignore. With ``compare``, conflicts with other programs are warnings. Raises
    PreflightError if the mode cannot work here.
    """
    contexts = [item.context for item in families]
    intention = Intention(
        needs=mode.needs,
        families=tuple(context.family for context in contexts),
        schedulers=configuration.effective_schedulers,
        variants={context.family: context.variant for context in contexts if context.variant is not None},
        set_contributions=mode.set_contributions(families),
        refused_at_loopback={
            (item.context.family, port.protocol, port.node_port): str(name)
            for item in families
            for name, port in item.service_ports.items()
            if port.node_port and port.protocol in item.context.settings.localhost_rejected
            if mode.serving(port) is mode
        },
    )
    found = preflight(intention)
    if compare:
        found = [item._replace(severity=WARNING) if item.name in CONFLICTS else item for item in found]
    return list(judge(found, tuple(ignored)))


def check_removal(request: Request, standalone: bool, handles: KernelHandles) -> list[str]:
    """Return warnings about removing everything here, or with ``standalone`` only policies; change nothing.

    Raises PreflightError for what :func:`removal_findings` finds, or if no other service proxy serves beside the
    policies, unless the request ignores it.
    """
    if standalone:
        return list(judge(service_proxy_findings(standalone=True), request.ignore_findings))
    ours = has_converged(request.state_directory) or not serves(handles)
    return list(judge(removal_findings(processes(), ours), request.ignore_findings))


def check_policies(request: Request, view: NodeView) -> list[str]:
    """Return warnings about obstacles to enforcing network policies here; change nothing.

    Raises PreflightError if pods share a bridge whose packets netfilter does not see, unless that finding is ignored.
    """
    settings = request.configuration.node_proxy.network_policy
    if not settings.enabled:
        return []
    from .policy import policy_findings

    findings = policy_findings(request.cluster, settings, view.name)
    return list(judge(findings, request.ignore_findings))


def node_modules(mode: Mode, configuration: KubeProxyConfiguration, view: NodeView) -> Stage:
    """Return the stage that loads the mode's kernel modules."""
    needs, release = mode.needs, view.facts.kernel_version
    names = modules_for(needs.name, configuration.effective_schedulers, release, filter_backend=needs.filter_backend)
    modules = ModulesResource(names)
    return Stage(modules, modules.desired())


def wanted_node_sysctls(
    configuration: KubeProxyConfiguration, view: NodeView, contexts: Sequence[FamilyContext]
) -> dict[str, Wanted]:
    """Return the kernel parameters that this node needs, by key."""
    localhost = any(context.settings.localhost_node_ports for context in contexts)
    return wanted_sysctls(configuration, view.facts, localhost)
