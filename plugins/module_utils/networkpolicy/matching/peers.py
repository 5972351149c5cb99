# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Matching of pods to the pod peers in use, indexed so that only likely peers are compared with a pod."""

from __future__ import annotations

from typing import Dict, FrozenSet, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from ...cluster.model import NamespacedName
from ...cluster.policy_model import ContainerPort, Namespace, Pod, PodPeer
from .compiled import Block, peer_digest

_Label = Optional[Tuple[str, str]]


class PeerEntry:
    """A pod peer in use, compared by identity. ``members``: the pods that it matches."""

    __slots__ = ("digest", "members", "peer", "uses")

    def __init__(self, peer: PodPeer) -> None:
        self.peer = peer
        self.digest = peer_digest(peer)
        self.members: Set[NamespacedName] = set()
        self.uses = 0


class Content(NamedTuple):
    """The identity of a class of peers: the pod peers and blocks that match it, and port names that rules use."""

    peers: FrozenSet[PeerEntry] = frozenset()
    blocks: FrozenSet[Block] = frozenset()
    ports: FrozenSet[ContainerPort] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.peers or self.blocks or self.ports)


class PodPeers:
    """The pod peers in use. ``new`` and ``gone``: those added and removed since they were last cleared.

    ``compared``: how often a peer was compared with a pod; the caller sets it to 0.
    """

    def __init__(self, namespaces: Mapping[str, Namespace]) -> None:
        self.new: Dict[PeerEntry, None] = {}
        self.gone: Dict[PeerEntry, None] = {}
        self.compared = 0
        self._namespaces = namespaces
        self._entries: Dict[PodPeer, PeerEntry] = {}
        # Unused ones that are still part of the content of pods.
        self._leaving: Dict[PodPeer, PeerEntry] = {}
        # By namespace ("" for peers that select namespaces), then by a label that a pod must have.
        self._index: Dict[str, Dict[_Label, Dict[PeerEntry, None]]] = {}
        self._selected: Dict[str, Dict[PeerEntry, bool]] = {}

    def acquire(self, peer: PodPeer) -> PeerEntry:
        """Return the entry of a peer, and count one more use."""
        entry = self._entries.get(peer)
        if entry is None:
            # The same entry again, so that equal contents stay equal.
            entry = self._leaving.pop(peer) if peer in self._leaving else PeerEntry(peer)
            self._entries[peer] = entry
            bucket = self._index.setdefault(peer.namespace, {})
            for label in self._labels(peer):
                bucket.setdefault(label, {})[entry] = None
            self.new[entry] = None
        entry.uses += 1
        return entry

    def release(self, entry: PeerEntry) -> None:
        """Drop one use of an entry."""
        entry.uses -= 1
        if not entry.uses:
            self.gone[entry] = None

    def settle(self) -> Tuple[List[PeerEntry], List[PeerEntry]]:
        """Drop unused peers, and return the peers added and those removed since the last call."""
        gone = [entry for entry in self.gone if not entry.uses]
        new = [entry for entry in self.new if entry.uses]
        self._leaving = {peer: entry for peer, entry in self._leaving.items() if entry.members}
        for entry in gone:
            self._leaving[entry.peer] = self._entries.pop(entry.peer)
            bucket = self._index[entry.peer.namespace]
            for label in self._labels(entry.peer):
                del bucket[label][entry]
                if not bucket[label]:
                    del bucket[label]
            for known in self._selected.values():
                known.pop(entry, None)
        self.gone.clear()
        self.new.clear()
        return new, gone

    def namespace_changed(self, name: str) -> None:
        """Forget which peers select a namespace."""
        self._selected.pop(name, None)

    def selects_namespace(self, entry: PeerEntry, name: str) -> bool:
        """Return whether a peer selects a namespace; the labels of one without a Namespace object are unknown."""
        selector = entry.peer.namespaces
        if selector is None:
            return entry.peer.namespace == name
        namespace = self._namespaces.get(name)
        if namespace is None:
            return False
        known = self._selected.setdefault(name, {})
        found = known.get(entry)
        if found is None:
            found = known[entry] = selector.matches(namespace.labels)
        return found

    def matching(self, pod: Pod) -> FrozenSet[PeerEntry]:
        """Return the peers that match a pod."""
        labels, namespace = pod.labels, pod.namespace
        candidates = list(self._candidates(pod))
        self.compared += len(candidates)
        return frozenset(
            entry
            for entry in candidates
            if entry.peer.pods.matches(labels) and self.selects_namespace(entry, namespace)
        )

    def _candidates(self, pod: Pod) -> Iterator[PeerEntry]:
        for bucket in (self._index.get(pod.namespace), self._index.get("")):
            if bucket:
                yield from bucket.get(None, ())
                for label in pod.labels.items():
                    if label in bucket:
                        yield from bucket[label]

    @staticmethod
    def _labels(peer: PodPeer) -> Iterable[_Label]:
        return peer.pods.anchor or (None,)
