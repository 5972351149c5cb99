# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pod peers that the rules of policies use, and their index: a pod is compared only with those likely to match."""

from __future__ import annotations

from typing import Iterator, Mapping, Optional

from ...cluster.policies.policy_model import Namespace, Pod, PodPeer
from ...cluster.policies.selectors import LabelSelector
from .compiled import PeerEntry


class PodPeers:
    """The pod peers in use, with an index of them."""

    def __init__(self, namespaces: Mapping[str, Namespace]) -> None:
        self.index = PeerIndex(namespaces)
        self._new: dict[PeerEntry, None] = {}
        self._gone: dict[PeerEntry, None] = {}
        self._entries: dict[PodPeer, PeerEntry] = {}
        # Unused ones that are still part of the content of pods.
        self._leaving: dict[PodPeer, PeerEntry] = {}

    def acquire(self, peer: PodPeer) -> PeerEntry:
        """Return the entry of a peer, and count one more use."""
        entry = self._entries.get(peer)
        if entry is None:
            # The same entry again, so that equal contents stay equal.
            entry = self._leaving.pop(peer) if peer in self._leaving else PeerEntry(peer)
            self._entries[peer] = entry
            self._new[entry] = None
        entry.uses += 1
        return entry

    def release(self, entry: PeerEntry) -> None:
        """Drop one use of an entry."""
        entry.uses -= 1
        if not entry.uses:
            self._gone[entry] = None

    def flush(self) -> tuple[list[PeerEntry], list[PeerEntry]]:
        """Bring the index up to date; return the peers added and those removed since the last call."""
        gone = [entry for entry in self._gone if not entry.uses]
        new = [entry for entry in self._new if entry.uses]
        self._leaving = {peer: entry for peer, entry in self._leaving.items() if entry.contents}
        for entry in gone:
            self._leaving[entry.peer] = self._entries.pop(entry.peer)
            if entry not in self._new:
                self.index.remove(entry)
        for entry in new:
            self.index.add(entry)
        self._gone.clear()
        self._new.clear()
        return new, gone


# Peers by a label that pods, or namespaces, must have, and those that require no certain one, by None.
_Bucket = dict[Optional[tuple[str, str]], dict[PeerEntry, None]]


class PeerIndex:
    """Pod peers by the namespaces that they select and by a label that they require.

    The cost of :meth:`matching`, for all pods together, is that of :class:`.Candidates`: each peer is compared with
    each namespace once, and with the pods of the namespaces that it selects.
    """

    def __init__(self, namespaces: Mapping[str, Namespace]) -> None:
        self._namespaces = namespaces
        self._of_one: dict[str, _Bucket] = {}
        # Peers that select namespaces, by a label that these must have.
        self._selecting: _Bucket = {}
        # Those that select this one, for each namespace that had a pod to match.
        self._selected_by: dict[str, _Bucket] = {}
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

    def matching(self, pod: Pod) -> list[PeerEntry]:
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
