# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node needs before a mode's own resources can be made: nothing in the way, modules, kernel parameters."""

from __future__ import annotations

import itertools
import os
from typing import Dict, Iterable, List, Sequence, Tuple

from ..configuration.model import IPTABLES, IPVS, KubeProxyConfiguration
from ..kernel.modules import ModulesResource, modules_for
from ..kernel.sysctls import Wanted
from ..preflight.check import Intention, preflight
from ..preflight.cluster_state import Host, completeness_findings, node_findings
from ..preflight.findings import Finding, judge
from ..preflight.limits import SetContribution, ipvs_set_contributions
from ..resources import Stage
from .node import NodeView
from .request import Request
from .stages import FamilyPlan
from .sysctls import sysctl_stage, wanted_sysctls


def _set_contributions(plans: Sequence[FamilyPlan]) -> Iterable[SetContribution]:
    return itertools.chain.from_iterable(ipvs_set_contributions(item.routes, item.settings) for item in plans)


def check_cluster(request: Request, view: NodeView) -> List[str]:
    """Return warnings about the cluster state; changes nothing.

    Raises PreflightError if the state is not complete or has no Node of this host, unless these findings are ignored
    or the request does without a whole cluster.
    """
    if not request.whole_cluster:
        return [str(finding) for finding in missing_node(request, view)]
    findings = [*completeness_findings(request.cluster.kinds, request.outside_host), *missing_node(request, view)]
    return judge(findings, request.ignore_findings)


def missing_node(request: Request, view: NodeView) -> List[Finding]:
    """Return an error if the cluster has no Node of this host, and should have one."""
    if request.outside_host:
        return []
    host = Host(view.name, (os.uname().nodename,), {address for _interface, address in view.addresses})
    return node_findings(request.cluster, host)


def check_node(
    configuration: KubeProxyConfiguration, plans: Sequence[FamilyPlan], ignored: Sequence[str] = ()
) -> List[str]:
    """Warnings about the node, whose routes are in the plans; changes nothing.

    ``ignored``: names of findings to go on in spite of. Raises PreflightError if the mode cannot work here.
    """
    intention = Intention(
        mode=configuration.mode,
        families=tuple(item.family for item in plans),
        schedulers=(configuration.scheduler,) if configuration.mode == IPVS else (),
        variants={item.family: item.variant for item in plans if item.variant is not None},
        set_contributions=_set_contributions(plans) if configuration.mode == IPVS else (),
    )
    return list(judge(preflight(intention), tuple(ignored)))


def node_modules(configuration: KubeProxyConfiguration, view: NodeView) -> Stage:
    """The stage that loads the mode's kernel modules."""
    schedulers = [configuration.scheduler] if configuration.mode == IPVS else []
    modules = ModulesResource(modules_for(configuration.mode, schedulers, view.facts.kernel_version))
    return Stage(modules, modules.desired())


def wanted_node_sysctls(
    configuration: KubeProxyConfiguration, view: NodeView, plans: Sequence[FamilyPlan]
) -> Dict[str, Wanted]:
    """Return the kernel parameters that this node needs, by key."""
    localhost = configuration.mode == IPTABLES and any(item.settings.localhost_node_ports for item in plans)
    return wanted_sysctls(configuration, view.facts, localhost)


def node_sysctls(
    configuration: KubeProxyConfiguration, view: NodeView, plans: Sequence[FamilyPlan]
) -> Tuple[Stage, List[str]]:
    """The stage that sets kernel parameters, and warnings about those that cannot be set. Raises KernelError."""
    return sysctl_stage(wanted_node_sysctls(configuration, view, plans))
