# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the selectors of a peer cost: the objects that they are compared with, counted before any comparison."""

from __future__ import annotations

from typing import Collection, Dict, Iterable, Mapping, Tuple

from ...cluster.model import NamespacedName
from ...cluster.policy_model import Namespace, Pod, PodPeer
from ...cluster.selectors import LabelSelector

_Label = Tuple[str, str]
#: A peer that requires no label counts for at least this many pods: it will be compared with each pod that comes.
FEWEST_PODS = 100


class Candidates:
    """Counts the pods of the namespaces that a peer selects, of these the ones with a label that it requires.

    For a peer that selects namespaces, these are counted, too, since it is compared with each of them. ``pods``:
    those that peers may match; ``of_namespace``: their names. What is counted once is counted until the next instance.
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
        # By namespace: the number of pods with a label.
        self._counts: Dict[str, Dict[_Label, int]] = {}
        self._selected: Dict[LabelSelector, Collection[str]] = {}

    def exceed(self, peers: Collection[PodPeer], most: int) -> bool:
        """Return whether the candidates of all peers together are more than ``most``, at a cost of about ``most``."""
        if len(peers) * (max(FEWEST_PODS, len(self._pods)) + len(self._namespaces)) <= most:
            return False
        total = 0
        for peer in peers:
            total += self.of(peer)
            if total > most:
                return True
        return False

    def of(self, peer: PodPeer) -> int:
        """Return the number of candidates of a peer."""
        scope = (peer.namespace,) if peer.namespaces is None else self._scope(peer.namespaces)
        namespaces = 0 if peer.namespaces is None else len(self._namespaces)
        anchor = peer.pods.anchor
        if anchor:
            return namespaces + sum(self._labelled_in(name, anchor) for name in scope)
        return namespaces + max(FEWEST_PODS, sum(len(self._of_namespace.get(name, ())) for name in scope))

    def _labelled_in(self, name: str, anchor: Iterable[_Label]) -> int:
        counts = self._counts.get(name)
        if counts is None:
            counts = self._counts[name] = self._count(name)
        return sum(counts.get(label, 0) for label in anchor)

    def _count(self, name: str) -> Dict[_Label, int]:
        counts: Dict[_Label, int] = {}
        for key in self._of_namespace.get(name, ()):
            for label in self._pods[key].labels.items():
                counts[label] = counts.get(label, 0) + 1
        return counts

    def _scope(self, selector: LabelSelector) -> Collection[str]:
        """Return the namespaces with pods that a selector selects."""
        found = self._selected.get(selector)
        if found is None:
            matches, known = selector.matches, self._namespaces
            found = [name for name in self._of_namespace if name in known and matches(known[name].labels)]
            self._selected[selector] = found
        return found
