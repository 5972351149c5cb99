# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The address space of one family, divided where ranges in use begin or end, and the ranges that contain each piece."""

from __future__ import annotations

from bisect import bisect_right
from typing import AbstractSet, Iterable, Iterator, NamedTuple, Optional, Sequence

from ..limits import TooManyRows
from .compiled import Block, Interval

_NONE: frozenset[Block] = frozenset()


class Piece(NamedTuple):
    """Addresses from ``first`` to ``last`` and the blocks that contain all of them; at least one."""

    first: int
    last: int
    blocks: frozenset[Block]


def pieces_of(blocks: Iterable[Block], most: Optional[int] = None) -> list[Piece]:
    """Return the pieces covered by any block, in order; adjacent pieces have different blocks.

    Raises TooManyRows if there are more than ``most``, each counted once for every block that contains it.
    """
    events: list[tuple[int, bool, Block]] = []
    for block in blocks:
        for first, last in block.intervals:
            events += [(first, True, block), (last + 1, False, block)]
    events.sort(key=lambda event: event[0])
    active: dict[Block, None] = {}
    known: dict[frozenset[Block], frozenset[Block]] = {}
    found: list[Piece] = []
    position = index = total = 0
    while index < len(events):
        at = events[index][0]
        if active and at > position:
            now = frozenset(active)
            now = known.setdefault(now, now)
            total += len(now)
            if most is not None and total > most:
                raise TooManyRows
            if found and found[-1].last == position - 1 and found[-1].blocks == now:
                found[-1] = found[-1]._replace(last=at - 1)
            else:
                found.append(Piece(position, at - 1, now))
        while index < len(events) and events[index][0] == at:
            _at, begins, block = events[index]
            if begins:
                active[block] = None
            else:
                active.pop(block, None)
            index += 1
        position = at
    return found


def changed_ranges(before: Sequence[Piece], now: Sequence[Piece]) -> Iterator[Interval]:
    """Yield the ranges of addresses, in order, that other blocks contain now than before."""
    sides = (before, now)
    places = [0, 0]
    position = 0
    while any(place < len(pieces) for place, pieces in zip(places, sides)):
        nearest = [pieces[place] if place < len(pieces) else None for place, pieces in zip(places, sides)]
        position = min(max(piece.first, position) for piece in nearest if piece is not None)
        inside = [piece if piece is not None and piece.first <= position else None for piece in nearest]
        end = min(
            piece.last if piece is within else piece.first - 1
            for piece, within in zip(nearest, inside)
            if piece is not None
        )
        blocks = [_NONE if piece is None else piece.blocks for piece in inside]
        if blocks[0] != blocks[1]:
            yield position, end
        for side, piece in enumerate(inside):
            if piece is not None and piece.last == end:
                places[side] += 1
        position = end + 1


class AddressSpace:
    """The pieces of one family, with a search by address. ``most``: see :func:`pieces_of`."""

    def __init__(self, most: Optional[int] = None) -> None:
        self._most = most
        self.pieces: list[Piece] = []
        self._starts: list[int] = []

    def divide(self, blocks: AbstractSet[Block]) -> None:
        """Replace the pieces by those of other blocks. Raises TooManyRows."""
        self.pieces = pieces_of(blocks, self._most)
        self._starts = [piece.first for piece in self.pieces]

    def piece_at(self, address: int) -> Optional[Piece]:
        """Return the piece that contains an address, None if no block does."""
        position = bisect_right(self._starts, address) - 1
        if position < 0 or self.pieces[position].last < address:
            return None
        return self.pieces[position]

    def blocks_at(self, address: int) -> frozenset[Block]:
        """Return the blocks that contain an address."""
        piece = self.piece_at(address)
        return _NONE if piece is None else piece.blocks
