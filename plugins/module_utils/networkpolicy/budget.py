# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The order in which policies are refused if all of them together need more elements than the table may have.

The ranges and selectors of all policies divide the addresses of the cluster into classes, and each pod has an element
for every class to which its policies grant something: the number is a product, to which many small policies contribute.
So namespaces are ordered by the need of their own policies alone, and a namespace with one large policy, or with many
similar ones, does not lose anything to one whose policies multiply.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple, Tuple

from ..cluster.model import NamespacedName
from ..cluster.policy_model import DIRECTIONS, NetworkPolicy, Pod
from ..cluster.policy_objects import PolicyObjects
from .limits import MOST_MATCHES, excess
from .matching.compiled import CompiledRule, compile_rules
from .matching.owners import addresses_of, counts

#: A policy and one of its directions.
PolicySide = Tuple[NamespacedName, str]
#: More independent rules result in more classes than any table can hold.
_MOST_RULES = 40


class _Need(NamedTuple):
    """The numbers that determine how many elements and matches rules need.

    ``rules``: those with peers; ``ends``: of ranges of addresses; ``peers``: selectors of pods; ``ports``: ranges.
    """

    rules: int
    ends: int
    peers: int
    ports: int
    addresses: int

    def elements(self, pods: int) -> int:
        """Return the maximum number of elements and matches if no other rules exist. ``pods``: of the cluster."""
        classes = min(1 << min(self.rules, _MOST_RULES), self.ends + (pods if self.peers else 0))
        return classes * (self.addresses + self.ports) + self.ends + self.peers * pods


def _need(rules: Iterable[CompiledRule], addresses: int) -> _Need:
    chosen = [rule for rule in rules if rule.pods or rule.blocks]
    return _Need(
        rules=len(chosen),
        ends=sum(2 * len(block.intervals) for rule in chosen for block in rule.blocks),
        peers=sum(len(rule.pods) for rule in chosen),
        ports=sum(len(rule.ports.ranges) for rule in chosen),
        addresses=addresses,
    )


def _together(needs: Iterable[_Need]) -> _Need:
    found = list(needs)
    return _Need(
        rules=sum(need.rules for need in found),
        ends=sum(need.ends for need in found),
        peers=sum(need.peers for need in found),
        ports=sum(need.ports for need in found),
        addresses=max(need.addresses for need in found),
    )


def order_of_refusal(objects: PolicyObjects, node_name: str) -> List[PolicySide]:
    """Return the NetworkPolicies that select pods of a node, by direction; the first is refused first."""
    local: Dict[str, List[Pod]] = {}
    for pod in objects.pods.values():
        if pod.node_name == node_name and counts(pod):
            local.setdefault(pod.namespace, []).append(pod)
    needs: Dict[str, Dict[PolicySide, _Need]] = {}
    for key, policy in objects.policies.items():
        addresses = sum(len(addresses_of(pod)) for pod in _selected(policy, local.get(key.namespace, [])))
        for direction in DIRECTIONS if addresses else ():
            rules = compile_rules(policy.rules(direction)) if direction in policy.directions else ()
            # A policy that is too large by itself is refused anyway.
            if rules and not excess(rules):
                needs.setdefault(key.namespace, {})[key, direction] = _need(rules, addresses)
    pods = len(objects.pods)
    namespaces = sorted(needs, key=lambda name: (-_together(needs[name].values()).elements(pods), name))
    return [
        item
        for name in namespaces
        for item in sorted(needs[name], key=lambda each: (-needs[name][each].elements(pods), each))
    ]


def _selected(policy: NetworkPolicy, pods: Iterable[Pod]) -> List[Pod]:
    return [pod for pod in pods if policy.pods.matches(pod.labels)]


def named(refused: Iterable[PolicySide], most: int) -> Dict[PolicySide, str]:
    """Return the reason for each policy refused because of what all policies together need."""
    reason = f"a part in more than {most} elements or {MOST_MATCHES} pods matched that all policies together would need"
    return dict.fromkeys(refused, reason)
