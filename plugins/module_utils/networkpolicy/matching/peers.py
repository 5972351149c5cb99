# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pod peers in use, and the identity of classes of peers."""

from __future__ import annotations

from typing import FrozenSet, NamedTuple, Set

from ...cluster.policy_model import ContainerPort, PodPeer
from .compiled import Block, peer_digest


class PeerEntry:
    """A pod peer in use, compared by identity.

    ``contents``: those of the pods that it matches. ``candidates``: how many objects its selectors may match, counted
    when it came into use (see :class:`.Candidates`).
    """

    __slots__ = ("candidates", "contents", "digest", "peer", "uses")

    def __init__(self, peer: PodPeer) -> None:
        self.peer = peer
        self.digest = peer_digest(peer)
        self.contents: Set[Content] = set()
        self.candidates = 0
        self.uses = 0


class Content(NamedTuple):
    """The identity of a class of peers: the pod peers and blocks that match it, and port names that rules use."""

    peers: FrozenSet[PeerEntry] = frozenset()
    blocks: FrozenSet[Block] = frozenset()
    ports: FrozenSet[ContainerPort] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.peers or self.blocks or self.ports)
