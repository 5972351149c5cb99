# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a mode is: one object with everything that differs between modes.

Nothing else asks which mode is in effect. The pure half, from ServicePorts to desired tables, is the mode's
``rendering``; the rest is what the mode needs of the node, the resources that hold its tables, and how the agent
watches and measures it. :mod:`.choose` chooses the object by the name in the configuration.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ...configuration.model import KubeProxyConfiguration
from ...errors import ProxyError
from ...kernel.xtables.variant import XtablesVariant
from ...preflight.check import ModeNeeds
from ...preflight.limits import SetContribution
from ...rendering.desired import Changes
from ...rendering.rendering import Rendering
from ...resources import Stage
from ..family import FamilyContext, FamilyServices, FamilyTables
from ..handles import KernelHandles


class Subsystems(NamedTuple):
    """The parts of the kernel in which a mode makes something.

    ``chains``: iptables; ``ipvs``: IPVS, ipsets and the dummy device; ``nftables``: a table of its own in nf_tables.
    """

    chains: bool = False
    ipvs: bool = False
    nftables: bool = False


class Families(NamedTuple):
    """Which families a mode can serve: their iptables, where the mode needs one, and why others cannot be served."""

    variants: Mapping[str, XtablesVariant]
    missing: Mapping[str, str]


class Deprecation(NamedTuple):
    """The Event that kube-proxy posts at the start of a deprecated mode."""

    reason: str
    note: str


class Adjustments:
    """How the tables of one family depend on what the kernel holds, for the agent's syncs; here they do not.

    A sync in full goes through the stages, which observe the kernel; a partial sync does not, so its changes are
    adjusted here.
    """

    @property
    def draining(self) -> int:
        """How many entries are kept until their connections have ended."""
        return 0

    def adjust(self, changes: Changes) -> None:
        """Adjust the changes of a partial sync before they are applied. Raises KernelError."""

    def observed(self, desired: Mapping[str, Mapping[Any, Any]]) -> None:
        """Remember what a full sync, which has just ended, has found out."""

    def drain(self) -> int:
        """Remove entries whose connections have ended; return their number. Raises KernelError."""
        return 0


class Mode:
    """A mode.

    ``subsystems``: where it makes something; what other modes left in the other subsystems is removed. ``needs``: for
    preflight. ``cold_batch``: ServicePorts of so many Services are programmed at a time on an empty node.
    ``measures_kinds``: kube-proxy has metrics of its own for full and partial syncs of this mode. ``deprecation``: None
    for a mode that is not deprecated.
    """

    rendering: Rendering[Any]
    subsystems: Subsystems
    needs: ModeNeeds
    cold_batch: int = 1000
    measures_kinds: bool = True
    deprecation: Optional[Deprecation] = None

    @property
    def name(self) -> str:
        """The name, as in a KubeProxyConfiguration."""
        return self.rendering.name

    def find_families(self, families: Sequence[str]) -> Families:
        """Return which of the node's families the mode can serve. Raises KernelError."""
        raise KeyError(self.name)

    def unsupported_reasons(self, families: Sequence[str]) -> List[str]:
        """Return why the kernel cannot run the mode, beyond what preflight asks; changes nothing."""
        return []

    def counters(self) -> Tuple[str, ...]:
        """Return the nfacct counters that rules may use. Raises KernelError."""
        return ()

    def make_counters(self) -> bool:
        """Make the nfacct counters that kube-proxy makes at its start; return whether any was made."""
        return False

    def set_contributions(self, families: Iterable[FamilyServices]) -> Iterable[SetContribution]:
        """Return what ServicePorts put into ipsets of limited size."""
        return ()

    def stages(
        self,
        configuration: KubeProxyConfiguration,
        families: Sequence[FamilyTables],
        handles: KernelHandles,
        loaded: bool = True,
    ) -> List[Stage]:
        """Return the mode's resources in order of dependence, with what they should hold.

        A resource with a family holds the desired table that is named as its kind.

        With ``loaded`` False nothing is opened that would load a kernel module: subsystems that are not loaded count
        as empty. Raises KernelError.
        """
        raise KeyError(self.name)

    def is_loaded(self, handles: KernelHandles) -> bool:
        """Whether every subsystem of the mode can be opened without loading a module."""
        return True

    def extra_stages(self, families: Sequence[FamilyContext]) -> List[Stage]:
        """Return stages that remove what other modes left inside this mode's own subsystems."""
        return []

    def adjustments(self, context: FamilyContext, stages: Sequence[Stage], handles: KernelHandles) -> Adjustments:
        """Return how the tables of a family depend on the kernel during the agent's syncs."""
        return Adjustments()

    def rule_counts(self, tables: Mapping[str, Mapping[Any, Any]]) -> Dict[str, int]:
        """Return the number of iptables rules by table, for kube-proxy's gauges; empty where it has none."""
        return {}

    def failure_counters(self, error: ProxyError, partial: bool) -> Tuple[str, ...]:
        """Return the agent's counters of a failed sync, by attribute name. ``partial``: it was a partial one."""
        return ()
