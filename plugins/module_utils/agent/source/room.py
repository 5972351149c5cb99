# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limit of the size of the cluster's objects, in bytes of JSON with only what the agent reads."""

from __future__ import annotations

from ...errors import ApiError


class NoRoom(ApiError):
    """A list of the API server does not fit."""


class Room:
    """Room without a limit; see :class:`.memory.MemoryBudget`. Any thread may call the methods."""

    def carries(self, more: int) -> bool:
        """Return whether ``more`` bytes fit beside known objects and lists in progress."""
        return True

    def admit(self, kind: str, growth: int) -> None:
        """Reserve room for a list that adds ``growth`` bytes. Raises NoRoom."""

    def admitted(self, kind: str) -> None:
        """Record that a list of this kind is complete."""

    def applied(self, kind: str, growth: int) -> None:
        """Move ``growth`` bytes from the reservation to the known objects."""

    def release(self, kind: str) -> None:
        """Release what is left of the reservation for this kind."""


UNLIMITED = Room()
