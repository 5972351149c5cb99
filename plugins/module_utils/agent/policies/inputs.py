# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent follows for network policies beside their objects: refusals by size, interfaces, unknown pods."""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Mapping, Optional, Tuple

from ...base.addresses import Network
from ...base.errors import KernelError
from ...cluster.model import NamespacedName
from ...cluster.parsing.policy_objects import PolicyChanges
from ...cluster.policies.policy_model import Pod
from ...configuration.node_proxy import NetworkPolicySettings
from ...convergence.policy import find_links
from ...kernel.pod_links import PodLinks
from ...kernel.rtnetlink.address_monitor import AddressMonitor
from ...networkpolicy.matching.owners import counts
from ...networkpolicy.node_policy import NodePolicy
from ...networkpolicy.rows import ANY, POLICED, SELF
from ...preflight.policies import unknown_pod_findings
from ..telemetry.log import INFO, LimitedLog
from ..threads.timers import Pace, Timers

PAUSE_SECONDS = 2.0
#: The minimum pause after a choice is this many times its duration, so that choices take a fifth of the time at most.
PAUSE_FACTOR = 4
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.5, 16.0


class PolicyChoices:
    """Applies changes to policies, and limits how often it is chosen which of them are refused for their size.

    A choice takes seconds, and refuses the policies that need most instead of the one that happened to change last.
    ``again`` is called when it is time.
    """

    def __init__(self, timers: Timers, again: Callable[[], None]) -> None:
        self._clock = timers.clock
        self._timer = timers.add("choose network policies", again)
        self._pace = Pace(timers.clock, PAUSE_FACTOR, PAUSE_SECONDS)

    def update(self, policy: NodePolicy, changes: PolicyChanges) -> None:
        """Apply changes; if a choice is needed and the last one was too recent, it is made later."""
        choose = not self._pace.rest()
        self._measured(policy, lambda: policy.update(changes, choose))

    def reconsider(self, policy: NodePolicy) -> None:
        """Choose now."""
        self._measured(policy, policy.reconsider)

    def _measured(self, policy: NodePolicy, action: Callable[[], None]) -> None:
        started, before = self._clock(), policy.choices
        action()
        if policy.choices != before:
            self._pace.worked(self._clock() - started)
        if policy.is_provisional:
            self._timer.start(self._pace.rest())


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
        self._timer = timers.add("look for interfaces of pods", self._look_again)
        self._monitor: Optional[AddressMonitor] = None

    def filenos(self) -> List[int]:
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
        changed = everything or any(row[0] in (SELF, POLICED, ANY) for row in policy.table.journal)
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


class UnknownPods:
    """Decides whether traffic of unknown pods is denied, for settings that request it.

    ``denied``: it is. ``warning``: why it is not, or not for all addresses that pods have; empty if there is nothing
    to say. Once it is denied, it remains so for as long as the ranges are the same: a single pod that gets an address
    outside of them must not open the others.
    """

    def __init__(self, node_name: str, limited: LimitedLog) -> None:
        self.denied = False
        self.warning = ""
        self._node_name = node_name
        self._limited = limited
        self._ranges: Tuple[Network, ...] = ()
        self._addresses: Dict[NamespacedName, Tuple[str, ...]] = {}

    def begin(self, pods: Mapping[NamespacedName, Pod], ranges: Tuple[Network, ...]) -> None:
        """Decide for the pods of a cluster and the pod ranges of the node."""
        self.denied &= ranges == self._ranges
        self._ranges = ranges
        self._addresses = {}
        self._put(pods, pods)
        self._decide()

    def follow(self, pods: Mapping[NamespacedName, Pod], changed: Iterable[NamespacedName]) -> None:
        """Decide again if changed pods are of the node."""
        if self._put(pods, changed):
            self._decide()

    def _put(self, pods: Mapping[NamespacedName, Pod], changed: Iterable[NamespacedName]) -> bool:
        """Adopt the addresses of the node's pods among those that changed; return whether there were any."""
        touched = False
        for key in changed:
            pod = pods.get(key)
            is_own = pod is not None and pod.node_name == self._node_name and counts(pod)
            now = pod.addresses if pod is not None and is_own else ()
            touched |= now != self._addresses.pop(key, ())
            if now:
                self._addresses[key] = now
        return touched

    def _decide(self) -> None:
        addresses = [address for owned in self._addresses.values() for address in owned]
        findings = unknown_pod_findings(addresses, self._ranges)
        self.denied |= not findings
        where = "denied only in the pod ranges of the node" if self.denied else "allowed"
        known, self.warning = self.warning, "".join(f"traffic of unknown pods is {where}: {item}" for item in findings)
        if self.warning and not known:
            self._limited.warning("unknown pods", self.warning)
        elif known and not self.warning:
            self._limited.write("unknown pods", INFO, "traffic of unknown pods is denied")
