# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of network policies in the kernel: changed row by row, compared as a whole, watched and repaired."""

from __future__ import annotations

from typing import Optional

from ...convergence.handles import KernelHandles
from ...convergence.removal import policy_removal_stages
from ...kernel.nftables.monitor import TableMonitor
from ...kernel.nftables.policy_table import PolicyTableResource
from ...networkpolicy.node_policy import NodePolicy
from ...networkpolicy.revocations import revoked
from ...rendering.networkpolicy.bridge_keys import BRIDGE
from ...rendering.networkpolicy.elements import change_of, desired_table
from ...rendering.networkpolicy.sets import TABLE_NAME, Options
from ...resources import PlannedChange, Stage, apply_plan, plan
from ..drift.notifications import NftWatch
from ..sync.tables import NOTHING, SyncedTables, SyncResult, applied
from .connection_cuts import ConnectionCuts

#: The name of network policies beside the families, in /healthz and in reports of repairs.
FAMILY = "NetworkPolicy"


class PolicyTable(SyncedTables):
    """The table in the kernel, to be brought up to date with the rows of a node's policies."""

    def __init__(self, handles: KernelHandles, cuts: ConnectionCuts) -> None:
        super().__init__(FAMILY)
        self._handles = handles
        self._cuts = cuts
        self._resource: Optional[PolicyTableResource] = None
        self._watch: Optional[NftWatch] = None
        self._policy: Optional[NodePolicy] = None
        self._options = Options()

    def follow(self, policy: NodePolicy, options: Options) -> None:
        """Let the table be that of these policies from now on."""
        self._policy, self._options = policy, options

    def filenos(self) -> list[int]:
        """Return the descriptors that announce changes of the table."""
        return [self._watch.fileno()] if self._watch is not None else []

    def notice_changes(self, found: dict[str, str]) -> None:
        """Add the table with the reason if another program may have changed it. Raises KernelError."""
        if self._watch is not None:
            self._watch.poll(found)

    def partial(self) -> SyncResult:
        """See the base class."""
        return self._sync(whole=False)

    def full(self) -> SyncResult:
        """See the base class."""
        return self._sync(whole=True)

    def _sync(self, whole: bool) -> SyncResult:
        policy, self.needs_full = self._policy, True
        if policy is None:
            return NOTHING
        journal = policy.table.pop_journal()
        if self._watch is None:
            # Before the table is read: another program may change it in between.
            monitor = TableMonitor([self._kernel.port], TABLE_NAME)
            self._watch = NftWatch({"inet": FAMILY, BRIDGE: FAMILY}, monitor)
        if whole:
            planned = self.compared(policy, self._options)
        else:
            planned = [PlannedChange(self._kernel, change_of(journal, policy.table.rows, self._options))]
        result = applied(planned)
        if not self._options.cut:
            self._cuts.forget()
        else:
            if planned[0].change:
                self._cuts.revoke(None if whole else revoked(policy, journal, self._options.tiers))
            self._cuts.follow(policy)
        self.needs_full = False
        return result

    @property
    def _kernel(self) -> PolicyTableResource:
        if self._resource is None:
            self._resource = self._handles.network_policy()
        return self._resource

    def compared(self, policy: NodePolicy, options: Options) -> list[PlannedChange]:
        """Return how the kernel's table differs from the rows, without changing it. Raises KernelError."""
        return plan([Stage(self._kernel, desired_table(policy.table.rows, options))])

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
