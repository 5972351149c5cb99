# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent follows for network policies beside their objects: refusals by size, and interfaces of pods."""

from __future__ import annotations

from typing import Callable, Optional

from ...base.errors import KernelError
from ...cluster.parsing.policy_objects import PolicyChanges
from ...configuration.node_proxy import NetworkPolicySettings
from ...convergence.policy import find_links
from ...kernel.pod_links import PodLinks
from ...kernel.rtnetlink.address_monitor import AddressMonitor
from ...networkpolicy.matching.owners import Address
from ...networkpolicy.node_policy import NodePolicy
from ...networkpolicy.rows import SELF
from ...rendering.networkpolicy.sets import SIDES
from ..source.view import ClusterView
from ..telemetry.log import LimitedLog
from ..threads.timers import Pace, Timers

PAUSE_SECONDS = 2.0
#: The minimum pause after a choice is this many times its duration, so that choices take a fifth of the time at most.
PAUSE_FACTOR = 4
#: How long policies wait for the Nodes that they select; the agent may not be allowed to read them.
NODE_PATIENCE_SECONDS = 10.0
_NODES_UNKNOWN = "the Nodes are not known: rules of ClusterNetworkPolicies with nodes as peers allow nothing"
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.5, 16.0


class PolicyChoices:
    """Applies changes to policies, and limits how often it is chosen which of them are refused for their size.

    A choice takes seconds, and refuses the policies that need most instead of the one that happened to change last.
    ``due``: it is time for one; ``again`` is called when that begins.
    """

    def __init__(self, timers: Timers, again: Callable[[], None]) -> None:
        self.due = False
        self._again = again
        self._clock = timers.clock
        self._timer = timers.add("choose network policies", self.request)
        self._pace = Pace(timers.clock, PAUSE_FACTOR, PAUSE_SECONDS)

    def request(self) -> None:
        """Have a choice made."""
        self.due = True
        self._again()

    def update(self, policy: NodePolicy, changes: PolicyChanges) -> None:
        """Apply changes; if a choice is needed and the last one was too recent, it is made later."""
        choose = not self._pace.rest()
        self._measured(policy, lambda: policy.update(changes, choose))

    def reconsider_if_due(self, policy: NodePolicy, fresh: bool) -> None:
        """Choose now if it is time, unless a fresh state has just been chosen for."""
        if self.due and not fresh:
            self._measured(policy, policy.reconsider)
        self.due = False

    def _measured(self, policy: NodePolicy, action: Callable[[], None]) -> None:
        started, before = self._clock(), policy.choices
        action()
        if policy.choices != before:
            self._pace.worked(self._clock() - started)
        if policy.is_provisional:
            self._timer.start(self._pace.rest())


class NodesOfPolicies:
    """Lets policies wait for the Nodes that they select, for as long as these are likely to arrive.

    Without them, a rule that selects Nodes opens nothing and may deny everything. ``again`` is called when the wait
    ends.
    """

    def __init__(self, view: ClusterView, timers: Timers, limited: LimitedLog, again: Callable[[], None]) -> None:
        self.warnings: list[str] = []
        self._view = view
        self._limited = limited
        self._clock = timers.clock
        self._due: Optional[float] = None
        self._timer = timers.add("wait for the Nodes that policies select", again)

    def are_awaited(self) -> bool:
        """Return whether to wait, and follow whether the Nodes are known."""
        objects = self._view.state.policy
        if objects.nodes_known or not objects.have_node_peers:
            self._due = None
            self.warnings = []
            return False
        if self._due is None:
            self._due = self._clock() + NODE_PATIENCE_SECONDS
            self._timer.restart(NODE_PATIENCE_SECONDS)
        if self._clock() < self._due:
            return True
        if not self.warnings:
            self.warnings = [_NODES_UNKNOWN]
            self._limited.warning("nodes of policies", _NODES_UNKNOWN)
        return False


class PolicyLinks:
    """Gives policies the interfaces of their pods. ``due``: interfaces of the node may have come or gone.

    ``again`` is called soon after a pod had none, or none of a bridge's ports. Pods on an uplink have none either, so
    the pauses grow, and end.
    """

    def __init__(self, timers: Timers, limited: LimitedLog, again: Callable[[], None]) -> None:
        self.due = True
        self._links = PodLinks()
        self._limited = limited
        self._again = again
        self._pause = _FIRST_POLL_SECONDS
        self._restricted: list[frozenset[Address]] = []
        self._timer = timers.add("look for interfaces of pods", self._look_again)
        self._monitor: Optional[AddressMonitor] = None

    def filenos(self) -> list[int]:
        """Return the descriptors that announce changes of interfaces."""
        return [self._monitor.fileno()] if self._monitor is not None else []

    def notice_changes(self) -> None:
        """Notice that interfaces, or their addresses, have come or gone."""
        if self._monitor is not None:
            self.due |= bool(list(self._monitor.events())) | self._monitor.pop_lost()

    def close(self) -> None:
        """Stop watching."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _look_again(self) -> None:
        self.due = True
        self._again()

    def follow(self, policy: NodePolicy, settings: NetworkPolicySettings, everything: bool) -> None:
        """Look for interfaces if pods of the node, what policies limit, or addresses of the node have changed.

        ``everything``: determine known ones again, too. Policies are in force without it, except for link-local and
        forged addresses, so a failure only causes a warning.
        """
        before, self._restricted = self._restricted, [policy.restricted(side) for side in SIDES]
        changed = everything or before != self._restricted or any(row[0] == SELF for row in policy.table.journal)
        if everything:
            self._links.forget()
        elif not self.due and not changed:
            return
        self.due = False
        if changed:
            self._pause = _FIRST_POLL_SECONDS
        if not self._found(policy, settings) and self._pause <= _LAST_POLL_SECONDS:
            self._timer.restart(self._pause)
            self._pause *= 2

    def _found(self, policy: NodePolicy, settings: NetworkPolicySettings) -> bool:
        """Find interfaces, and return whether none is missing."""
        try:
            if self._monitor is None:
                self._monitor = AddressMonitor()
            find_links(policy, settings, self._links)
            return self._links.complete
        except KernelError as error:
            text = (
                "the interfaces of pods are not known; link-local traffic and forged sources are not denied on new ones"
            )
            self._limited.warning("links", text, error=error)
            return False
