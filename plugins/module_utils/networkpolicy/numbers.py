# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Numbers of classes, port sets and outcomes: hashes of their content, so that every run assigns the same ones."""

from __future__ import annotations

from typing import Callable, Generic, Hashable, TypeVar

from .matching.compiled import Content, digest
from .rows import EVERYTHING_ID, PORT_SET_BIT

Value = TypeVar("Value", bound=Hashable)


def content_digest(content: Content) -> bytes:
    """Return a hash of the meaning of a class."""
    parts = [
        sorted(entry.digest for entry in content.peers),
        sorted(block.digest for block in content.blocks),
        sorted(repr(tuple(port)).encode() for port in content.ports),
    ]
    return digest(*(b"".join(part) for part in parts))


def value_digest(value: Hashable) -> bytes:
    """Return a hash of a value that is identified by its text."""
    return digest(repr(value).encode())


class IdAllocator(Generic[Value]):
    """Reference-counted numbers of values. If two values have the same hash, the second gets the next free number.

    ``high``: numbers have the bit that separates port sets and outcomes from classes. ``touched``: numbers that were
    given to a value or became free; the caller empties it.
    """

    def __init__(self, hashed: Callable[[Value], bytes], high: bool) -> None:
        self.values: dict[int, Value] = {}
        self.touched: set[int] = set()
        self._numbers: dict[Value, int] = {}
        self._uses: dict[int, int] = {}
        self._hashed = hashed
        self._high = PORT_SET_BIT if high else 0

    def acquire(self, value: Value) -> int:
        """Return the number of a value, and count one more use."""
        number = self._numbers.get(value)
        if number is None:
            number = self._free(int.from_bytes(self._hashed(value)[:4], "big"))
            self._numbers[value] = number
            self.values[number] = value
            self._uses[number] = 0
            self.touched.add(number)
        self._uses[number] += 1
        return number

    def acquire_again(self, number: int) -> None:
        """Count one more use of a number in use."""
        self._uses[number] += 1

    def _free(self, start: int) -> int:
        low = start & (PORT_SET_BIT - 1)
        # 0 means no class, nft shows all ones as "root", and one number has a special meaning.
        while low in (0, PORT_SET_BIT - 1) or low | self._high in self.values or low | self._high == EVERYTHING_ID:
            low = (low + 1) & (PORT_SET_BIT - 1)
        return low | self._high

    def is_new(self, number: int) -> bool:
        """Return whether a number has just been acquired for the first time."""
        return self._uses[number] == 1

    def release(self, number: int) -> bool:
        """Drop one use of a number; return whether it was the last one, after which the number is free."""
        self._uses[number] -= 1
        if self._uses[number]:
            return False
        del self._numbers[self.values.pop(number)]
        del self._uses[number]
        self.touched.add(number)
        return True
