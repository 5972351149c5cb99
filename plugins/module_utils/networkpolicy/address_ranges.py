# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ranges of addresses that the settings name: those of the node's pods, and destinations that are never judged.

A pod that is new on the node has its address before the API server knows it. Where traffic of unknown addresses is
denied, such a pod is isolated until then.
"""

from __future__ import annotations

from typing import Iterable, Mapping, Sequence

from ..base.addresses import FAMILIES, Network, address_bits
from ..cluster.policies.policy_model import Pod
from .matching.compiled import interval_of, merge
from .matching.owners import Address
from .rows import KNOWN, POD_RANGE, PolicyRows


class AddressRanges:
    """Ranges of both families, with a row of the given kind for each that remains after overlapping ones are merged."""

    def __init__(self, kind: str, ranges: Sequence[Network], rows: PolicyRows) -> None:
        self._ranges: list[tuple[Address, Address]] = []
        for family in FAMILIES:
            size = address_bits(family) // 8
            for ends in merge(interval_of(network) for network in ranges if network.family == family):
                first, last = (end.to_bytes(size, "big") for end in ends)
                self._ranges.append((first, last))
                rows.put((kind, first, last))

    def __bool__(self) -> bool:
        """Return whether there are any ranges."""
        return bool(self._ranges)

    def contain(self, address: Address) -> bool:
        """Return whether an address is in any of the ranges."""
        return any(len(first) == len(address) and first <= address <= last for first, last in self._ranges)


class PodRanges(AddressRanges):
    """Keeps the rows of the pod ranges, and of the addresses in them that known pods have."""

    def __init__(self, ranges: Sequence[Network], rows: PolicyRows) -> None:
        super().__init__(POD_RANGE, ranges, rows)
        self._rows = rows

    def follow(self, moved: Iterable[Address], owners: Mapping[Address, Pod]) -> None:
        """Bring the rows of addresses whose owner changed up to date."""
        for address in moved if self else ():
            if address in owners and self.contain(address):
                self._rows.put((KNOWN, address))
            else:
                self._rows.remove((KNOWN, address))
