# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of network policies in the kernel: changed row by row, compared as a whole, watched and repaired."""

from __future__ import annotations

from typing import Dict, List, Optional

from ...base.errors import KernelError, ProxyError
from ...convergence.handles import KernelHandles
from ...convergence.removal import policy_removal_stages
from ...kernel.nftables.monitor import TableMonitor
from ...kernel.nftables.policy_table import PolicyTableResource
from ...networkpolicy.node_policy import NodePolicy
from ...networkpolicy.revocations import revoked
from ...rendering.networkpolicy.bridged import BRIDGE
from ...rendering.networkpolicy.elements import change_of, desired_table
from ...rendering.networkpolicy.sets import TABLE_NAME, Options
from ...resources import PlannedChange, Stage, apply_plan, difference, plan
from ..drift.notifications import NftWatch
from ..drift.repairs import Repairs
from ..telemetry.log import Log
from ..threads.timers import monotonic
from .connection_cuts import ConnectionCuts

#: The name of network policies beside the families, in /healthz and in reports of repairs.
FAMILY = "NetworkPolicy"


class PolicyTable:
    """Brings the kernel's table up to date with the rows of a node's policies.

    ``needs_full``: the table may have any content, so the next :meth:`apply` compares all of it; set after a failure,
    and if the rows are those of another state. ``suspicion``: why another program may have changed the table, so that
    the next :meth:`apply` compares all of it, too, and repairs it; empty if nothing suggests it.
    """

    def __init__(self, handles: KernelHandles, cuts: ConnectionCuts, repairs: Repairs, log: Log) -> None:
        self.needs_full = False
        self.suspicion = ""
        self._handles = handles
        self._cuts = cuts
        self._repairs = repairs
        self._log = log
        self._resource: Optional[PolicyTableResource] = None
        self._watch: Optional[NftWatch] = None

    @property
    def is_due(self) -> bool:
        """Whether the next :meth:`apply` compares the whole table."""
        return self.needs_full or bool(self.suspicion)

    def filenos(self) -> List[int]:
        """Return the descriptors that announce changes of the table."""
        return [self._watch.fileno()] if self._watch is not None else []

    def notice_changes(self) -> None:
        """Notice changes of the table by other programs."""
        found: Dict[str, str] = {}
        if self._watch is not None:
            self._watch.look(found)
        self.suspicion = next(iter(found.values()), self.suspicion)

    def apply(self, policy: NodePolicy, options: Options) -> bool:
        """Apply the changes of the rows, and compare the whole table if that is needed; return whether it was.

        Raises KernelError.
        """
        resource = self._resource
        if resource is None:
            resource = self._resource = self._handles.network_policy()
        if not self.needs_full:
            self._apply_changes(resource, policy, options)
        compared = self.is_due
        if compared:
            self._apply_everything(resource, policy, options)
        if options.cut:
            self._cuts.follow(policy)
        else:
            self._cuts.forget()
        if self._watch is None:
            self._watch = NftWatch(("inet", BRIDGE), TableMonitor([resource.port], TABLE_NAME))
        self.needs_full, self.suspicion = False, ""
        return compared

    def _apply_changes(self, resource: PolicyTableResource, policy: NodePolicy, options: Options) -> None:
        journal = policy.table.pop_journal()
        change = change_of(journal, policy.table.rows, options)
        if not change:
            return
        try:
            resource.apply(change)
        except KernelError:
            if not self.suspicion:
                raise
            # Another program has changed the objects of this change, or deleted the table. The comparison that follows
            # applies it.
            return
        if options.cut:
            self._cuts.revoke(revoked(policy, journal, options.tiers))

    def _apply_everything(self, resource: PolicyTableResource, policy: NodePolicy, options: Options) -> None:
        """Compare the whole table; the difference is a repair if nothing else had changed, or if one had failed."""
        began = monotonic()
        policy.table.pop_journal()
        change = difference(resource.observe(), desired_table(policy.table.rows, options))
        resource.apply(change)
        unrepaired = self._repairs.pop_unrepaired(FAMILY)
        if not self.needs_full or unrepaired:
            changes = [PlannedChange(resource, change)] if change else []
            self._repairs.succeeded(FAMILY, self.suspicion or unrepaired, changes, monotonic() - began)
        if self.needs_full:
            self._log.info(
                "network policies are in force",
                pods=len(policy.local),
                rows=len(policy.table.rows),
                added=len(change.added),
                replaced=len(change.replaced),
                removed=len(change.removed),
            )
        if options.cut and change:
            self._cuts.revoke(None)

    def failed(self, error: Exception) -> None:
        """Record that the table could not be brought up to date; the next :meth:`apply` compares all of it."""
        if self.suspicion and isinstance(error, ProxyError):
            self._repairs.failed(FAMILY, self.suspicion, error)
        self.needs_full, self.suspicion = True, ""

    def compared(self, policy: NodePolicy, options: Options) -> List[PlannedChange]:
        """Return how the kernel's table differs from the rows, without changing it. Raises KernelError."""
        resource = self._resource or self._handles.network_policy()
        return plan([Stage(resource, desired_table(policy.table.rows, options))])

    def remove(self) -> None:
        """Remove the table, and stop watching it. Raises KernelError."""
        self._cuts.forget()
        apply_plan(plan(policy_removal_stages(self._handles)))
        self.stop_watching()

    def stop_watching(self) -> None:
        """Ignore changes by other programs until the next :meth:`apply`."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
