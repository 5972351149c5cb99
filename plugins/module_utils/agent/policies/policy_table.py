# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of network policies in the kernel: changed row by row, compared as a whole, watched and repaired."""

from __future__ import annotations

from typing import Any, List, Optional

from ...convergence.handles import KernelHandles
from ...convergence.removal import policy_removal_stages
from ...event_reasons import Reason
from ...kernel.nftables.monitor import TableMonitor
from ...kernel.nftables.policy_table import PolicyTableResource
from ...networkpolicy.node_policy import NodePolicy
from ...networkpolicy.revocations import revoked
from ...rendering.networkpolicy.bridged import BRIDGE
from ...rendering.networkpolicy.elements import change_of, desired_table
from ...rendering.networkpolicy.sets import TABLE_NAME, Options
from ...resources import Change, PlannedChange, Stage, apply_plan, difference, plan
from ..api.events import WARNING, Post
from ..telemetry.log import LimitedLog, Log
from .connection_cuts import ConnectionCuts

_FAMILIES = {"inet", BRIDGE}


class PolicyTable:
    """Brings the kernel's table up to date with the rows of a node's policies.

    ``is_unknown``: the table may have any content, so the next :meth:`apply` compares all of it; set after a failure,
    and if the rows are those of another state. ``suspect``: another program may have changed the table, so that the
    next :meth:`apply` compares all of it, too, and repairs it. ``repaired``: how many entries were repaired.
    """

    def __init__(
        self, handles: KernelHandles, cuts: ConnectionCuts, *, log: Log, limited: LimitedLog, post: Post
    ) -> None:
        self.is_unknown = False
        self.suspect = False
        self.repaired = 0
        self._handles = handles
        self._cuts = cuts
        self._log = log
        self._limited = limited
        self._post = post
        self._resource: Optional[PolicyTableResource] = None
        self._monitor: Optional[TableMonitor] = None

    def filenos(self) -> List[int]:
        """Return the descriptors that announce changes of the table."""
        return [self._monitor.fileno()] if self._monitor is not None else []

    def notice_changes(self) -> None:
        """Notice changes of the table by other programs."""
        if self._monitor is not None and _FAMILIES & self._monitor.changes():
            self.suspect = True

    def apply(self, policy: NodePolicy, options: Options) -> bool:
        """Apply the changes of the rows, and compare the whole table if that is needed; return whether it was.

        Raises KernelError.
        """
        rows = policy.table.rows
        journal = policy.table.pop_journal()
        resource = self._resource
        if resource is None:
            resource = self._resource = self._handles.network_policy()
        if not self.is_unknown:
            change = change_of(journal, rows, options)
            if change:
                resource.apply(change)
                if options.cut:
                    self._cuts.revoke(revoked(policy, journal, options.tiers))
        compared = self.is_unknown or self.suspect
        if compared:
            change = difference(resource.observe(), desired_table(rows, options))
            resource.apply(change)
            self._report(policy, change)
            if options.cut and change:
                self._cuts.revoke(None)
        if options.cut:
            self._cuts.follow(policy)
        else:
            self._cuts.forget()
        if self._monitor is None:
            self._monitor = TableMonitor([resource.port], TABLE_NAME)
        self.is_unknown = self.suspect = False
        return compared

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
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _report(self, policy: NodePolicy, change: Change[Any, Any]) -> None:
        """Log the result of a comparison with the kernel, which is a repair if nothing else had changed."""
        if not self.is_unknown:
            self.repaired += len(change)
            text = "repaired external changes of network policies"
            if change and self._limited.warning("policies", text, entries=len(change)):
                self._post(None, WARNING, Reason.DRIFT_REPAIRED, "Repair", f"network policies: {len(change)} entries")
            return
        self._log.info(
            "network policies are in force",
            pods=len(policy.local),
            rows=len(policy.table.rows),
            added=len(change.added),
            replaced=len(change.replaced),
            removed=len(change.removed),
        )
