# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The traffic that a pod of this node may exchange with peers: the rules of all its policies, in one direction.

Pods with the same policies, and the same numbers behind the port names that ingress rules use, share a subject.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, Iterable, List, NamedTuple, Sequence, Set, Tuple, Union

from ..addresses import IPV4, IPV6
from ..cluster.policy_model import DENY, ContainerPort
from .matching.compiled import Block, CompiledRule, NamedPort
from .matching.owners import Address
from .matching.peers import Content, PeerEntry
from .matching.pod_peers import PodPeers
from .matching.ports import (
    EVERYTHING,
    NOTHING,
    PROTOCOL_NUMBERS,
    Grant,
    PortSet,
    Range,
    TierOutcome,
    first_match,
    union,
)

#: The tier of NetworkPolicies, between those of cluster policies.
NETWORK_POLICY = ""
_MOST_KNOWN_RANGES = 100_000
#: The parts of a rule that match peers.
Part = Union[Block, PeerEntry]


def resolve(names: Iterable[NamedPort], ports: Iterable[ContainerPort]) -> List[Range]:
    """Return the ports that a pod defines for names."""
    wanted = set(names)
    found = ((PROTOCOL_NUMBERS[port.protocol], port) for port in ports)
    return [
        (number, port.port, port.port)
        for number, port in found
        if NamedPort(0, port.name) in wanted or NamedPort(number, port.name) in wanted
    ]


class SubjectKey(NamedTuple):
    """The identity of a subject. ``rules``: compared by identity; ``ports``: of the pod, if rules name ports."""

    tier: str
    side: str
    rules: Tuple[int, ...]
    ports: FrozenSet[ContainerPort]


class _Rule(NamedTuple):
    """A rule of a subject. ``names``: port names that depend on the peer."""

    ports: PortSet
    names: Tuple[NamedPort, ...]
    action: str


class Subject:
    """Rules for pods of this node. ``addresses``: of these pods, by family. ``blocks``: the ranges that rules use."""

    def __init__(self, key: SubjectKey, rules: Sequence[CompiledRule], peers: PodPeers) -> None:
        self.tier, self.side = key.tier, key.side
        self.key = key
        self.addresses: Dict[str, Set[Address]] = {IPV4: set(), IPV6: set()}
        self.granted: Dict[str, Dict[int, int]] = {IPV4: {}, IPV6: {}}
        self.blocks: List[Block] = []
        self.names: Set[str] = set()
        #: Keeps alive the rules whose identity is part of the key.
        self.compiled = tuple(rules)
        self._peers = peers
        self._rules: List[_Rule] = []
        self._every: List[int] = []
        self._by_peer: Dict[PeerEntry, List[int]] = {}
        self._by_block: Dict[Block, List[int]] = {}
        #: How many steps it has taken so far to evaluate grants.
        self.steps = 0
        self._known: Dict[FrozenSet[int], PortSet] = {}
        self._known_ranges = 0
        for number, rule in enumerate(rules):
            self._add(number, rule)
        self.any = self._of_every_peer()

    @property
    def parts(self) -> Tuple[Part, ...]:
        """Return the distinct peers and blocks of the rules."""
        return (*self._by_peer, *self._by_block)

    @property
    def is_wide(self) -> bool:
        """Return whether something may be granted to a class that matches none of the peers and blocks."""
        return bool(self.default()) or bool(self.names and self._every)

    def _add(self, number: int, rule: CompiledRule) -> None:
        ports, names = rule.ports, rule.names
        if names and self.side == "in":
            if not ports.everything:
                ports = union([*ports.ranges, *resolve(names, self.key.ports)])
            names = ()
        self._rules.append(_Rule(ports, names, rule.action))
        self.names.update(name.name for name in names)
        if rule.every_peer:
            self._every.append(number)
        for peer in rule.pods:
            entry = self._peers.acquire(peer)
            self._by_peer.setdefault(entry, []).append(number)
        for block in rule.blocks:
            self.blocks.append(block)
            self._by_block.setdefault(block, []).append(number)

    def close(self) -> None:
        """Release the peers."""
        for entry, numbers in self._by_peer.items():
            for _number in numbers:
                self._peers.release(entry)

    def _of_every_peer(self) -> PortSet:
        """Return the ports that NetworkPolicies allow for every peer, by number."""
        if self.tier != NETWORK_POLICY:
            return NOTHING
        return self._union(frozenset(self._every))

    def _union(self, numbers: FrozenSet[int]) -> PortSet:
        found = self._known.get(numbers)
        if found is None:
            rules = [self._rules[number] for number in numbers]
            if any(rule.ports.everything for rule in rules):
                found = EVERYTHING
            else:
                found = union(part for rule in rules for part in rule.ports.ranges)
                self.steps += sum(len(rule.ports.ranges) for rule in rules)
            if self._known_ranges > _MOST_KNOWN_RANGES:
                # Those of classes that are gone are never removed one by one.
                self._known.clear()
                self._known_ranges = 0
            self._known_ranges += 1 + len(found.ranges)
            self._known[numbers] = found
        return found

    def _matched(self, content: Content) -> Set[int]:
        self.steps += len(content.peers) + len(content.blocks)
        matched: Set[int] = set()
        by_peer, by_block = self._by_peer, self._by_block
        if by_peer:
            for entry in content.peers:
                if entry in by_peer:
                    matched.update(by_peer[entry])
        if by_block:
            for block in content.blocks:
                if block in by_block:
                    matched.update(by_block[block])
        return matched

    def grant(self, content: Content) -> Grant:
        """Return the grant to peers of a class, in addition to the grant to every peer."""
        matched = self._matched(content)
        if self.tier != NETWORK_POLICY:
            return self._outcome(matched, content)
        if self.any.everything:
            return NOTHING
        named = matched.union(self._every) if self.names else ()
        ranges = [part for number in named for part in resolve(self._rules[number].names, content.ports)]
        if not matched and not ranges:
            return NOTHING
        ports = self._union(frozenset(matched))
        return ports if ports.everything or not ranges else union([*ports.ranges, *ranges])

    def default(self) -> Grant:
        """Return a cluster policy tier's decision for peers without a class."""
        return self._outcome(set(), Content()) if self.tier != NETWORK_POLICY else NOTHING

    def _outcome(self, matched: Set[int], content: Content) -> TierOutcome:
        """Return the outcome of a tier; rules for every peer are those that deny all because they failed closed."""
        matched.update(self._every)
        found = []
        for number in sorted(matched):
            rule = self._rules[number]
            ports = rule.ports
            if rule.names and not ports.everything:
                ports = union([*ports.ranges, *resolve(rule.names, content.ports)])
            found.append((rule.action or DENY, ports))
        return first_match(found)
