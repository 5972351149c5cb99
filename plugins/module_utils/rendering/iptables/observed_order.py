# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep the rules of different Services in the order in which they were observed.

kube-proxy does not order the rules of its shared chains, so their order differs from sync to sync. Ours is that of the
Services' names. The order of rules that match different packets has no effect, so a chain that holds exactly the
desired rules in another order is left unchanged: a node that kube-proxy has programmed is adopted unchanged.
"""

from __future__ import annotations

from typing import Any, Mapping

from .fixed import NODE_PORTS, SHARED_CHAINS
from .tables import Rules

_TO_NODE_PORTS = f"-j {NODE_PORTS.chain}"


def _match(rule: str) -> str:
    """Return the match of a rule: its text up to the target, without the comment."""
    match = rule.rpartition(" -j ")[0]
    start = match.find('-m comment --comment "')
    if start < 0:
        return match
    end = match.find('"', start + len('-m comment --comment "'))
    return match[:start] + match[end + 2 :]


def _tail(rules: Rules) -> Rules:
    """Return the last rules, which send the remaining traffic to the node ports; their matches overlap with others."""
    first = len(rules)
    while first and rules[first - 1].endswith(_TO_NODE_PORTS):
        first -= 1
    return rules[first:]


def _same_in_any_order(found: Rules, wanted: Rules) -> bool:
    if len(found) != len(wanted) or _tail(found) != _tail(wanted) or sorted(found) != sorted(wanted):
        return False
    matches = [_match(rule) for rule in wanted]
    return len(set(matches)) == len(matches)


def in_observed_order(desired: Mapping[Any, Any], observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the desired table of chains, with the observed value of shared chains that differ in order only.

    Two rules that match the same packets (two Services that claim one address) are never left in another order.
    """
    kept: dict[Any, Any] = {}
    for key in SHARED_CHAINS:
        found, wanted = observed.get(key), desired.get(key)
        if not isinstance(found, tuple) or not isinstance(wanted, tuple) or found == wanted:
            continue
        if _same_in_any_order(found, wanted):
            kept[key] = found
    return {**desired, **kept} if kept else desired
