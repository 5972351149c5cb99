# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings by which the agent enforces network policies, without what the node cannot do or does not know yet."""

from __future__ import annotations

from typing import Iterable, Mapping, Optional

from ...base.addresses import Network
from ...cluster.api.resource_types import ResourceType
from ...cluster.model import NamespacedName
from ...cluster.policies.policy_model import Pod
from ...configuration.node_proxy import ALLOW, DENY, NetworkPolicySettings
from ...convergence.policy import pod_ranges, policy_findings, policy_options
from ...networkpolicy.matching.owners import counts
from ...preflight.findings import UNKNOWN_PODS
from ...preflight.policies import unknown_pod_findings
from ...rendering.networkpolicy.sets import Options
from ..reports import Reports
from ..source.view import ClusterView
from ..telemetry.log import INFO, LimitedLog


class SettingsInEffect:
    """Settings, and the name of the node to which they apply.

    ``requested``: those adopted last. ``effective``: the same without what this node cannot do. ``ranges``: the pod
    ranges of the node.
    """

    def __init__(self, view: ClusterView, reports: Reports) -> None:
        self.requested = self.effective = NetworkPolicySettings()
        self.node_name = ""
        self.ranges: tuple[Network, ...] = ()
        self._view = view
        self._log, self._limited = reports.log, reports.limited
        self._unknown = UnknownPods("", self._limited)
        # New settings that need objects which are not known yet, and the name of the node.
        self._waiting: Optional[tuple[NetworkPolicySettings, str]] = None

    @property
    def resources(self) -> tuple[ResourceType, ...]:
        """The types of objects to follow: what the settings in effect need, and those that are to replace them."""
        wanted = [self.requested] if self._waiting is None else [self.requested, self._waiting[0]]
        return tuple(dict.fromkeys(item for settings in wanted for item in settings.resources))

    @property
    def options(self) -> Options:
        """The options of the table."""
        return policy_options(self.effective)

    @property
    def warnings(self) -> list[str]:
        """What keeps traffic of unknown pods from being denied."""
        return [self._unknown.warning] if self._unknown.warning else []

    @property
    def are_known(self) -> bool:
        """Whether the objects that the settings need are known: partial knowledge would deny or allow wrongly."""
        return self.requested.kinds <= self._view.known

    @property
    def are_replaceable(self) -> bool:
        """Whether new settings wait, and the objects that they need are known now."""
        return self._waiting is not None and self._waiting[0].kinds <= self._view.known

    def request(self, settings: NetworkPolicySettings, node_name: str) -> None:
        """Let settings wait until :meth:`replace`, unless they are those in effect."""
        is_new = (settings, node_name) != (self.requested, self.node_name)
        self._waiting = (settings, node_name) if is_new else None

    def replace(self) -> bool:
        """Adopt the settings that wait; return whether there were any."""
        if self._waiting is None:
            return False
        (self.requested, self.node_name), self._waiting = self._waiting, None
        self.ranges = ()
        self._unknown = UnknownPods(self.node_name, self._limited)
        return True

    @property
    def awaited(self) -> str:
        """What new settings wait for, empty if there are none."""
        if self._waiting is None:
            return ""
        return "waiting for the objects that the new settings need; the previous settings are in effect"

    def have_changed(self) -> bool:
        """Follow changes of pods and of the Node; return whether the node must be computed again for them."""
        # A Node may get its ranges some time after it was created.
        return self._current_ranges() != self.ranges or self._unknown_pods_changed()

    def determine(self) -> tuple[Network, ...]:
        """Determine the effective settings; return the ranges outside of which unknown pods are not denied."""
        self.ranges = self._current_ranges()
        self.effective = self._feasible()
        # Ranges are needed only to deny unknown pods.
        return self.ranges if self.effective.unknown_pods == DENY else ()

    def _unknown_pods_changed(self) -> bool:
        """Follow changes of pods; return whether traffic of unknown pods must no longer be treated as it is."""
        if self.requested.unknown_pods != DENY:
            return False
        objects = self._view.state.policy
        self._unknown.follow(objects.pods, objects.changes.pods)
        return self._unknown.denied != (self.effective.unknown_pods == DENY)

    def _feasible(self) -> NetworkPolicySettings:
        """Return the settings without what this node cannot do, and log obstacles."""
        for finding in policy_findings(self._view.state, self.requested, self.node_name):
            # Whether unknown pods are denied changes with the pods, and has a warning of its own.
            if finding.name != UNKNOWN_PODS:
                self._log.warning(str(finding))
        if self.requested.unknown_pods == DENY:
            self._unknown.begin(self._view.state.policy.pods, self.ranges)
            if not self._unknown.denied:
                return self.requested._replace(unknown_pods=ALLOW)
        return self.requested

    def _current_ranges(self) -> tuple[Network, ...]:
        """Return the node's pod ranges; the last ones while its Node is gone or has none, to deny what they deny."""
        ranges = pod_ranges(self._view.state, self.requested, self.node_name)
        if ranges or not self.ranges or self.requested.unknown_pods != DENY:
            return ranges
        text = "the Node has no pod CIDRs; addresses of unknown pods are still denied in its last ones"
        self._limited.warning("ranges", text, node=self.node_name)
        return self.ranges


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
        self._ranges: tuple[Network, ...] = ()
        self._addresses: dict[NamespacedName, tuple[str, ...]] = {}

    def begin(self, pods: Mapping[NamespacedName, Pod], ranges: tuple[Network, ...]) -> None:
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
