# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sets of ports: protocols and ranges of destination ports, merged so that equal sets are equal values."""

from __future__ import annotations

from typing import Iterable, NamedTuple, Sequence, Union

from ...cluster.policies.policy_model import ACCEPT, DENY

PROTOCOL_NUMBERS = {"TCP": 6, "UDP": 17, "SCTP": 132}
PROTOCOL_NAMES = {number: name for name, number in PROTOCOL_NUMBERS.items()}
LAST_PORT = 65535
#: The maximum number of ranges in a set: every other port of each protocol.
MOST_RANGES = len(PROTOCOL_NUMBERS) * (LAST_PORT + 1) // 2

#: Protocol number, first and last port.
Range = tuple[int, int, int]


class PortSet(NamedTuple):
    """Ranges that neither overlap nor touch, in order; ``everything``: every packet, whatever its protocol."""

    ranges: tuple[Range, ...] = ()
    everything: bool = False

    def __bool__(self) -> bool:
        return self.everything or bool(self.ranges)

    def contains(self, protocol: int, port: int) -> bool:
        """Return whether a packet is in the set. ``port`` is ignored for protocols without ports."""
        return self.everything or any(
            number == protocol and first <= port <= last for number, first, last in self.ranges
        )

    def __str__(self) -> str:
        if self.everything:
            return "everything"
        return ", ".join(
            f"{first}{f'-{last}' if last != first else ''}/{PROTOCOL_NAMES[number]}"
            for number, first, last in self.ranges
        )


NOTHING = PortSet()
EVERYTHING = PortSet((), True)


def union(ranges: Iterable[Range]) -> PortSet:
    """Return the set of all ports in the ranges."""
    ordered = sorted(ranges)
    merged: list[Range] = []
    for part in ordered:
        number, first, last = part
        if merged and merged[-1][0] == number and merged[-1][2] >= first - 1:
            if last > merged[-1][2]:
                merged[-1] = (number, merged[-1][1], last)
        else:
            # The same object, of which a union often has thousands.
            merged.append(part)
    return PortSet(tuple(merged))


class TierOutcome(NamedTuple):
    """The decision of the rules of one tier: ports accepted and denied; all others are passed to the next tier.

    ``others``: the action for protocols without ports, empty to pass.
    """

    accepted: tuple[Range, ...] = ()
    denied: tuple[Range, ...] = ()
    others: str = ""

    def __bool__(self) -> bool:
        return bool(self.accepted or self.denied or self.others)

    def action(self, protocol: int, port: int) -> str:
        """Return Accept or Deny for a packet, or an empty text to pass it to the next tier."""
        if protocol not in PROTOCOL_NAMES:
            return self.others
        for action, ranges in ((DENY, self.denied), (ACCEPT, self.accepted)):
            if PortSet(ranges).contains(protocol, port):
                return action
        return ""


#: What a rule set grants to a peer: the ports of NetworkPolicies, or the decision of a tier of cluster policies.
Grant = Union[PortSet, TierOutcome]


def first_match(rules: Sequence[tuple[str, PortSet]]) -> TierOutcome:
    """Return the decision of rules, (action, ports) in order: for each port the first rule that contains it."""
    found: dict[str, list[Range]] = {ACCEPT: [], DENY: []}
    for number in PROTOCOL_NAMES:
        undecided: list[tuple[int, int]] = [(0, LAST_PORT)]
        for action, ports in rules:
            if not undecided:
                break
            own = (
                [(0, LAST_PORT)]
                if ports.everything
                else [(first, last) for proto, first, last in ports.ranges if proto == number]
            )
            if own:
                taken, undecided = _divided(undecided, own)
                if action in found:
                    found[action] += [(number, first, last) for first, last in taken]
    others = next((action for action, ports in rules if ports.everything), "")
    return TierOutcome(union(found[ACCEPT]).ranges, union(found[DENY]).ranges, others if others in found else "")


def _divided(
    ranges: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the parts of ranges inside and outside the wanted ones; all are sorted and do not overlap."""
    inside: list[tuple[int, int]] = []
    outside: list[tuple[int, int]] = []
    place = 0
    for first, last in ranges:
        position = first
        while place < len(wanted) and wanted[place][0] <= last:
            low, high = wanted[place]
            if high >= position:
                if low > position:
                    outside.append((position, low - 1))
                inside.append((max(low, position), min(high, last)))
                position = min(high, last) + 1
            if high > last:
                # It may also contain the beginning of the next range.
                break
            place += 1
        if position <= last:
            outside.append((position, last))
    return inside, outside
