# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pod peers in use, and the identity of classes of peers."""

from __future__ import annotations

from typing import FrozenSet, NamedTuple, Set

from ...cluster.policies.policy_model import ContainerPort, PodPeer
from .compiled import Block, peer_digest


def weight(peer: PodPeer) -> int:
    """Return what a comparison of a peer costs: the number of its conditions, at least 1."""
    namespaces = peer.namespaces.requirements if peer.namespaces is not None else ()
    return max(1, len(peer.pods.requirements) + len(namespaces))


class PeerEntry:
    """A pod peer in use, compared by identity.

    ``contents``: those of the pods that it matches. ``weight``: what a comparison with it costs. ``candidates``: what
    it cost to compare it with all pods when it came into use (see :class:`.Candidates`).
    """

    __slots__ = ("candidates", "contents", "digest", "peer", "uses", "weight")

    def __init__(self, peer: PodPeer) -> None:
        self.peer = peer
        self.digest = peer_digest(peer)
        self.contents: Set[Content] = set()
        self.candidates = 0
        self.weight = weight(peer)
        self.uses = 0


class Content(NamedTuple):
    """The identity of a class of peers: the pod peers and blocks that match it, and port names that rules use."""

    peers: FrozenSet[PeerEntry] = frozenset()
    blocks: FrozenSet[Block] = frozenset()
    ports: FrozenSet[ContainerPort] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.peers or self.blocks or self.ports)
