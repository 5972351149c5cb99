# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limit of the size of the cluster's objects, in bytes of JSON with only what the agent reads."""

from __future__ import annotations

from ...base.errors import ApiError

#: Which share of the reserve the objects of a kind may use. They are held back last, because without them traffic is
#: allowed that should be denied. Policies, which tenants create, must leave room for the pods that they select.
RESERVED_FOR = {"NetworkPolicy": 0.5, "ClusterNetworkPolicy": 0.5, "Namespace": 1.0}
#: The share for what is in force already or must be: pods of the own node, and a copy of what had room before.
WHOLE_RESERVE = 1.0


class NoRoom(ApiError):
    """A list of the API server does not fit."""


class Room:
    """Room without a limit; see :class:`.memory.MemoryBudget`. Any thread may call the methods."""

    def carries(self, more: int, reserve: float = 0.0) -> bool:
        """Return whether ``more`` bytes fit beside known objects and lists in progress.

        ``reserve``: the share of the reserved room that they may use.
        """
        return True

    def shares(self, excess: int, more: int = 0) -> bool:
        """Return whether a namespace may take ``excess`` bytes beyond what its objects suggest.

        ``more``: how many of these are not known yet.
        """
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
