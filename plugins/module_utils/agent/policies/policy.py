# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Network policies in the agent: their table follows each change of the cluster at once, at a cost of O(change).

It is independent of the syncs of Services: a failure of one does not delay the other. Nothing is programmed before
Pods, Namespaces and NetworkPolicies are completely known; until then, and whenever the API server is away or the kernel
refuses a change, the table does not change.
"""

from __future__ import annotations

import gc
import math
import time
from typing import Callable, Optional, Sequence

from ...base.errors import KernelError, ProxyError, defect_text
from ...cluster.account import BYTES_IN_NFTABLES
from ...cluster.api.resource_types import ResourceType
from ...cluster.model import NamespacedName
from ...configuration.model import KubeProxyConfiguration
from ...convergence.handles import KernelHandles
from ...convergence.policy import annotation_warnings, node_policy, raw_addresses
from ...convergence.runtime.agent_status import PolicyStatus
from ...event_reasons import Reason
from ...explain.policy import PolicyExplainer, Resolved
from ...networkpolicy.matching.owners import Address
from ...networkpolicy.node_policy import NodePolicy, unselected_pods, unused_policies
from ...rendering.networkpolicy.sets import NO_LOG
from ...resources import PlannedChange
from ..api.events import WARNING
from ..drift.repairs import Repairs
from ..ports.health import ProxyHealth
from ..reports import Reports
from ..source.view import ClusterView
from ..sync.schedule import RegularCheck, Schedule
from ..sync.table_sync import TableSync
from ..sync.tables import FULL
from ..threads.failures import NOT_OF_ONE_OBJECT, error_text
from ..threads.timers import Timers
from .connection_cuts import ConnectionCuts
from .denied_log import DeniedLog
from .inputs import NodesOfPolicies, PolicyChoices, PolicyLinks
from .policy_table import FAMILY, PolicyTable
from .settings import SettingsInEffect

RETRY_SECONDS = 2.0
#: A defect may show again at each attempt, which computes everything: they take a tenth of the time at most.
RETRY_FACTOR = 9.0

_STALE = "the last known policies of a kind remain in force, and changes are not followed"

Addresses = tuple[tuple[str, str], ...]


class PolicySync:
    """Keeps the table of network policies in sync with a view.

    ``pods``: those of this node that a policy may be about, by address. ``health`` is unhealthy once the table has been
    out of date for long. ``unserved`` returns why objects that exist cannot be read, empty text if they can be; health
    does not depend on it, since it concerns all nodes at once.
    """

    def __init__(
        self,
        view: ClusterView,
        handles: KernelHandles,
        timers: Timers,
        *,
        reports: Reports,
        health: ProxyHealth,
        unserved: Callable[[], str] = str,
    ) -> None:
        self.pods: dict[Address, NamespacedName] = {}
        # As of the last table that was applied.
        self._pod_count = self._elements = 0
        self._failures = 0
        self._error = ""
        self._unserved = unserved
        self._stale = ""
        self._post = reports.post
        self._last_sync = 0.0
        self._health = health
        self._view = view
        self._log, self._limited = reports.log, reports.limited
        self._settings = SettingsInEffect(view, reports)
        # The addresses of the node that the table is for.
        self._addresses: Addresses = ()
        self._policy: Optional[NodePolicy] = None
        self._progress = handles.progress
        self._table = PolicyTable(handles, ConnectionCuts(timers, reports, handles.progress))
        self._tables = TableSync(Repairs(reports))
        self._remove = False
        self._clock = timers.clock
        self._denied = DeniedLog(reports)
        self._warned: frozenset[str] = frozenset()
        self._schedule = _schedule()
        self._links = PolicyLinks(timers, self._limited, self._sync_again)
        self._choices = PolicyChoices(timers, self._sync_again)
        self._nodes = NodesOfPolicies(view, timers, self._limited, self._sync_again)
        self._check_period = 0.0
        self._check = RegularCheck(timers, "check network policies", self._check_everything)

    @property
    def bytes(self) -> int:
        """The bytes of memory that the elements of the table take."""
        return self._elements * BYTES_IN_NFTABLES.others

    def configure(self, configuration: KubeProxyConfiguration, node_name: str) -> None:
        """Adopt settings and the name of the node; the next sync applies them.

        While they need objects that are not known yet, the previous settings remain in effect.
        """
        settings = configuration.node_proxy.network_policy
        self._check_period = configuration.check_period
        self._settings.request(settings, node_name)
        if self._policy is None or not settings.enabled or self._settings.are_replaceable:
            self._adopt()

    def _adopt(self) -> None:
        if not self._settings.replace():
            return
        self._policy = None
        self._schedule = _schedule()
        # A table of an earlier run, or of the previous settings.
        self._remove = not self.enabled
        if self.enabled:
            # As at the start of a family: from now on, a change that stays pending is unhealthy.
            self._health.updated(FAMILY)
            self._health.queued(FAMILY)
        else:
            self._health.forget(FAMILY)
            self.pods = {}
            self._pod_count = self._elements = 0

    @property
    def error(self) -> str:
        """Why the policies of the cluster are not in force; empty if they are, or if none are enforced."""
        return self._error or (self._awaited() or self._stale if self.enabled else "")

    @property
    def policy_count(self) -> int:
        """The number of policies of all kinds in the cluster."""
        objects = self._view.state.policy
        return len(objects.policies) + len(objects.cluster_policies)

    def status(self) -> PolicyStatus:
        """Return the state as plain JSON values; empty if policies are not enforced.

        ``inForce``: the table is that of the policies that are known. ``warnings``: policies and pods with a problem,
        and what keeps traffic of unknown pods from being denied.
        """
        if not self.enabled and not self._error:
            return {}
        policy = self._policy
        return {
            "inForce": self.in_force,
            "error": self.error,
            "policies": self.policy_count,
            "pods": self._pod_count,
            "elements": self._elements,
            "refusedPolicies": len({key for key, _direction in policy.too_large}) if policy is not None else 0,
            "lastSync": round(self._last_sync, 3),
            "failures": self._failures,
            "repaired": self._tables.repairs.count,
            "warnings": self._warnings(policy),
        }

    def _warnings(self, policy: Optional[NodePolicy]) -> list[str]:
        if policy is None:
            return []
        return [*self._settings.warnings, *self._nodes.warnings, *annotation_warnings(policy)]

    def _awaited(self) -> str:
        """Return what must be known before the settings can be applied; empty if they are in effect."""
        return self._settings.awaited if self._policy is not None else "waiting for pods, namespaces and policies"

    def coverage(self) -> PolicyStatus:
        """Return the pods of this node that no policy selects, and the policies that select no pod at all, by name."""
        if self._policy is None:
            return {}
        return {
            "unselectedPods": list(map(str, unselected_pods(self._policy))),
            "unusedPolicies": list(map(str, unused_policies(self._view.state.policy))),
        }

    @property
    def resources(self) -> tuple[ResourceType, ...]:
        """The types of objects to follow: what the settings in effect need, and those that are to replace them."""
        return self._settings.resources

    @property
    def enabled(self) -> bool:
        """Whether the agent enforces network policies, or is about to."""
        return self._settings.requested.enabled

    @property
    def in_force(self) -> bool:
        """Whether the table is that of the policies that are known."""
        return bool(self._last_sync) and self._policy is not None and not self._error

    @property
    def selects_nodes(self) -> bool:
        """Whether policies in effect select Nodes, so that all Nodes must be followed."""
        return self._settings.requested.cluster_policies and self._view.state.policy.have_node_peers

    def explainer(self, endpoints: Sequence[Resolved]) -> PolicyExplainer:
        """Return an explainer of the state that is in force. Raises ProxyError if there is none."""
        if self._policy is None:
            reason = "does not know the cluster yet" if self.enabled else "does not enforce network policies"
            raise ProxyError(self._error or f"the agent {reason}")
        return PolicyExplainer(
            self._view.state,
            self._policy,
            node_name=self._settings.node_name,
            node_addresses=[address for _interface, address in self._addresses],
            options=self._settings.options,
            endpoints=endpoints,
        )

    def compared(self) -> list[PlannedChange]:
        """Return how the kernel differs from the policies, without changing it; nothing if none are enforced.

        Raises KernelError.
        """
        return [] if self._policy is None else self._table.compared(self._policy, self._settings.options)

    def filenos(self) -> list[int]:
        """Return the descriptors to wait for; none while none is read: after a failure, and before policies apply."""
        if self._schedule.rests(self._clock()) or self._policy is None or not self._settings.are_known:
            return []
        return [*self._table.filenos(), *self._links.filenos(), *self._denied.filenos()]

    def delay(self) -> float:
        """Return the seconds until :meth:`sync` must be called even if nothing has changed."""
        return self._schedule.delay(self._clock())

    def sync(self, addresses: Addresses) -> None:
        """Apply what changed; failures are logged, and tried again by the schedule. ``addresses``: of the node."""
        began = self._clock()
        self._report_stale()
        if self._schedule.rests(began):
            return
        if self._settings.are_replaceable:
            self._adopt()
        self._schedule.started()
        cool_down = 0.0
        try:
            if self._remove:
                self._table.remove()
                self._links.close()
                self._denied.follow(NO_LOG)
                self._remove = False
            elif self.enabled and self._settings.are_known and not self._nodes.are_awaited():
                self._follow(addresses, began)
                self._last_sync = time.time()
                self._health.updated(FAMILY)
        except KernelError as error:
            self._not_programmed(error)
            cool_down = RETRY_SECONDS
        except NOT_OF_ONE_OBJECT:
            raise
        except Exception as error:
            # Services need no network policies. The state may be incomplete, so it is computed again.
            self._policy = None
            self._not_programmed(error)
            cool_down = max(RETRY_SECONDS, RETRY_FACTOR * (self._clock() - began))
        else:
            self._error = ""
        self._schedule.ended(self._clock(), not self._error, cool_down)

    def _report_stale(self) -> None:
        """Post an Event once policies can no longer be followed because of their version."""
        reason = self._unserved() if self.enabled else ""
        before, self._stale = self._stale, f"{_STALE}: {reason}" if reason else ""
        if self._stale and self._stale != before:
            self._post(None, WARNING, Reason.POLICIES_STALE, "FollowNetworkPolicies", self._stale)

    def _not_programmed(self, error: Exception) -> None:
        """Report that the table is not that of the policies."""
        self._error = error_text(error)
        self._failures += 1
        if self.enabled:
            self._health.queued(FAMILY)
        text = "network policies cannot be programmed; the last state remains in force"
        self._limited.error("network policies", text, error=self._error)
        self._table.needs_full = True

    def _follow(self, addresses: Addresses, began: float) -> None:
        """Follow the objects, the node's addresses and the kernel; nothing is computed if none of them changed."""
        objects = self._view.state.policy
        changed = bool(objects.changes) or addresses != self._addresses
        fresh = self._policy is None or self._settings.have_changed()
        if self._policy is None or fresh:
            objects.pop_changes()
            ranges = self._settings.determine()
            self._policy = node_policy(
                self._view.state,
                self._settings.effective,
                self._settings.node_name,
                addresses,
                ranges,
                progress=self._progress,
            )
            self._addresses, self._table.needs_full = addresses, True
        elif objects.changes:
            self._choices.update(self._policy, objects.pop_changes())
        elif self._policy.pending:
            self._policy.proceed()
            changed = True
        self._choices.reconsider_if_due(self._policy, fresh)
        if addresses != self._addresses:
            self._policy.set_node_addresses(raw_addresses(addresses))
            self._addresses = addresses
        self._table.notice_changes(self._tables.suspects)
        self._links.notice_changes()
        if changed or self._links.due or self._is_due or self._policy.table.journal:
            self._apply(self._policy, began)
        if fresh:
            # The state of a large cluster is long-lived, and a garbage collection that visits all of it would delay a
            # change by a tenth of a second. The state that it replaces may be collected.
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        if self._policy.pending:
            # Events come first: a new pod is isolated before the grants of an earlier pod are complete.
            self._schedule.request()
        self._report_denied(self._policy)

    @property
    def _is_due(self) -> bool:
        """Whether the whole table must be compared with the kernel."""
        return self._table.needs_full or bool(self._tables.suspects)

    def _report_denied(self, policy: NodePolicy) -> None:
        """Log packets that were denied; the policies are in force without it."""
        try:
            self._denied.report(self._view.state.policy, policy, self._settings.effective.cluster_policies)
        except NOT_OF_ONE_OBJECT:
            raise
        except Exception as error:
            text = "denied packets cannot be logged, which is a defect of the agent"
            self._limited.error("denied packets", text, error=defect_text(error))

    def _apply(self, policy: NodePolicy, began: float) -> None:
        options = self._settings.options
        self._links.follow(policy, self._settings.effective, everything=self._is_due)
        suspicion = self._tables.pop_suspects().get(FAMILY, "")
        self._table.follow(policy, options)
        try:
            synced = self._tables.sync(self._table, suspicion, at_once=True)
        except ProxyError as error:
            self._tables.failed(self._table, suspicion, error)
            raise
        if synced.kind == FULL:
            self._log.info(
                "network policies are in force",
                pods=len(policy.local),
                rows=len(policy.table.rows),
                **synced.result.counts,
            )
        compared = synced.kind == FULL or synced.compared
        self._check.synced(self._check_period, compared, self._clock() - began)
        self.pods = {address: pods[0].key for address, pods in policy.owners.local.items()}
        self._pod_count, self._elements = len(policy.local), len(policy.table.rows)
        self._denied.follow(options.log_group)
        self._warn(policy)

    def _warn(self, policy: NodePolicy) -> None:
        """Log each warning once for as long as it applies."""
        lines = annotation_warnings(policy)
        for line in lines:
            if line not in self._warned:
                self._log.warning(line)
        self._warned = frozenset(lines)

    def _sync_again(self) -> None:
        # New settings replace the schedule.
        self._schedule.request()

    def _check_everything(self) -> None:
        self._tables.suspect(FAMILY, "regular check")
        self._choices.request()

    def close(self) -> None:
        """Stop watching; the table remains in force."""
        self._denied.follow(NO_LOG)
        self._links.close()
        self._table.stop_watching()


def _schedule() -> Schedule:
    return Schedule(0.0, RETRY_SECONDS, math.inf)
