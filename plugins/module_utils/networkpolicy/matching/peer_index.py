# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An index of pod peers, by which a pod is compared only with those that are likely to match it."""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Optional, Tuple

from ...cluster.policy_model import Namespace, Pod
from .peers import PeerEntry

# Peers by a label that pods must have, and those that require none of a certain value, by None.
_Bucket = Dict[Optional[Tuple[str, str]], Dict[PeerEntry, None]]


class PeerIndex:
    """Pod peers by the namespaces that they select and by a label that they require.

    The cost of :meth:`matching`, for all pods together, is that of :class:`.Candidates`: each peer is compared with
    each namespace once, and with the pods of the namespaces that it selects.
    """

    def __init__(self, namespaces: Mapping[str, Namespace]) -> None:
        self._namespaces = namespaces
        self._of_one: Dict[str, _Bucket] = {}
        self._selecting: Dict[PeerEntry, None] = {}
        # Of the peers that select namespaces, those that select this one, for each namespace that had a pod to match.
        self._selected_by: Dict[str, _Bucket] = {}

    def add(self, entry: PeerEntry) -> None:
        """Add a peer."""
        if entry.peer.namespaces is None:
            _put(self._of_one.setdefault(entry.peer.namespace, {}), entry)
            return
        self._selecting[entry] = None
        for name, bucket in self._selected_by.items():
            if self._selects(entry, name):
                _put(bucket, entry)

    def remove(self, entry: PeerEntry) -> None:
        """Remove a peer."""
        if entry.peer.namespaces is None:
            bucket = self._of_one[entry.peer.namespace]
            _drop(bucket, entry)
            if not bucket:
                del self._of_one[entry.peer.namespace]
            return
        del self._selecting[entry]
        for bucket in self._selected_by.values():
            _drop(bucket, entry)

    def namespace_changed(self, name: str) -> None:
        """Forget which peers select a namespace."""
        self._selected_by.pop(name, None)

    def matching(self, pod: Pod) -> List[PeerEntry]:
        """Return the peers that match a pod."""
        labels = pod.labels
        return [entry for entry in self._candidates(pod) if entry.peer.pods.matches(labels)]

    def matches(self, pod: Pod) -> bool:
        """Return whether any peer matches a pod."""
        labels = pod.labels
        return any(entry.peer.pods.matches(labels) for entry in self._candidates(pod))

    def _candidates(self, pod: Pod) -> Iterator[PeerEntry]:
        for bucket in (self._of_one.get(pod.namespace), self._selecting_peers(pod.namespace)):
            if bucket:
                yield from bucket.get(None, ())
                for label in pod.labels.items():
                    if label in bucket:
                        yield from bucket[label]

    def _selecting_peers(self, name: str) -> Optional[_Bucket]:
        found = self._selected_by.get(name)
        if found is None and self._selecting and name in self._namespaces:
            found = self._selected_by[name] = {}
            for entry in self._selecting:
                if self._selects(entry, name):
                    _put(found, entry)
        return found

    def _selects(self, entry: PeerEntry, name: str) -> bool:
        """Return whether a peer selects a namespace; the labels of one without a Namespace object are unknown."""
        namespace, selector = self._namespaces.get(name), entry.peer.namespaces
        return namespace is not None and selector is not None and selector.matches(namespace.labels)


def _put(bucket: _Bucket, entry: PeerEntry) -> None:
    for label in entry.peer.pods.anchor or (None,):
        bucket.setdefault(label, {})[entry] = None


def _drop(bucket: _Bucket, entry: PeerEntry) -> None:
    for label in entry.peer.pods.anchor or (None,):
        found = bucket.get(label)
        if found is not None and found.pop(entry, 0) is None and not found:
            del bucket[label]
