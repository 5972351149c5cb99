# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An index of pod peers, by which a pod is compared only with those that are likely to match it."""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Optional, Tuple

from ...cluster.policies.policy_model import Namespace, Pod
from ...cluster.policies.selectors import LabelSelector
from .peers import PeerEntry

# Peers by a label that pods, or namespaces, must have, and those that require no certain one, by None.
_Bucket = Dict[Optional[Tuple[str, str]], Dict[PeerEntry, None]]


class PeerIndex:
    """Pod peers by the namespaces that they select and by a label that they require.

    The cost of :meth:`matching`, for all pods together, is that of :class:`.Candidates`: each peer is compared with
    each namespace once, and with the pods of the namespaces that it selects.
    """

    def __init__(self, namespaces: Mapping[str, Namespace]) -> None:
        self._namespaces = namespaces
        self._of_one: Dict[str, _Bucket] = {}
        # Peers that select namespaces, by a label that these must have.
        self._selecting: _Bucket = {}
        # Those that select this one, for each namespace that had a pod to match.
        self._selected_by: Dict[str, _Bucket] = {}
        #: What the comparisons with pods have cost: the caller sets it to 0.
        self.compared = 0

    def add(self, entry: PeerEntry) -> None:
        """Add a peer."""
        if entry.peer.namespaces is None:
            _put(self._of_one.setdefault(entry.peer.namespace, {}), entry, entry.peer.pods)
        else:
            _put(self._selecting, entry, entry.peer.namespaces)
            self._selected_by.clear()

    def remove(self, entry: PeerEntry) -> None:
        """Remove a peer."""
        if entry.peer.namespaces is None:
            bucket = self._of_one[entry.peer.namespace]
            _drop(bucket, entry, entry.peer.pods)
            if not bucket:
                del self._of_one[entry.peer.namespace]
        else:
            _drop(self._selecting, entry, entry.peer.namespaces)
            self._selected_by.clear()

    def namespace_changed(self, name: str) -> None:
        """Forget which peers select a namespace."""
        self._selected_by.pop(name, None)

    def matching(self, pod: Pod) -> List[PeerEntry]:
        """Return the peers that match a pod."""
        labels = pod.labels
        candidates = list(self._candidates(pod))
        self.compared += sum([entry.weight for entry in candidates])
        return [entry for entry in candidates if entry.peer.pods.matches(labels)]

    def matches(self, pod: Pod) -> bool:
        """Return whether any peer matches a pod."""
        labels = pod.labels
        return any(entry.peer.pods.matches(labels) for entry in self._candidates(pod))

    def _candidates(self, pod: Pod) -> Iterator[PeerEntry]:
        for bucket in (self._of_one.get(pod.namespace), self._selecting_peers(pod.namespace)):
            if bucket:
                yield from _likely(bucket, pod.labels)

    def _selecting_peers(self, name: str) -> Optional[_Bucket]:
        """Return the peers that select a namespace; the labels of one without a Namespace object are unknown."""
        found = self._selected_by.get(name)
        namespace = self._namespaces.get(name)
        if found is None and self._selecting and namespace is not None:
            found = self._selected_by[name] = {}
            for entry in _likely(self._selecting, namespace.labels):
                selector = entry.peer.namespaces
                if selector is not None and selector.matches(namespace.labels):
                    _put(found, entry, entry.peer.pods)
        return found


def _likely(bucket: _Bucket, labels: Mapping[str, str]) -> Iterator[PeerEntry]:
    """Yield each peer of a bucket once whose required label, if any, is among the labels."""
    yield from bucket.get(None, ())
    for label in labels.items():
        if label in bucket:
            yield from bucket[label]


def _put(bucket: _Bucket, entry: PeerEntry, selector: LabelSelector) -> None:
    for label in selector.anchor or (None,):
        bucket.setdefault(label, {})[entry] = None


def _drop(bucket: _Bucket, entry: PeerEntry, selector: LabelSelector) -> None:
    for label in selector.anchor or (None,):
        found = bucket[label]
        del found[entry]
        if not found:
            del bucket[label]
