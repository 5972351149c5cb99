# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which connections a change of a node's rows may have revoked: only these must be evaluated again."""

from __future__ import annotations

from typing import AbstractSet, Any, Mapping

from ..resources import ABSENT
from .matching.owners import Address
from .node_policy import NodePolicy
from .rows import ANY, CLASS, EVERYTHING_ID, GRANT, ISOLATED, NO_CLASS, POLICED, TIER_GRANT, Row

_SIDES = ("in", "out")


def revoked(policy: NodePolicy, journal: Mapping[Row, Any], tiers: bool) -> AbstractSet[Address]:
    """Return the addresses of which connections may not be allowed any more: of pods of this node, or of their peers.

    ``policy``: with the rows as they are now; ``journal``: the changed rows with their values before. ``tiers``:
    cluster policies are enforced, which may deny what no row of a NetworkPolicy did.

    A range of addresses needs no row of its own here: its class follows from the ranges of rules alone, so that with
    them the grants of their pods change.
    """
    return _Change(policy, journal, tiers).addresses()


class _Change:
    def __init__(self, policy: NodePolicy, journal: Mapping[Row, Any], tiers: bool) -> None:
        self._policy = policy
        self._rows = policy.table.rows
        self._journal = journal
        self._tiers = tiers

    def addresses(self) -> AbstractSet[Address]:
        """See :func:`revoked`."""
        found: set[Address] = set()
        peers: dict[tuple[int, int], set[Address]] = {}
        judge = self._policy.judge()
        for row, before in self._journal.items():
            is_new = before is ABSENT
            if row[0] == CLASS:
                earlier = judge.class_of_block(row[1]) if is_new else before
                peers.setdefault((earlier, judge.class_of(row[1])), set()).add(row[1])
            elif self._limits(row, is_new):
                found.add(row[-1])
        own = self._policy.policed() - found if peers else ()
        for (earlier, now), addresses in peers.items():
            # All connections of a pod in ``found`` are evaluated in any case.
            if self._tiers or any(self._lost(side, earlier, now, each) for each in own for side in _SIDES):
                found |= addresses
        return found

    def _limits(self, row: Row, is_new: bool) -> bool:
        """Return whether a changed row, whose last part is the address of a pod of this node, may deny it something."""
        kind = row[0]
        if kind in (ISOLATED, TIER_GRANT) or (kind == POLICED and is_new) or (kind in (ANY, GRANT) and not is_new):
            side = row[2] if kind == TIER_GRANT else row[1]
            return self._is_limited(side, row[-1])
        return False

    def _is_limited(self, side: str, own: Address) -> bool:
        """Return whether a pod may not exchange everything with everybody; one that is gone, or not selected, may."""
        if self._tiers:
            return (POLICED, side, own) in self._rows
        return (ISOLATED, side, own) in self._rows and self._rows.get((ANY, side, own)) != EVERYTHING_ID

    def _lost(self, side: str, earlier: int, now: int, own: Address) -> bool:
        """Return whether a pod may no longer exchange with a peer what it might before, because of the peer's class."""
        if earlier == NO_CLASS or not self._is_limited(side, own):
            return False
        row = (GRANT, side, earlier, own)
        before = self._journal.get(row, self._rows.get(row, ABSENT))
        return before is not ABSENT and before != self._rows.get((GRANT, side, now, own))
