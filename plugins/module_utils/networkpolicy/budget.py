# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The policies that are refused if all of them together need too much, and their order.

The ranges and selectors of all policies divide the addresses of the cluster into classes, and each pod has an element
for every class to which its policies grant something: the number is a product, to which many small policies contribute.
So namespaces are ordered by the need of their own policies alone, and a namespace with one large policy, or with many
similar ones, does not lose anything to one whose policies multiply.
"""

from __future__ import annotations

from collections import Counter
from typing import AbstractSet, Dict, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from ..cluster.model import NamespacedName
from ..cluster.policy_model import DIRECTIONS, NetworkPolicy, Pod, PodPeer
from ..cluster.policy_objects import PolicyObjects
from .limits import MOST_CANDIDATES_TOGETHER, excess
from .matching.candidates import Candidates
from .matching.compiled import CompiledRule, compile_rules
from .matching.owners import addresses_of, counts

#: A policy and one of its directions.
PolicySide = Tuple[NamespacedName, str]
#: More independent rules result in more classes than any table can hold.
_MOST_RULES = 40


class _Need(NamedTuple):
    """The numbers that determine how many elements rules need: rules with peers, ends of ranges, ranges of ports."""

    rules: int
    ends: int
    selects_pods: bool
    ports: int
    addresses: int

    def elements(self, pods: int) -> int:
        """Return the maximum number of elements if no other rules exist. ``pods``: of the cluster."""
        classes = min(1 << min(self.rules, _MOST_RULES), self.ends + (pods if self.selects_pods else 0))
        return classes * (self.addresses + self.ports) + self.ends


def _need(rules: Iterable[CompiledRule], addresses: int) -> _Need:
    chosen = [rule for rule in rules if rule.pods or rule.blocks]
    return _Need(
        rules=len(chosen),
        ends=sum(2 * len(block.intervals) for rule in chosen for block in rule.blocks),
        selects_pods=any(rule.pods for rule in chosen),
        ports=sum(len(rule.ports.ranges) for rule in chosen),
        addresses=addresses,
    )


def _together(needs: Iterable[_Need]) -> _Need:
    found = list(needs)
    return _Need(
        rules=sum(need.rules for need in found),
        ends=sum(need.ends for need in found),
        selects_pods=any(need.selects_pods for need in found),
        ports=sum(need.ports for need in found),
        addresses=max(need.addresses for need in found),
    )


class _Side(NamedTuple):
    """A NetworkPolicy in one direction. ``addresses``: the number of those that its pods of the node have."""

    key: PolicySide
    rules: Tuple[CompiledRule, ...]
    addresses: int


class Demand:
    """What the NetworkPolicies that select pods of a node need, except those that are too large by themselves.

    ``only``: the policies to consider, by default all.
    """

    def __init__(
        self, objects: PolicyObjects, node_name: str, only: Optional[AbstractSet[NamespacedName]] = None
    ) -> None:
        pods = {key: pod for key, pod in objects.pods.items() if counts(pod)}
        of_namespace: Dict[str, List[NamespacedName]] = {}
        for key in pods:
            of_namespace.setdefault(key.namespace, []).append(key)
        self._candidates = Candidates(pods, of_namespace, objects.namespaces)
        self._pods = len(objects.pods)
        local: Dict[str, List[Pod]] = {}
        for pod in pods.values():
            if pod.node_name == node_name:
                local.setdefault(pod.namespace, []).append(pod)
        chosen = objects.policies.keys() if only is None else only & objects.policies.keys()
        self._sides = [side for key in chosen for side in self._of(objects.policies[key], local.get(key.namespace, []))]

    def _of(self, policy: NetworkPolicy, pods: Iterable[Pod]) -> Iterator[_Side]:
        addresses = sum(len(addresses_of(pod)) for pod in pods if policy.pods.matches(pod.labels))
        for direction in DIRECTIONS if addresses else ():
            rules = compile_rules(policy.rules(direction)) if direction in policy.directions else ()
            if rules and not excess(rules, self._candidates):
                yield _Side((policy.key, direction), rules, addresses)

    def order_of_refusal(self) -> List[PolicySide]:
        """Return the policies, by direction; the first is refused first."""
        needs: Dict[str, Dict[PolicySide, _Need]] = {}
        for side in self._sides:
            needs.setdefault(side.key[0].namespace, {})[side.key] = _need(side.rules, side.addresses)
        pods = self._pods
        namespaces = sorted(needs, key=lambda name: (-_together(needs[name].values()).elements(pods), name))
        return [
            item
            for name in namespaces
            for item in sorted(needs[name], key=lambda each: (-needs[name][each].elements(pods), each))
        ]

    def crowding(self, most: int) -> FrozenSet[PolicySide]:
        """Return the policies to refuse, by direction, so that those left have at most ``most`` candidates.

        Those of the namespace whose own selectors have most candidates are refused first.
        """
        peers: Dict[str, Dict[PolicySide, Set[PodPeer]]] = {}
        uses: Counter[PodPeer] = Counter()
        for side in self._sides:
            found = {peer for rule in side.rules for peer in rule.pods}
            peers.setdefault(side.key[0].namespace, {})[side.key] = found
            uses.update(found)
        sizes = {name: self._size(set().union(*own.values())) for name, own in peers.items()}
        left = self._size(uses)
        refused: Set[PolicySide] = set()
        for name in sorted(peers, key=lambda item: (-sizes[item], item)):
            own = peers[name]
            for key in sorted(own, key=lambda each: (-self._size(own[each]), each)):
                if left <= most:
                    return frozenset(refused)
                refused.add(key)
                uses.subtract(own[key])
                left -= self._size(peer for peer in own[key] if not uses[peer])
        return frozenset(refused)

    def _size(self, peers: Iterable[PodPeer]) -> int:
        """Return the number of candidates of these peers."""
        return sum(map(self._candidates.of, peers))


def named(refused: Iterable[PolicySide], most: int) -> Dict[PolicySide, str]:
    """Return the reason for each policy refused because of the number of elements."""
    limits = f"{most} elements or {MOST_CANDIDATES_TOGETHER} comparisons of selectors"
    return dict.fromkeys(refused, f"a part in more than {limits} that all policies together would need")
