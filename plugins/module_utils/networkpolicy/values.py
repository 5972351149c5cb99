# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The port sets and outcomes in use, as rows; both families share them."""

from __future__ import annotations

from typing import Iterator

from ..cluster.policies.policy_model import ACCEPT, DENY
from .limits import PER_STEP
from .matching.ports import Grant, PortSet, TierOutcome
from .numbers import IdAllocator, value_digest
from .rows import EVERYTHING_ID, PORTS, TIER_OTHERS, TIER_PORTS, PolicyRows, Row


class GrantValues:
    """Numbers of port sets and outcomes, and the rows with their content."""

    def __init__(self, rows: PolicyRows) -> None:
        self._rows = rows
        self._numbers: IdAllocator[Grant] = IdAllocator(value_digest, high=True)
        # Comparing large values again for each class would take longer than everything else.
        self._by_identity: dict[int, int] = {}

    def acquire(self, value: Grant) -> int:
        """Return the number of a port set or outcome, and count one more use. Raises TooManyRows."""
        if isinstance(value, PortSet) and value.everything:
            return EVERYTHING_ID
        known = self._by_identity.get(id(value))
        if known is not None:
            self._numbers.acquire_again(known)
            return known
        if isinstance(value, PortSet):
            self._rows.spend(len(value.ranges) // PER_STEP)
        number = self._numbers.acquire(value)
        if self._numbers.is_new(number):
            self._by_identity[id(value)] = number
            for row in _rows_of(number, value):
                self._rows.put(row)
        return number

    def release(self, number: int) -> None:
        """Drop one use of a number."""
        if number == EVERYTHING_ID:
            return
        value = self._numbers.values[number]
        if self._numbers.release(number):
            del self._by_identity[id(value)]
            for row in _rows_of(number, value):
                self._rows.remove(row)

    def value(self, number: int) -> Grant:
        """Return the port set or outcome of a number in use."""
        return PortSet((), True) if number == EVERYTHING_ID else self._numbers.values[number]


def _rows_of(number: int, value: Grant) -> Iterator[Row]:
    if isinstance(value, TierOutcome):
        for action, ranges in ((ACCEPT, value.accepted), (DENY, value.denied)):
            yield from ((TIER_PORTS, action, number, *part) for part in ranges)
        if value.others:
            yield (TIER_OTHERS, value.others, number)
    else:
        yield from ((PORTS, number, *part) for part in value.ranges)
