# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pod peers that the rules of policies use."""

from __future__ import annotations

from typing import Dict, List, Mapping, Tuple

from ...cluster.policies.policy_model import Namespace, PodPeer
from .peer_index import PeerIndex
from .peers import PeerEntry


class PodPeers:
    """The pod peers in use, with an index of them."""

    def __init__(self, namespaces: Mapping[str, Namespace]) -> None:
        self.index = PeerIndex(namespaces)
        self._new: Dict[PeerEntry, None] = {}
        self._gone: Dict[PeerEntry, None] = {}
        self._entries: Dict[PodPeer, PeerEntry] = {}
        # Unused ones that are still part of the content of pods.
        self._leaving: Dict[PodPeer, PeerEntry] = {}

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

    def flush(self) -> Tuple[List[PeerEntry], List[PeerEntry]]:
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
