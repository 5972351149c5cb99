# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The limits of one policy: beyond them its grants are refused, so that no policy affects others.

The pods that it selects stay isolated, since the opposite would allow all traffic.
"""

from __future__ import annotations

from typing import Sequence

from . import limits
from .limits import PolicySide
from .matching.candidates import Candidates
from .matching.compiled import CompiledRule


def excess(key: PolicySide, rules: Sequence[CompiledRule], candidates: Candidates) -> str:
    """Return the limit that a policy exceeds in one direction, or an empty text."""
    peers = {peer for rule in rules for peer in rule.pods}
    if candidates.exceed(peers, limits.MOST_CANDIDATES):
        return f"{len(peers)} selectors that are compared with more than {limits.MOST_CANDIDATES} pods and namespaces"
    ports = sum(len(rule.ports.ranges) for rule in rules)
    if ports > limits.MOST_PORTS:
        return f"{ports} ranges of ports, more than {limits.MOST_PORTS}"
    names = sum(len(rule.names) for rule in rules)
    if names > limits.MOST_NAMES:
        return f"{names} names of ports, more than {limits.MOST_NAMES}"
    policy, direction = key
    resolved = candidates.names.of_rules(rules, direction, policy.namespace).ports
    if resolved > limits.MOST_PORTS:
        return f"names of ports that are {resolved} ports of pods, more than {limits.MOST_PORTS}"
    if _pieces(rules) > limits.MOST_PIECES:
        return f"overlapping ranges of addresses that make more than {limits.MOST_PIECES} pieces"
    chosen = sum(bool(rule.pods or rule.blocks) for rule in rules)
    if chosen > limits.MOST_RULES:
        return f"{chosen} rules with different ports, more than {limits.MOST_RULES}"
    return ""


def _pieces(rules: Sequence[CompiledRule]) -> int:
    """Return the number of pieces into which the ranges divide each other, counted for each rule that has them."""
    bounds: list[tuple[int, int]] = []
    for rule in rules:
        for block in rule.blocks:
            # Keep the families apart: IPv6 is counted above all numbers of IPv4.
            base = 0 if block.family == "IPv4" else 1 << 129
            for first, last in block.intervals:
                bounds += [(base + first, 1), (base + last + 1, -1)]
    bounds.sort()
    total = active = 0
    for _at, step in bounds:
        total += active
        active += step
    return total
