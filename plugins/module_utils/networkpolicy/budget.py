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
from functools import cached_property
from typing import AbstractSet, Dict, FrozenSet, Iterable, Iterator, List, Optional, Set

from ..base.progress import Progress, unheeded
from ..cluster.model import NamespacedName
from ..cluster.parsing.policy_objects import PolicyObjects
from ..cluster.policies.policy_model import DIRECTIONS, NetworkPolicy, Pod, PodPeer
from .excess import excess
from .limits import MOST_CANDIDATES_TOGETHER, MOST_KEPT, MOST_STEPS, PolicySide
from .matching.candidates import Candidates
from .matching.compiled import compile_rules
from .matching.owners import addresses_of, counts
from .matching.port_names import PortNames
from .need import Needs, Side


class Demand:
    """What the NetworkPolicies that select pods of a node need, except those that are too large by themselves.

    ``only``: the policies to consider, by default all. ``progress`` is called for each of them.
    """

    def __init__(
        self,
        objects: PolicyObjects,
        node_name: str,
        only: Optional[AbstractSet[NamespacedName]] = None,
        progress: Progress = unheeded,
    ) -> None:
        self._progress = progress
        pods = {key: pod for key, pod in objects.pods.items() if counts(pod)}
        of_namespace: Dict[str, List[NamespacedName]] = {}
        for key in pods:
            of_namespace.setdefault(key.namespace, []).append(key)
        self._pods = pods
        self._of_namespace = of_namespace
        self._candidates = Candidates(pods, of_namespace, objects.namespaces)
        local: Dict[str, List[Pod]] = {}
        for pod in pods.values():
            if pod.node_name == node_name:
                local.setdefault(pod.namespace, []).append(pod)
        chosen = objects.policies.keys() if only is None else only & objects.policies.keys()
        self._sides = [side for key in chosen for side in self._of(objects.policies[key], local.get(key.namespace, []))]

    def _of(self, policy: NetworkPolicy, pods: Iterable[Pod]) -> Iterator[Side]:
        selected = tuple(pod for pod in pods if addresses_of(pod) and policy.pods.matches(pod.labels))
        for direction in DIRECTIONS if selected else ():
            self._progress()
            rules = compile_rules(policy.rules(direction)) if direction in policy.directions else ()
            key = (policy.key, direction)
            if rules and not excess(key, rules, self._candidates):
                names = frozenset(name.name for rule in rules for name in rule.names)
                yield Side(key, rules, selected, names)

    def order_of_refusal(self) -> List[PolicySide]:
        """Return the policies, by direction; the first is refused first."""
        of_namespace = self._by_namespace()
        needs = self._needs
        together = self.needs()
        alone = {side.key: needs.of([side]) for side in self._sides}
        return [
            side.key
            for name in sorted(of_namespace, key=lambda each: (-together[each], each))
            for side in sorted(of_namespace[name], key=lambda each: (-alone[each.key], each.key))
        ]

    def needs(self) -> Dict[str, int]:
        """Return what the policies of each namespace need at most if no others exist; see :meth:`.Needs.of`."""
        return {name: self._needs.of(sides) for name, sides in self._by_namespace().items()}

    @cached_property
    def _needs(self) -> Needs:
        # Names that no policy uses do not make ports of pods different.
        used = {name for side in self._sides for name in side.names}
        names = PortNames(self._pods, self._of_namespace, used)
        return Needs(self._sides, self._candidates, names, len(self._pods), self._progress)

    def _by_namespace(self) -> Dict[str, List[Side]]:
        found: Dict[str, List[Side]] = {}
        for side in sorted(self._sides, key=lambda each: each.key):
            found.setdefault(side.key[0].namespace, []).append(side)
        return found

    def crowding(self, most: int) -> FrozenSet[PolicySide]:
        """Return which policies to refuse, by direction, so that the rest stay within ``most`` candidates.

        The namespace whose own selectors have most candidates comes first.
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
    limits = (
        f"{most} elements, {MOST_STEPS} steps, {MOST_KEPT} rules and peers of pods, or "
        f"{MOST_CANDIDATES_TOGETHER} comparisons of selectors"
    )
    return dict.fromkeys(refused, f"a part in more than {limits} that all policies together would need")
