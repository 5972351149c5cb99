# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The base class of the modes: one object with everything that differs between modes.

No other code checks which mode is in effect. The pure half, from ServicePorts to desired tables, is the mode's
``rendering``; the rest is what the mode needs of the node, the resources that hold its tables, and how the agent
watches and measures it. :mod:`.choose` selects the object by the name in the configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable, Mapping, NamedTuple, Optional, Sequence

from ...base.errors import ProxyError
from ...configuration.model import KubeProxyConfiguration
from ...event_reasons import Reason
from ...kernel.xtables.variant import XtablesVariant
from ...preflight.check import ModeNeeds
from ...preflight.limits import SetContribution
from ...rendering.rendering import Rendering
from ...resources import Stage
from ...serviceports.info import Endpoint, ServicePortInfo
from ..family import FamilyContext, FamilyServices, FamilyTables
from ..handles import KernelHandles
from ..live import Flow, LiveConnection, Remembered, tracked

if TYPE_CHECKING:
    from ...rendering.desired import Changes
    from ...serviceports.frontends import Frontends
    from ..traffic.account import Sample


class Subsystems(NamedTuple):
    """The parts of the kernel in which a mode creates objects."""

    #: Chains of iptables.
    chains: bool = False
    #: Virtual servers.
    ipvs: bool = False
    #: Sets of ipset.
    ipsets: bool = False
    #: The table of nftables mode.
    nftables: bool = False
    #: The table of nf_tables beside IPVS.
    ipvs_table: bool = False
    #: Sockets of the agent, which are not part of the kernel.
    listeners: bool = False
    #: The device that has the service addresses, or empty.
    device: str = ""

    @property
    def counted(self) -> bool:
        """Whether all objects are in nf_tables, whose generation shows whether any program has changed them."""
        return self.nftables and self == Subsystems(nftables=True)


class Families(NamedTuple):
    """Which families a mode can serve: their iptables, where the mode needs one, and why others cannot be served."""

    variants: Mapping[str, XtablesVariant]
    missing: Mapping[str, str]


class Deprecation(NamedTuple):
    """The Event that kube-proxy posts at the start of a deprecated mode."""

    reason: Reason
    note: str


class Refusals(NamedTuple):
    """The error of a refused transaction, and the attribute names of the agent's counters of them.

    The first one counts those of all syncs, the second one, where there is one, those of partial syncs.
    """

    error: type[ProxyError]
    counters: tuple[str, ...] = ()


class Adjustments:
    """Adjustments of one family's tables to the state of the kernel in the agent's syncs; none in this base class.

    A full sync runs the stages, which observe the kernel. A partial sync does not, so its changes are adjusted here.
    """

    @property
    def draining(self) -> int:
        """The number of entries that are kept until their connections have ended."""
        return 0

    def adjust(self, changes: Changes) -> None:
        """Adjust the changes of a partial sync before they are applied. Raises KernelError."""

    def observed(self, desired: Mapping[str, Mapping[Any, Any]]) -> None:
        """Record the state that a full sync has just observed."""

    def drain(self) -> int:
        """Remove entries whose connections have ended; return their number. Raises KernelError."""
        return 0

    def drop(self, port: ServicePortInfo, endpoint: Endpoint) -> int:
        """End the connections of a ServicePort to an endpoint that connection tracking does not end.

        Returns how many were reset at once. Raises KernelError.
        """
        return 0


class Mode:
    """What differs between modes: needs of the node, resources, and how the agent watches and measures them."""

    rendering: Rendering[Any]
    #: Where the mode creates objects; leftovers of other modes in the other subsystems are removed.
    subsystems: Subsystems
    #: What preflight checks.
    needs: ModeNeeds
    #: Whether the mode serves Services; if not, all their objects on the node belong to another program.
    serves: bool = True
    #: The number of Services to program at a time on an empty node.
    cold_batch: int = 1000
    #: Whether kube-proxy has separate metrics for full and partial syncs of this mode.
    measures_kinds: bool = True
    #: Whether kube-proxy's gauges of Services without local endpoints count each port of these in this mode.
    counts_ports: bool = True
    #: Only the agent can serve in this mode.
    needs_agent: bool = False
    #: Traffic passes connection tracking, whose stale entries are removed.
    tracks_connections: bool = True
    #: A warning about the mode itself, or empty.
    caution: str = ""
    #: A warning about network policies in the mode, or empty.
    policy_caution: str = ""
    #: Which traffic of Services the mode does not count, and why; or empty.
    uncounted: str = ""
    #: None for a mode that is not deprecated.
    deprecation: Optional[Deprecation] = None
    #: In ipvs mode, the subsystem of its packet filter.
    filter_backend: str = ""
    #: How the agent counts transactions that the kernel, or iptables-restore, refused.
    refusals: Refusals = Refusals(ProxyError)

    @property
    def name(self) -> str:
        """The name, as in a KubeProxyConfiguration."""
        return self.rendering.name

    # ---- requirements of the node

    def find_families(self, families: Sequence[str]) -> Families:
        """Return which of the node's families the mode can serve: all of them, unless it needs iptables or nf_tables.

        Raises KernelError.
        """
        return Families({}, {})

    def unsupported_reasons(self, families: Sequence[str]) -> list[str]:
        """Return why the kernel cannot run the mode, beyond the preflight checks. Change nothing."""
        return []

    def counters(self) -> tuple[str, ...]:
        """Return the nfacct counters that rules may use. Raises KernelError."""
        return ()

    def make_counters(self) -> bool:
        """Create the nfacct counters that kube-proxy creates at its start; return whether any was created."""
        return False

    def set_contributions(self, families: Iterable[FamilyServices]) -> Iterable[SetContribution]:
        """Return the elements that ServicePorts add to ipsets of limited size."""
        return ()

    # ---- resources

    def stages(
        self, configuration: KubeProxyConfiguration, families: Sequence[FamilyTables], handles: KernelHandles
    ) -> list[Stage]:
        """Return the mode's resources in order of dependence, with their desired tables.

        A resource with a family holds the desired table that is named as its kind.

        With handles that load nothing, subsystems that are not loaded count as empty. Raises KernelError.
        """
        raise NotImplementedError(self.name)

    def extra_stages(self, families: Sequence[FamilyContext]) -> list[Stage]:
        """Return stages that remove what other modes left inside this mode's own subsystems."""
        return []

    def serving(self, port: ServicePortInfo) -> Mode:
        """Return the mode that serves a ServicePort: this one, or userspace mode beside it."""
        return self

    def adjustments(self, context: FamilyContext, stages: Sequence[Stage], handles: KernelHandles) -> Adjustments:
        """Return how the tables of a family depend on the kernel during the agent's syncs."""
        return Adjustments()

    # ---- explanation: what the kernel holds for a flow

    def live_connections(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> list[LiveConnection]:
        """Return the connections of a flow to a ServicePort that are open. Raises KernelError."""
        return tracked(flow)

    def tracked_connections(self, flow: Flow) -> list[LiveConnection]:
        """Return the connections of a flow to a destination that no Service has. Raises KernelError."""
        return tracked(flow) if self.tracks_connections else []

    def remembered(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> list[Remembered]:
        """Return the endpoints to which the affinity of a flow's client leads. Raises KernelError."""
        return []

    # ---- measurements

    def packets(self, contexts: Iterable[FamilyContext], handles: KernelHandles) -> Mapping[str, Any]:
        """Return what kube-proxy's metrics say of packets and listeners, by names of counters. Raises KernelError."""
        return {}

    def traffic(self, context: FamilyContext, frontends: Frontends, handles: KernelHandles) -> list[Sample]:
        """Return the counters of the traffic of all ServicePorts of a family. Raises KernelError."""
        return []

    def rule_counts(self, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, int]:
        """Return the number of iptables rules by table, for kube-proxy's gauges; empty where it has none."""
        return {}

    def failure_counters(self, error: ProxyError, partial: bool) -> tuple[str, ...]:
        """Return the attribute names of the agent's counters for a failed sync. ``partial``: it was a partial sync."""
        return self.refusals.counters[: 1 + partial] if isinstance(error, self.refusals.error) else ()
