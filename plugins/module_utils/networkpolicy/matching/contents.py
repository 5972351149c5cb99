# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What matches each pod; pods that the same peers match share one object, since a cluster has thousands of them."""

from __future__ import annotations

import builtins
from typing import NamedTuple, Optional

from ...cluster.model import NamespacedName
from ..limits import TooManyRows
from .compiled import Content, PeerEntry

_NOTHING = Content()


class _Group(NamedTuple):
    """A content and the pods that have it."""

    content: Content
    pods: set[NamespacedName]


class PodContents:
    """The content of each pod, without blocks. ``most``: the maximum number of pairs of a peer and a pod it matches."""

    def __init__(self, most: Optional[int] = None) -> None:
        self._most = most
        self._matches = 0
        self._of_pod: dict[NamespacedName, Content] = {}
        self._groups: dict[Content, _Group] = {}

    def of(self, key: NamespacedName) -> Content:
        """Return the content of a pod."""
        return self._of_pod.get(key, _NOTHING)

    def members(self, entry: PeerEntry) -> builtins.set[NamespacedName]:
        """Return the pods that a peer matches."""
        return {key for content in entry.contents for key in self._groups[content].pods}

    def set(self, key: NamespacedName, content: Content) -> None:
        """Set the content of a pod. Raises TooManyRows."""
        before = self._of_pod.pop(key, _NOTHING)
        self._matches += len(content.peers) - len(before.peers)
        if self._most is not None and self._matches > self._most:
            raise TooManyRows
        if content:
            group = self._groups.get(content)
            if group is None:
                group = self._groups[content] = _Group(content, set())
                for entry in content.peers:
                    entry.contents.add(content)
            group.pods.add(key)
            self._of_pod[key] = group.content
        if before and before != content:
            self._leave(key, before)

    def _leave(self, key: NamespacedName, content: Content) -> None:
        pods = self._groups[content].pods
        pods.remove(key)
        if not pods:
            del self._groups[content]
            for entry in content.peers:
                entry.contents.remove(content)
