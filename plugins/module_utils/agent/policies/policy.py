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
import time
from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple

from ...base.addresses import Network
from ...base.errors import KernelError, ProxyError, defect_text
from ...cluster.account import BYTES_IN_NFTABLES
from ...cluster.api.resource_types import ResourceType
from ...cluster.model import NamespacedName
from ...configuration.node_proxy import (
    ALLOW,
    DENY,
    NetworkPolicySettings,
)
from ...convergence.handles import KernelHandles
from ...convergence.policy import (
    annotation_warnings,
    node_policy,
    pod_ranges,
    policy_findings,
    policy_options,
    raw_addresses,
)
from ...convergence.runtime.agent_status import PolicyStatus
from ...explain.policy import PolicyExplainer, Resolved
from ...networkpolicy.coverage import unselected_pods, unused_policies
from ...networkpolicy.matching.owners import Address
from ...networkpolicy.node_policy import NodePolicy
from ...preflight.findings import UNKNOWN_PODS
from ...rendering.networkpolicy.sets import NO_LOG
from ...resources import PlannedChange
from ..drift.repairs import Repairs
from ..ports.health import ProxyHealth
from ..reports import Reports
from ..source.view import ClusterView
from ..sync.table_sync import TableSync
from ..sync.tables import FULL
from ..threads.failures import NOT_OF_ONE_OBJECT, error_text
from ..threads.timers import Timers
from .connection_cuts import ConnectionCuts
from .denied_log import DeniedLog
from .inputs import PolicyChoices, PolicyLinks, UnknownPods
from .policy_table import FAMILY, PolicyTable

RETRY_SECONDS = 2.0
CHECK_SECONDS = 300.0

Addresses = Tuple[Tuple[str, str], ...]


class PolicySync:
    """Keeps the table of network policies in sync with a view.

    ``pods``: those of this node that a policy may be about, by address. ``health`` is unhealthy once the table has been
    out of date for long.
    """

    def __init__(
        self, view: ClusterView, handles: KernelHandles, timers: Timers, *, reports: Reports, health: ProxyHealth
    ) -> None:
        self.pods: Dict[Address, NamespacedName] = {}
        # As of the last table that was applied.
        self._pod_count = self._elements = 0
        self._failures = 0
        self._error = ""
        self._last_sync = 0.0
        self._health = health
        self._view = view
        self._log, self._limited = reports.log, reports.limited
        self._settings = NetworkPolicySettings()
        # The settings in effect: those requested, without what this node cannot do.
        self._effective = self._settings
        self._ranges: Tuple[Network, ...] = ()
        self._node_name = ""
        self._unknown = UnknownPods("", self._limited)
        self._links = PolicyLinks(timers, self._limited, self._sync_again)
        # New settings that need objects which are not known yet, and the name of the node.
        self._waiting: Optional[Tuple[NetworkPolicySettings, str]] = None
        # The addresses of the node that the table is for, and those of the last call of :meth:`sync`.
        self._addresses: Addresses = ()
        self._latest_addresses: Addresses = ()
        self._policy: Optional[NodePolicy] = None
        self._progress = handles.progress
        cuts = ConnectionCuts(timers, reports, handles.progress)
        self._table = PolicyTable(handles, cuts)
        self._tables = TableSync(Repairs(reports))
        self._remove = False
        self._failed = False
        self._choose = False
        self._clock = timers.clock
        self._pause = RETRY_SECONDS
        self._defect_at = float("-inf")
        self._denied = DeniedLog(reports)
        self._warned: FrozenSet[str] = frozenset()
        self._choices = PolicyChoices(timers, self._choose_again)
        self._retry = timers.add("retry network policies", self._try_again)
        self._check = timers.add("check network policies", self._check_everything)
        self._rest = timers.add("program further grants of network policies", self._sync_again)

    @property
    def bytes(self) -> int:
        """The bytes of memory that the elements of the table take."""
        return self._elements * BYTES_IN_NFTABLES.others

    def configure(self, settings: NetworkPolicySettings, node_name: str) -> None:
        """Adopt settings and the name of the node; the next sync applies them.

        While they need objects that are not known yet, the previous settings remain in effect.
        """
        self._waiting = None
        if (settings, node_name) == (self._settings, self._node_name):
            return
        if self._policy is not None and settings.enabled and not self._knows(settings):
            self._waiting = (settings, node_name)
            return
        self._adopt(settings, node_name)

    def _adopt(self, settings: NetworkPolicySettings, node_name: str) -> None:
        self._waiting = None
        self._settings, self._node_name = settings, node_name
        self._policy = None
        self._ranges = ()
        self._unknown = UnknownPods(node_name, self._limited)
        self._failed = False
        # A table of an earlier run, or of the previous settings.
        self._remove = not settings.enabled
        if settings.enabled:
            # As at the start of a family: from now on, a change that stays pending is unhealthy.
            self._health.updated(FAMILY)
            self._health.queued(FAMILY)
        else:
            self._health.forget(FAMILY)
            self.pods = {}
            self._pod_count = self._elements = 0

    def status(self) -> PolicyStatus:
        """Return the state as plain JSON values; empty if policies are not enforced.

        ``inForce``: the table is that of the policies that are known. ``warnings``: policies and pods with a problem,
        and what keeps traffic of unknown pods from being denied.
        """
        if not self._settings.enabled and not self._error:
            return {}
        policy, objects = self._policy, self._view.state.policy
        return {
            "inForce": self.in_force,
            "error": self._error or self._awaited(),
            "policies": len(objects.policies) + len(objects.cluster_policies),
            "pods": self._pod_count,
            "elements": self._elements,
            "refusedPolicies": len({key for key, _direction in policy.too_large}) if policy is not None else 0,
            "lastSync": round(self._last_sync, 3),
            "failures": self._failures,
            "repaired": self._tables.repairs.count,
            "warnings": self._warnings(policy) if policy is not None else [],
        }

    def _awaited(self) -> str:
        """Return what must be known before the settings can be applied; empty if they are in effect."""
        if self._policy is None:
            return "waiting for pods, namespaces and policies"
        if self._waiting is not None:
            return "waiting for the objects that the new settings need; the previous settings are in effect"
        return ""

    def coverage(self) -> PolicyStatus:
        """Return the pods of this node that no policy selects, and the policies that select no pod at all, by name."""
        if self._policy is None:
            return {}
        return {
            "unselectedPods": list(map(str, unselected_pods(self._policy))),
            "unusedPolicies": list(map(str, unused_policies(self._view.state.policy))),
        }

    @property
    def resources(self) -> Tuple[ResourceType, ...]:
        """The types of objects to follow: what the settings in effect need, and those that are to replace them."""
        wanted = [self._settings] if self._waiting is None else [self._settings, self._waiting[0]]
        return tuple(dict.fromkeys(item for settings in wanted for item in settings.resources))

    @property
    def enabled(self) -> bool:
        """Whether the agent enforces network policies, or is about to."""
        return self._settings.enabled

    @property
    def in_force(self) -> bool:
        """Whether the table is that of the policies that are known."""
        return bool(self._last_sync) and self._policy is not None and not self._error

    def explainer(self, endpoints: Sequence[Resolved]) -> PolicyExplainer:
        """Return an explainer of the state that is in force. Raises ProxyError if there is none."""
        if self._policy is None:
            reason = "does not know the cluster yet" if self._settings.enabled else "does not enforce network policies"
            raise ProxyError(self._error or f"the agent {reason}")
        return PolicyExplainer(
            self._view.state,
            self._policy,
            node_name=self._node_name,
            node_addresses=[address for _interface, address in self._addresses],
            options=policy_options(self._effective),
            endpoints=endpoints,
        )

    def compared(self) -> List[PlannedChange]:
        """Return how the kernel differs from the policies, without changing it; nothing if none are enforced.

        Raises KernelError.
        """
        return [] if self._policy is None else self._table.compared(self._policy, policy_options(self._effective))

    def filenos(self) -> List[int]:
        """Return the descriptors to wait for; none while none is read: after a failure, and before policies apply."""
        if self._failed or self._policy is None or not self._knows(self._settings):
            return []
        return [*self._table.filenos(), *self._links.filenos(), *self._denied.filenos()]

    def _knows(self, settings: NetworkPolicySettings) -> bool:
        """Return whether the cluster is known completely: partial knowledge would deny or allow wrongly."""
        return settings.kinds <= self._view.known

    def sync(self, addresses: Addresses) -> None:
        """Apply what changed; failures are logged and retried later. ``addresses``: of the node."""
        self._latest_addresses = addresses
        if self._failed:
            return
        if self._waiting is not None and self._knows(self._waiting[0]):
            self._adopt(*self._waiting)
        try:
            if self._remove:
                self._table.remove()
                self._links.close()
                self._denied.follow(NO_LOG)
                self._remove = False
            elif self._settings.enabled and self._knows(self._settings):
                self._follow(addresses)
                self._last_sync = time.time()
                self._health.updated(FAMILY)
        except KernelError as error:
            self._not_programmed(error, RETRY_SECONDS)
        except NOT_OF_ONE_OBJECT:
            raise
        except Exception as error:
            # Services need no network policies. The state may be incomplete, so it is computed again.
            self._policy = None
            self._not_programmed(error, self._next_pause())
        else:
            self._error = ""

    def _next_pause(self) -> float:
        """Return the seconds until the next attempt after a defect, which may show again after each success."""
        now = self._clock()
        lasted = now - self._defect_at
        self._pause = RETRY_SECONDS if lasted > 2 * CHECK_SECONDS else min(2 * self._pause, CHECK_SECONDS)
        self._defect_at = now
        return self._pause

    def _not_programmed(self, error: Exception, pause: float) -> None:
        """Report that the table is not that of the policies, and try again after a pause in seconds."""
        self._error = error_text(error)
        self._failures += 1
        if self._settings.enabled:
            self._health.queued(FAMILY)
        text = "network policies cannot be programmed; the last state remains in force"
        self._limited.error("network policies", text, error=self._error)
        self._failed = self._table.needs_full = True
        self._retry.restart(pause)

    def _follow(self, addresses: Addresses) -> None:
        """Follow the objects, the node's addresses and the kernel; nothing is computed if none of them changed."""
        objects = self._view.state.policy
        changed = bool(objects.changes) or addresses != self._addresses
        # A Node may get its ranges some time after it was created.
        ranges = self._current_ranges()
        fresh = self._policy is None or ranges != self._ranges or self._unknown_pods_changed()
        if self._policy is None or fresh:
            objects.pop_changes()
            self._ranges = ranges
            self._effective = self._feasible(ranges)
            # Ranges are needed only to deny unknown pods.
            used = ranges if self._effective.unknown_pods == DENY else ()
            self._policy = node_policy(
                self._view.state, self._effective, self._node_name, addresses, used, progress=self._progress
            )
            self._addresses, self._table.needs_full = addresses, True
        elif objects.changes:
            self._choices.update(self._policy, objects.pop_changes())
        elif self._policy.pending:
            self._policy.proceed()
            changed = True
        if self._choose and not fresh:
            self._choices.reconsider(self._policy)
        self._choose = False
        if addresses != self._addresses:
            self._policy.set_node_addresses(raw_addresses(addresses))
            self._addresses = addresses
        self._table.notice_changes(self._tables.suspects)
        self._links.notice_changes()
        if changed or self._links.due or self._is_due or self._policy.table.journal:
            self._apply(self._policy)
        if fresh:
            # The state of a large cluster is long-lived, and a garbage collection that visits all of it would delay a
            # change by a tenth of a second. The state that it replaces may be collected.
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        if self._policy.pending:
            # Events come first: a new pod is isolated before the grants of an earlier pod are complete.
            self._rest.start(0)
        self._report_denied(self._policy)

    @property
    def _is_due(self) -> bool:
        """Whether the whole table must be compared with the kernel."""
        return self._table.needs_full or bool(self._tables.suspects)

    def _unknown_pods_changed(self) -> bool:
        """Follow changes of pods; return whether traffic of unknown pods must no longer be treated as it is."""
        if self._settings.unknown_pods != DENY:
            return False
        objects = self._view.state.policy
        self._unknown.follow(objects.pods, objects.changes.pods)
        return self._unknown.denied != (self._effective.unknown_pods == DENY)

    def _feasible(self, ranges: Tuple[Network, ...]) -> NetworkPolicySettings:
        """Return the settings without what this node cannot do, and log obstacles."""
        for finding in policy_findings(self._view.state, self._settings, self._node_name):
            # Whether unknown pods are denied changes with the pods, and has a warning of its own.
            if finding.name != UNKNOWN_PODS:
                self._log.warning(str(finding))
        if self._settings.unknown_pods == DENY:
            self._unknown.begin(self._view.state.policy.pods, ranges)
            if not self._unknown.denied:
                return self._settings._replace(unknown_pods=ALLOW)
        return self._settings

    def _report_denied(self, policy: NodePolicy) -> None:
        """Log packets that were denied; the policies are in force without it."""
        try:
            self._denied.report(self._view.state.policy, policy, self._effective.cluster_policies)
        except NOT_OF_ONE_OBJECT:
            raise
        except Exception as error:
            text = "denied packets cannot be logged, which is a defect of the agent"
            self._limited.error("denied packets", text, error=defect_text(error))

    def _current_ranges(self) -> Tuple[Network, ...]:
        """Return the node's pod ranges; the last ones while its Node is gone or has none, to deny what they deny."""
        ranges = pod_ranges(self._view.state, self._settings, self._node_name)
        if ranges or not self._ranges or self._settings.unknown_pods != DENY:
            return ranges
        text = "the Node has no pod CIDRs; addresses of unknown pods are still denied in its last ones"
        self._limited.warning("ranges", text, node=self._node_name)
        return self._ranges

    def _apply(self, policy: NodePolicy) -> None:
        options = policy_options(self._effective)
        self._links.follow(policy, self._effective, everything=self._is_due)
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
        if synced.kind == FULL or synced.compared:
            self._check.restart(CHECK_SECONDS)
        self.pods = {address: pods[0].key for address, pods in policy.owners.local.items()}
        self._pod_count, self._elements = len(policy.local), len(policy.table.rows)
        self._denied.follow(options.log_group)
        self._warn(policy)

    def _warnings(self, policy: NodePolicy) -> List[str]:
        return [*filter(None, [self._unknown.warning]), *annotation_warnings(policy)]

    def _warn(self, policy: NodePolicy) -> None:
        """Log each warning once for as long as it applies."""
        lines = annotation_warnings(policy)
        for line in lines:
            if line not in self._warned:
                self._log.warning(line)
        self._warned = frozenset(lines)

    def _sync_again(self) -> None:
        self.sync(self._latest_addresses)

    def _try_again(self) -> None:
        self._failed = False
        self._sync_again()

    def _check_everything(self) -> None:
        self._tables.suspect(FAMILY, "regular check")
        self._choose_again()

    def _choose_again(self) -> None:
        self._choose = True
        self._sync_again()

    def close(self) -> None:
        """Stop watching; the table remains in force."""
        self._denied.follow(NO_LOG)
        self._links.close()
        self._table.stop_watching()
