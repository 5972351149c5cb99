# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the agent can deny traffic of unknown pods, decided again whenever pods of its node change."""

from __future__ import annotations

from typing import Dict, Iterable, Mapping, Tuple

from ...base.addresses import Network
from ...cluster.model import NamespacedName
from ...cluster.policies.policy_model import Pod
from ...networkpolicy.matching.owners import counts
from ...preflight.policies import unknown_pod_findings
from ..telemetry.log import INFO, LimitedLog


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
