# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rows that a node's policies evaluate to, with a journal of changes; independent of how they are programmed.

==================================================  ==================================================================
row                                                 value
==================================================  ==================================================================
``(ISOLATED, side, address)``                       True: a NetworkPolicy isolates this pod of the node
``(POLICED, side, address)``                        True: some policy, of either API, selects this pod
``(SELF, address)``                                 True: a pod of this node
``(POD_RANGE, first, last)``                        True: a range of addresses of the node's pods
``(KNOWN, address)``                                True: a known pod has this address of such a range
``(EGRESS_EXEMPT, first, last)``                         True: a range of destinations that no egress rule is applied to
``(LINK, side, interface)``                         True: link-local traffic of pods on this interface is denied
``(POD_LINK, interface)``                           True: it leads to pods of this node, whose sources are checked
``(BOUND, interface, address)``                     True: this address is reached through it
``(HERE, address)``                                 True: an address that is reached through an interface of pods
``(BRIDGED,)``                                       True: pods of this node are on bridges whose ports are checked
``(PORT, interface)``                               True: a port of such a bridge
``(PORT_UNTAGGED, interface)``                      True: no frame with a VLAN tag may come from this port
``(PORT_BOUND, interface, address)``                True: a pod behind this port has this address
``(PORT_CLOSED, interface, family)``                True: pods behind this port may send from no other address
``(EXEMPT_LINK, interface)``                        True: pods on it may send from exempt addresses
``(EXEMPT, first, last)``                           True: a range of these
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

from typing import Any, Optional

from ..base.progress import Progress, unheeded
from ..resources import ABSENT
from .limits import MOST_STEPS, TooManyRows

ISOLATED, POLICED, SELF, CLASS, BLOCK = "isolated", "policed", "self", "class", "block"
POD_RANGE, KNOWN, EGRESS_EXEMPT = "pod range", "known", "egress-exempt"
LINK = "link"
POD_LINK, BOUND, HERE = "pod link", "bound", "here"
BRIDGED, PORT, PORT_UNTAGGED = "bridged", "port", "port untagged"
PORT_BOUND, PORT_CLOSED = "port bound", "port closed"
EXEMPT_LINK, EXEMPT = "exempt link", "exempt"
ANY, GRANT, PORTS = "any", "grant", "ports"
TIER_GRANT, TIER_PORTS, TIER_OTHERS = "tier grant", "tier ports", "tier others"

#: Class numbers are below this bit; port sets and outcomes have it, so that they cannot be confused.
PORT_SET_BIT = 1 << 31
#: The port set of rules without ports.
EVERYTHING_ID = PORT_SET_BIT | 1
#: The class of peers that match no class.
NO_CLASS = 0

Row = tuple[Any, ...]

#: Rows whose number depends on the content of policies, and not only on the pods of the node and the cluster.
_BOUNDED = frozenset((BLOCK, ANY, GRANT, PORTS, TIER_GRANT, TIER_PORTS))


class PolicyRows:
    """All rows. ``journal``: for each row that changed, its value before (ABSENT if it did not exist).

    ``most``: the maximum number of rows that depend on the content of policies; None for any number. ``steps``: those
    taken to evaluate grants; the caller sets it to 0. ``progress`` is called between them.
    """

    def __init__(self, most: Optional[int] = None, progress: Progress = unheeded) -> None:
        self.rows: dict[Row, Any] = {}
        self.journal: dict[Row, Any] = {}
        self.steps = 0
        self._left = most
        self._progress = progress

    def allow(self, more: int) -> None:
        """Raise the maximum number of rows."""
        if self._left is not None:
            self._left += more

    def spend(self, steps: int) -> None:
        """Count steps that the evaluation of a grant took, and report progress. Raises TooManyRows."""
        self._progress()
        self.steps += steps
        if self._left is not None and self.steps > MOST_STEPS:
            raise TooManyRows

    def put(self, row: Row, value: Any = True) -> None:
        """Add a row or replace its value. Raises TooManyRows."""
        before = self.rows.get(row, ABSENT)
        if before != value:
            if self._left is not None and before is ABSENT and row[0] in _BOUNDED:
                if not self._left:
                    raise TooManyRows
                self._left -= 1
            self.journal.setdefault(row, before)
            self.rows[row] = value

    def remove(self, row: Row) -> None:
        """Remove a row if it exists."""
        before = self.rows.pop(row, ABSENT)
        if before is not ABSENT:
            self.journal.setdefault(row, before)
            if self._left is not None and row[0] in _BOUNDED:
                self._left += 1

    def succeed(self, earlier: PolicyRows) -> None:
        """Replace other rows: the journal becomes the difference from their state when it was last popped."""
        before = dict(earlier.rows)
        for row, value in earlier.journal.items():
            if value is ABSENT:
                before.pop(row, None)
            else:
                before[row] = value
        self.journal = {row: before.get(row, ABSENT) for row in (*before, *self.rows)}

    def pop_journal(self) -> dict[Row, Any]:
        """Return the rows that differ from their state at the last call, with their earlier values."""
        journal, self.journal = self.journal, {}
        return {row: before for row, before in journal.items() if self.rows.get(row, ABSENT) != before}
