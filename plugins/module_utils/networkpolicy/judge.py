# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Evaluation of connections by the rows of a node's policies, as the kernel's table does for their first packets."""

from __future__ import annotations

from typing import Callable, Optional

from ..cluster.policies.policy_model import ACCEPT, ADMIN, BASELINE, DENY
from .address_ranges import AddressRanges
from .family_tables import FamilyTables
from .matching.owners import Address
from .matching.ports import EVERYTHING, PortSet, TierOutcome
from .rows import ANY, BLOCK, CLASS, EVERYTHING_ID, GRANT, ISOLATED, NO_CLASS, POLICED, TIER_GRANT, PolicyRows

#: From the number of a port set or outcome to its content.
ValueOf = Callable[[int], object]


class Judge:
    """Evaluates connections by rows.

    ``value_of`` returns the content of port sets and outcomes by number. ``egress_exempt``: the destinations to which
    no egress rule is applied.
    """

    def __init__(
        self,
        rows: PolicyRows,
        families: Callable[[Address], FamilyTables],
        value_of: ValueOf,
        egress_exempt: AddressRanges,
    ) -> None:
        self._rows = rows.rows
        self._families = families
        self._value_of = value_of
        self._egress_exempt = egress_exempt

    def is_policed(self, address: Address) -> bool:
        """Return whether any policy selects the pod of this node that has an address."""
        return any((POLICED, side, address) in self._rows for side in ("in", "out"))

    def allows(self, source: Address, destination: Address, protocol: int, port: int) -> bool:
        """Return whether a connection may be opened. ``protocol``: its number; ``port``: 0 without ports."""
        return self._side_allows("out", source, destination, protocol, port) and self._side_allows(
            "in", destination, source, protocol, port
        )

    def class_of(self, address: Address) -> int:
        """Return the class of a peer, NO_CLASS if it has none."""
        number = self._rows.get((CLASS, address))
        return self.class_of_block(address) if number is None else int(number)

    def class_of_block(self, address: Address) -> int:
        """Return the class that a peer has by its address alone, also if it is a pod."""
        piece = self._families(address).space.piece_at(int.from_bytes(address, "big"))
        if piece is None:
            return NO_CLASS
        size = len(address)
        row = (BLOCK, piece.first.to_bytes(size, "big"), piece.last.to_bytes(size, "big"))
        return int(self._rows.get(row, NO_CLASS))

    def _side_allows(self, side: str, own: Address, peer: Address, protocol: int, port: int) -> bool:
        if (POLICED, side, own) not in self._rows or (side == "out" and self._egress_exempt.contain(peer)):
            return True
        number = self.class_of(peer)
        action = self._outcome(ADMIN, side, number=number, own=own, protocol=protocol, port=port)
        if action:
            return action == ACCEPT
        if (ISOLATED, side, own) in self._rows:
            grants = ((ANY, side, own), (GRANT, side, number, own))
            return own == peer or any(self._set_contains(self._rows.get(row), protocol, port) for row in grants)
        return self._outcome(BASELINE, side, number=number, own=own, protocol=protocol, port=port) != DENY

    def _set_contains(self, number: Optional[int], protocol: int, port: int) -> bool:
        if number is None:
            return False
        ports = EVERYTHING if number == EVERYTHING_ID else self._value_of(number)
        return isinstance(ports, PortSet) and ports.contains(protocol, port)

    def _outcome(self, tier: str, side: str, *, number: int, own: Address, protocol: int, port: int) -> str:
        found = self._rows.get((TIER_GRANT, tier, side, number, own))
        outcome = self._value_of(found) if found is not None else None
        return outcome.action(protocol, port) if isinstance(outcome, TierOutcome) else ""
