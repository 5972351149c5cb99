# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The policies that are refused if all of them together need too much, and their order.

The ranges and selectors of all policies divide the addresses of the cluster into classes, and each pod has an element
for every class to which its policies grant something: the number is a product, to which many small policies contribute.
So namespaces are ordered by the need of their own policies alone, and a namespace with one large policy, or with many
similar ones, does not lose anything to one whose policies multiply. What policies need at most if no others exist is
computed without evaluating them.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import AbstractSet, Iterable, Iterator, NamedTuple, Optional, Sequence

from ..base.progress import Progress, unheeded
from ..cluster.model import NamespacedName
from ..cluster.parsing.policy_objects import PolicyObjects
from ..cluster.policies.policy_model import DIRECTIONS, INGRESS, ContainerPort, NetworkPolicy, Pod, PodPeer
from .excess import excess
from .limits import MOST_CANDIDATES_TOGETHER, MOST_KEPT, MOST_ROWS, MOST_STEPS, PolicySide
from .matching.candidates import Candidates
from .matching.compiled import CompiledRule, compile_rules
from .matching.owners import addresses_of, counts
from .matching.port_names import PortNames
from .matching.ports import MOST_RANGES

#: What distinguishes pods with different rules: the policies, and the ports with names in ingress rules.
_SubjectKey = tuple[tuple[PolicySide, ...], frozenset[ContainerPort]]
#: More independent peers result in more classes than any table can hold.
_MOST_PARTS = 40


class Cost(NamedTuple):
    """Elements of the table (entries of ``cluster.account``), steps to compute them, and what subjects keep."""

    elements: int
    steps: int
    kept: int


class RuleCounts(NamedTuple):
    """The numbers of rules that determine how much they need.

    ``rules``, ``parts``: rules for some peers, and these peers and groups of ranges. ``ends``: of ranges; ``reach``:
    the pods that peers may match. ``ports``: ranges of rules for some peers; ``every``: of rules for every peer.
    ``names``: of ports; ``layouts``, ``resolved``: what those in egress rules resolve to. ``kept``: rules with their
    peers, groups of ranges and names.
    """

    rules: int = 0
    parts: int = 0
    ends: int = 0
    reach: int = 0
    ports: int = 0
    every: int = 0
    names: int = 0
    kept: int = 0
    layouts: int = 0
    resolved: int = 0

    def cost(self, addresses: int, own: int, pods: int) -> Cost:
        """Return the maximum cost for pods with the same rules, without ports for every peer.

        ``addresses``: of these pods. ``own``: their ports with names that rules use. ``pods``: of the cluster.
        """
        pieces = self.ends + min(self.reach, pods)
        matched = min(1 << min(self.parts, _MOST_PARTS), pieces)
        classes = min(matched * (self.layouts + 1), pieces) + self.layouts
        unions = min(1 << min(self.rules, _MOST_PARTS), matched)
        ports = min(self.ports + own, MOST_RANGES) if self.rules else 0
        # Each union of rules, with the ports of each layout.
        content = min(unions * (self.layouts + 1), classes) * ports + (unions + 1) * self.resolved
        # Names of ingress rules: each of them may have each of the pod's ports.
        kept = self.kept + own * self.names
        return Cost(
            elements=self.ends + (classes + 1) * addresses + content,
            steps=addresses * self.kept + classes * (self.parts + self.rules) + kept + self.every + content,
            kept=kept,
        )


class Side(NamedTuple):
    """A NetworkPolicy in one direction. ``pods``: those of the node that it selects; ``names``: those of its ports."""

    key: PolicySide
    rules: tuple[CompiledRule, ...]
    pods: tuple[Pod, ...]
    names: frozenset[str]


class Needs:
    """Computes the needs of sides. ``pods``: the number of those in the cluster."""

    def __init__(
        self, sides: Iterable[Side], candidates: Candidates, names: PortNames, pods: int, progress: Progress
    ) -> None:
        self._pods = pods
        self._progress = progress
        self._numbers = {side.key: _numbers(side, candidates, names) for side in sides}

    def of(self, sides: Sequence[Side]) -> int:
        """Return what these sides alone, all of one namespace, need at most.

        The unit is an element, or as many steps or kept objects as are the same share of their limit.
        """
        elements = steps = kept = 0
        # The ports for every peer, which pods with the same of them share.
        known: set[_SubjectKey] = set()
        for (keys, own), addresses in _subjects(sides).items():
            self._progress()
            together = RuleCounts(*map(sum, zip(RuleCounts(), *(self._numbers[key] for key in keys))))
            cost = together.cost(addresses, len(own), self._pods)
            elements, steps, kept = elements + cost.elements, steps + cost.steps, kept + cost.kept
            every = tuple(key for key in keys if self._numbers[key].every or own)
            if (every, own) not in known:
                known.add((every, own))
                elements += min(sum(self._numbers[key].every for key in every) + len(own), MOST_RANGES)
        return max(elements, steps * MOST_ROWS // MOST_STEPS, kept * MOST_ROWS // MOST_KEPT)


def _numbers(side: Side, candidates: Candidates, names: PortNames) -> RuleCounts:
    (policy, direction), rules = side.key, side.rules
    chosen = [rule for rule in rules if rule.pods or rule.blocks]
    peers = {peer for rule in chosen for peer in rule.pods}
    blocks = {block for rule in chosen for block in rule.blocks}
    resolved = names.of_rules(rules if direction != INGRESS else (), direction, policy.namespace)
    return RuleCounts(
        rules=len(chosen),
        parts=len(peers) + len(blocks),
        ends=sum(2 * len(block.intervals) for block in blocks),
        reach=sum(map(candidates.pods_of, peers)),
        ports=sum(len(rule.ports.ranges) for rule in chosen),
        every=sum(len(rule.ports.ranges) for rule in rules if rule.every_peer),
        names=sum(len(rule.names) for rule in rules),
        kept=len(rules) + len(peers) + len(blocks) + sum(len(rule.names) for rule in rules),
        layouts=resolved.layouts,
        resolved=resolved.ports,
    )


def _subjects(sides: Sequence[Side]) -> dict[_SubjectKey, int]:
    """Return the number of addresses of pods with the same rules in a direction.

    Pods whose ports differ do not have the same ingress rules, if these name the ports.
    """
    selecting: dict[tuple[str, NamespacedName], list[Side]] = {}
    pods: dict[NamespacedName, Pod] = {}
    for side in sides:
        for pod in side.pods:
            pods[pod.key] = pod
            selecting.setdefault((side.key[1], pod.key), []).append(side)
    found: dict[_SubjectKey, int] = {}
    for (direction, key), chosen in selecting.items():
        names = {name for side in chosen for name in side.names} if direction == INGRESS else set()
        own = frozenset(port for port in pods[key].ports if port.name in names)
        subject = (tuple(side.key for side in chosen), own)
        found[subject] = found.get(subject, 0) + len(addresses_of(pods[key]))
    return found


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
        of_namespace: dict[str, list[NamespacedName]] = {}
        for key in pods:
            of_namespace.setdefault(key.namespace, []).append(key)
        self._pods = pods
        self._of_namespace = of_namespace
        self._candidates = Candidates(pods, of_namespace, objects.namespaces)
        local: dict[str, list[Pod]] = {}
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

    def order_of_refusal(self) -> list[PolicySide]:
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

    def needs(self) -> dict[str, int]:
        """Return what the policies of each namespace need at most if no others exist; see :meth:`.Needs.of`."""
        return {name: self._needs.of(sides) for name, sides in self._by_namespace().items()}

    @cached_property
    def _needs(self) -> Needs:
        # Names that no policy uses do not make ports of pods different.
        used = {name for side in self._sides for name in side.names}
        names = PortNames(self._pods, self._of_namespace, used)
        return Needs(self._sides, self._candidates, names, len(self._pods), self._progress)

    def _by_namespace(self) -> dict[str, list[Side]]:
        found: dict[str, list[Side]] = {}
        for side in sorted(self._sides, key=lambda each: each.key):
            found.setdefault(side.key[0].namespace, []).append(side)
        return found

    def crowding(self, most: int) -> frozenset[PolicySide]:
        """Return which policies to refuse, by direction, so that the rest stay within ``most`` candidates.

        The namespace whose own selectors have most candidates comes first.
        """
        peers: dict[str, dict[PolicySide, set[PodPeer]]] = {}
        uses: Counter[PodPeer] = Counter()
        for side in self._sides:
            found = {peer for rule in side.rules for peer in rule.pods}
            peers.setdefault(side.key[0].namespace, {})[side.key] = found
            uses.update(found)
        sizes = {name: self._size(set().union(*own.values())) for name, own in peers.items()}
        left = self._size(uses)
        refused: set[PolicySide] = set()
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


def named(refused: Iterable[PolicySide], most: int) -> dict[PolicySide, str]:
    """Return the reason for each policy refused because of the number of elements."""
    limits = (
        f"{most} elements, {MOST_STEPS} steps, {MOST_KEPT} rules and peers of pods, or "
        f"{MOST_CANDIDATES_TOGETHER} comparisons of selectors"
    )
    return dict.fromkeys(refused, f"a part in more than {limits} that all policies together would need")
