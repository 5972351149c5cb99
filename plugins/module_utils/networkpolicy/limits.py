# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of one policy: beyond them its grants are refused, so that no policy affects others.

The pods that it selects stay isolated, since the opposite would allow all traffic.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

from ..cluster.model import NamespacedName
from .matching.candidates import Candidates
from .matching.compiled import CompiledRule

#: A policy and one of its directions.
PolicySide = Tuple[NamespacedName, str]
#: Address ranges, counted once for every rule whose ranges contain them; of one policy, and of all together.
MOST_PIECES = 1_000_000
#: Rules for some peers, with different ports. Each may make a class of peers, for which every selected pod of the node
#: has an entry.
MOST_RULES = 1_000
#: Port ranges of all rules; and the ports that their names resolve to, in all different port layouts of pods.
MOST_PORTS = 100_000
#: Names of ports, counted once for every rule that uses them.
MOST_NAMES = 1_000
#: Pods and namespaces that the selectors of a policy are compared with, counted once for every condition of every
#: selector (see :class:`.Candidates`): each comparison takes a microsecond or two.
MOST_CANDIDATES = 500_000
#: The same for the different selectors of all policies, and for the pods that match them.
MOST_CANDIDATES_TOGETHER = 1_000_000
#: Steps of one update that evaluate what subjects grant to classes of peers, each below a microsecond.
MOST_STEPS = 2_000_000
#: Ranges that are only compared, or rules that are only collected, in one step.
PER_STEP = 8
#: Rules, peers, names and own ports of the subjects of all pods of the node, each a fraction of a kilobyte.
MOST_KEPT = 300_000
#: Entries of the table, as those of Services in ``cluster.account``, that depend on the content of policies; of all
#: policies together.
MOST_ROWS = 250_000


def excess(key: PolicySide, rules: Sequence[CompiledRule], candidates: Candidates) -> str:
    """Return the limit that a policy exceeds in one direction, or an empty text."""
    peers = {peer for rule in rules for peer in rule.pods}
    if candidates.exceed(peers, MOST_CANDIDATES):
        return f"{len(peers)} selectors that are compared with more than {MOST_CANDIDATES} pods and namespaces"
    ports = sum(len(rule.ports.ranges) for rule in rules)
    if ports > MOST_PORTS:
        return f"{ports} ranges of ports, more than {MOST_PORTS}"
    names = sum(len(rule.names) for rule in rules)
    if names > MOST_NAMES:
        return f"{names} names of ports, more than {MOST_NAMES}"
    policy, direction = key
    resolved = candidates.names.of_rules(rules, direction, policy.namespace).ports
    if resolved > MOST_PORTS:
        return f"names of ports that are {resolved} ports of pods, more than {MOST_PORTS}"
    if _pieces(rules) > MOST_PIECES:
        return f"overlapping ranges of addresses that make more than {MOST_PIECES} pieces"
    chosen = sum(bool(rule.pods or rule.blocks) for rule in rules)
    if chosen > MOST_RULES:
        return f"{chosen} rules with different ports, more than {MOST_RULES}"
    return ""


def _pieces(rules: Sequence[CompiledRule]) -> int:
    """Return the number of pieces into which the ranges divide each other, counted for each rule that has them."""
    bounds: List[Tuple[int, int]] = []
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
