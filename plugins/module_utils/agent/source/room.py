# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How much of the cluster may be held, in bytes of JSON with only what the agent reads."""

from __future__ import annotations

from ...errors import ApiError


class NoRoom(ApiError):
    """A list of the API server is larger than what may be held."""


class Room:
    """Room without a limit; see :class:`.memory.MemoryBudget`. Any thread may call the methods."""

    def carries(self, more: int) -> bool:
        """Return whether so many bytes may be held beside what is known and what lists in progress add to it."""
        return True

    def admit(self, kind: str, growth: int) -> None:
        """Let a list of this kind be held that adds so many bytes to what is known so far. Raises NoRoom."""

    def admitted(self, kind: str) -> None:
        """Record that a list of this kind is complete."""

    def applied(self, kind: str, growth: int) -> None:
        """Record that so many of the bytes that a list adds are known now."""

    def release(self, kind: str) -> None:
        """Record that nothing of a list of this kind is held any more beside what is known."""


UNLIMITED = Room()
