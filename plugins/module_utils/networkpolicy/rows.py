# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rows that a node's policies amount to, with a record of what changed; independent of how they are programmed.

==================================================  ==================================================================
row                                                 value
==================================================  ==================================================================
``(ISOLATED, side, address)``                       True: a NetworkPolicy isolates this pod of the node
``(POLICED, side, address)``                        True: some policy, of whichever API, is about this pod
``(SELF, address)``                                 True: a pod of this node
``(CLASS, address)``                                class number of a pod of the cluster
``(BLOCK, first, last)``                            class number of a range of addresses that no pod entry refines
``(ANY, side, address)``                            port set that this pod may exchange with every peer
``(GRANT, side, class, address)``                   port set that this pod may exchange with peers of a class
``(PORTS, port set, protocol, first, last)``        True: the content of a port set other than EVERYTHING
``(TIER_GRANT, tier, side, class, address)``        outcome of a tier of cluster policies; class 0: any other peer
``(TIER_PORTS, action, outcome, protocol, ...)``    True: ports for which an outcome is Accept or Deny
``(TIER_OTHERS, action, outcome)``                  True: an outcome's action for protocols without ports
==================================================  ==================================================================

``side`` is ``in`` or ``out``; addresses are bytes in network order, with the length of their family.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple

ISOLATED, POLICED, SELF, CLASS, BLOCK = "isolated", "policed", "self", "class", "block"
ANY, GRANT, PORTS = "any", "grant", "ports"
TIER_GRANT, TIER_PORTS, TIER_OTHERS = "tier grant", "tier ports", "tier others"

#: Class numbers are below this bit; port sets and outcomes have it, so that one is never taken for the other.
PORT_SET_BIT = 1 << 31
#: The port set of rules without ports.
EVERYTHING_ID = PORT_SET_BIT | 1
#: The class of peers that are of no class.
NO_CLASS = 0

Row = Tuple[Any, ...]


class _Absent:
    """The value of a row that does not exist."""


ABSENT = _Absent()


class PolicyRows:
    """All rows. ``journal``: for each row that changed, its value before (ABSENT if it did not exist)."""

    def __init__(self) -> None:
        self.rows: Dict[Row, Any] = {}
        self.journal: Dict[Row, Any] = {}

    def put(self, row: Row, value: Any = True) -> None:
        """Add a row or replace its value."""
        before = self.rows.get(row, ABSENT)
        if before != value:
            self.journal.setdefault(row, before)
            self.rows[row] = value

    def remove(self, row: Row) -> None:
        """Remove a row if it exists."""
        before = self.rows.pop(row, ABSENT)
        if before is not ABSENT:
            self.journal.setdefault(row, before)

    def pop_journal(self) -> Dict[Row, Any]:
        """Return the rows that differ from their state at the last call, with the values of then."""
        journal, self.journal = self.journal, {}
        return {row: before for row, before in journal.items() if self.rows.get(row, ABSENT) != before}
