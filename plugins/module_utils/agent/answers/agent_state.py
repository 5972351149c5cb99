# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of the running agent from which its answers are made."""

from __future__ import annotations

from typing import NamedTuple

from ...convergence.handles import KernelHandles
from ..api.servers import ApiServers
from ..checks.checks import Checks
from ..drain import Drain
from ..forwarding import Forwarding
from ..memory import MemoryBudget
from ..policies.policy import PolicySync
from ..services.node import NodeSync
from ..source.cluster_source import ClusterSource
from ..source.view import ClusterView
from ..traffic import Traffic


class AgentState(NamedTuple):
    """The state from which answers are made.

    ``started``: when the agent was started, in seconds since the epoch. ``reload_error``: why the configuration on disk
    is not in effect, empty if it is. ``view``: what is served, which until the cluster is known may be static Services
    only.
    """

    node: str
    started: float
    reload_error: str
    healthy: bool
    source: ClusterSource
    sync: NodeSync
    view: ClusterView
    forwarding: Forwarding
    checks: Checks
    policy: PolicySync
    servers: ApiServers
    handles: KernelHandles
    drain: Drain
    traffic: Traffic
    memory: MemoryBudget
    other_proxy: str
