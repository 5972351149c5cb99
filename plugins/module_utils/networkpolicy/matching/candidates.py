# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the selectors of a peer cost: the objects that they are compared with, counted without any comparison."""

from __future__ import annotations

from typing import Collection, Iterable, Mapping

from ...cluster.model import NamespacedName
from ...cluster.policies.policy_model import Namespace, Pod, PodPeer
from ...cluster.policies.selectors import LabelSelector
from .compiled import weight
from .port_names import PortNames

_Label = tuple[str, str]
#: Each peer counts for at least this many pods: it may be compared with pods that come.
FEWEST_PODS = 100


class Candidates:
    """Counts what a peer is compared with: namespaces, and in each the pods with a label that it requires.

    Namespaces are those with a label that the peer requires of them, or all. Each comparison counts once for every
    condition. ``pods``: those that peers may match; ``of_namespace``: their names. What was counted is remembered.
    ``names``: counts the ports of these pods.
    """

    def __init__(
        self,
        pods: Mapping[NamespacedName, Pod],
        of_namespace: Mapping[str, Collection[NamespacedName]],
        namespaces: Mapping[str, Namespace],
    ) -> None:
        self._pods = pods
        self._of_namespace = of_namespace
        self._namespaces = namespaces
        self.names = PortNames(pods, of_namespace)
        self._known: dict[PodPeer, int] = {}
        self._reach: dict[PodPeer, int] = {}
        # By namespace: the number of pods with a label.
        self._counts: dict[str, dict[_Label, int]] = {}
        self._by_label: dict[_Label, set[str]] = {}

    def exceed(self, peers: Collection[PodPeer], most: int) -> bool:
        """Return whether the candidates of all peers together are more than ``most``."""
        total = 0
        for peer in peers:
            total += self.of(peer)
            if total > most:
                return True
        return False

    def of(self, peer: PodPeer) -> int:
        """Return the number of candidates of a peer."""
        found = self._known.get(peer)
        if found is None:
            found = self._known[peer] = weight(peer) * self._compared(peer)
        return found

    def pods_of(self, peer: PodPeer) -> int:
        """Return the number of pods that a peer may match, at most."""
        found = self._reach.get(peer)
        if found is None:
            scope = (peer.namespace,) if peer.namespaces is None else self._scope(peer.namespaces)
            found = self._reach[peer] = self._pods_in(scope, peer)
        return found

    def _compared(self, peer: PodPeer) -> int:
        if peer.namespaces is None:
            return max(FEWEST_PODS, self._pods_in((peer.namespace,), peer))
        scope = self._scope(peer.namespaces)
        return len(scope) + max(FEWEST_PODS, self._pods_in(scope, peer))

    def _pods_in(self, scope: Iterable[str], peer: PodPeer) -> int:
        anchor = peer.pods.anchor
        if not anchor:
            return sum(len(self._of_namespace.get(name, ())) for name in scope)
        return sum(self._labelled(name).get(label, 0) for name in scope for label in anchor)

    def _labelled(self, name: str) -> Mapping[_Label, int]:
        counts = self._counts.get(name)
        if counts is None:
            counts = self._counts[name] = {}
            for key in self._of_namespace.get(name, ()):
                for label in self._pods[key].labels.items():
                    counts[label] = counts.get(label, 0) + 1
        return counts

    def _scope(self, selector: LabelSelector) -> Collection[str]:
        """Return the namespaces that a selector is compared with."""
        anchor = selector.anchor
        if not anchor:
            return self._namespaces
        if not self._by_label:
            for name, namespace in self._namespaces.items():
                for label in namespace.labels.items():
                    self._by_label.setdefault(label, set()).add(name)
        return {name for label in anchor for name in self._by_label.get(label, ())}
