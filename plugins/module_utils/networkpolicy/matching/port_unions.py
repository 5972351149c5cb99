# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Unions of port sets, computed once for all subjects of a node, and port sets that exist only once."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from .ports import EVERYTHING, NOTHING, PortSet, Range, union

#: Ranges, of all remembered unions of a node together.
MOST_KNOWN_RANGES = 200_000


class _Known(NamedTuple):
    """A union, and its parts, which are kept because they are compared by identity."""

    parts: tuple[PortSet, ...]
    union: PortSet


class _Shared(NamedTuple):
    """A port set in use, and the number of uses."""

    ports: PortSet
    uses: int


class PortUnions:
    """Computes unions of port sets.

    ``ranges``: those of the unions that are remembered; ``steps``: those that were read so far to compute unions.
    """

    def __init__(self) -> None:
        self.ranges = self.steps = 0
        self._known: dict[tuple[frozenset[int], frozenset[Range]], _Known] = {}
        self._shared: dict[PortSet, _Shared] = {}

    def of(self, parts: Sequence[PortSet], ranges: Sequence[Range] = ()) -> PortSet:
        """Return the union of port sets and of a few further ranges, without a copy if possible."""
        if len(parts) < 2 and not ranges:
            return parts[0] if parts else NOTHING
        if any(part.everything for part in parts):
            return EVERYTHING
        key = frozenset(map(id, parts)), frozenset(ranges)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._computed(tuple(parts), ranges)
        return known.union

    def _computed(self, parts: tuple[PortSet, ...], ranges: Sequence[Range]) -> _Known:
        found = union([*ranges, *(each for part in parts for each in part.ranges)])
        self.steps += len(ranges) + sum(len(part.ranges) for part in parts)
        if self.ranges > MOST_KNOWN_RANGES:
            # Those of classes that are gone are never removed one by one.
            self._known.clear()
            self.ranges = 0
        self.ranges += len(parts) + len(ranges) + len(found.ranges)
        return _Known(parts, found)

    def acquire(self, ports: PortSet) -> PortSet:
        """Return the object that all users of an equal port set share, and count one more use."""
        shared = self._shared.get(ports, _Shared(ports, 0))
        self._shared[shared.ports] = shared._replace(uses=shared.uses + 1)
        return shared.ports

    def release(self, ports: PortSet) -> None:
        """Drop one use of a port set."""
        shared = self._shared[ports]
        if shared.uses == 1:
            del self._shared[ports]
        else:
            self._shared[ports] = shared._replace(uses=shared.uses - 1)
