# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The traffic that a pod of this node may exchange with peers: the rules of all its policies, in one direction.

Pods with the same policies, and the same numbers behind the port names that ingress rules use, share a subject.
"""

from __future__ import annotations

from typing import AbstractSet, Iterable, NamedTuple, Sequence, TypeVar, Union

from ..base.addresses import IPV4, IPV6
from ..cluster.policies.policy_model import DENY, ContainerPort
from .limits import PER_STEP
from .matching.compiled import Block, CompiledRule, Content, NamedPort, PeerEntry
from .matching.owners import Address
from .matching.peer_index import PodPeers
from .matching.port_unions import PortUnions
from .matching.ports import NOTHING, PROTOCOL_NUMBERS, Grant, PortSet, Range, TierOutcome, first_match, union

#: The tier of NetworkPolicies, between those of cluster policies.
NETWORK_POLICY = ""
_Key = TypeVar("_Key", Block, PeerEntry)
#: The parts of a rule that match peers: for rules for every peer, names of ports that the peer may have.
Part = Union[Block, PeerEntry, str]


def resolve(names: AbstractSet[NamedPort], ports: Iterable[ContainerPort]) -> list[Range]:
    """Return the ports that a pod defines for names."""
    return [range_of(port) for port in ports if not names.isdisjoint(names_of(port))] if names else []


def names_of(port: ContainerPort) -> tuple[NamedPort, NamedPort]:
    """Return the names by which rules may mean a port of a pod."""
    return NamedPort(0, port.name), NamedPort(PROTOCOL_NUMBERS[port.protocol], port.name)


def range_of(port: ContainerPort) -> Range:
    """Return the range that consists of a port of a pod."""
    return (PROTOCOL_NUMBERS[port.protocol], port.port, port.port)


class SubjectKey(NamedTuple):
    """The identity of a subject. ``rules``: compared by identity; ``ports``: of the pod, if rules name ports."""

    tier: str
    side: str
    rules: tuple[int, ...]
    ports: frozenset[ContainerPort]


class _Rule(NamedTuple):
    """A rule of a subject. ``own``: what names are on the subject's pods; ``names``: those that depend on the peer."""

    every_peer: bool
    ports: PortSet
    own: PortSet
    names: frozenset[NamedPort]
    action: str


class Subject:
    """Rules for pods of this node. ``addresses``: of these pods, by family. ``blocks``: the ranges that rules use.

    ``any``: the ports that NetworkPolicies allow for every peer, by number.
    """

    def __init__(self, key: SubjectKey, rules: Sequence[CompiledRule], peers: PodPeers, unions: PortUnions) -> None:
        self.tier, self.side = key.tier, key.side
        self.key = key
        self.addresses: dict[str, set[Address]] = {IPV4: set(), IPV6: set()}
        self.granted: dict[str, dict[int, int]] = {IPV4: {}, IPV6: {}}
        self.blocks: list[Block] = []
        #: Keeps alive the rules whose identity is part of the key.
        self.compiled = tuple(rules)
        self._peers = peers
        self._rules: list[_Rule] = []
        self._every: list[int] = []
        self._by_peer: dict[PeerEntry, list[int]] = {}
        self._by_block: dict[Block, list[int]] = {}
        self._by_name: dict[NamedPort, list[int]] = {}
        # Of rules for every peer.
        self._names_of_every: set[str] = set()
        #: How many steps it has taken so far to evaluate grants.
        self.steps = 0
        self._unions = unions
        for number, rule in enumerate(rules):
            self._add(number, rule)
        every = self._every if self.tier == NETWORK_POLICY else ()
        self.any = unions.acquire(unions.of(self._sets(every)))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the distinct peers and blocks of the rules, and the names in rules for every peer."""
        return (*self._by_peer, *self._by_block, *self._names_of_every)

    @property
    def names(self) -> set[str]:
        """Return the port names whose meaning depends on the peer."""
        return {name.name for name in self._by_name}

    @property
    def is_wide(self) -> bool:
        """Return whether something is granted to classes that match none of the parts."""
        return bool(self.default())

    @property
    def kept(self) -> int:
        """Return the number of objects that exist for this subject only."""
        own = sum(len(rule.own.ranges) for rule in self._rules)
        return len(self._rules) + len(self._by_peer) + len(self._by_block) + len(self._by_name) + own

    def _add(self, number: int, rule: CompiledRule) -> None:
        own, names = NOTHING, rule.names
        if names and self.side == "in":
            own, names = union(resolve(names, self.key.ports)), frozenset()
        self._rules.append(_Rule(rule.every_peer, rule.ports, own, names, rule.action))
        for name in names:
            self._by_name.setdefault(name, []).append(number)
        if rule.every_peer:
            self._every.append(number)
            self._names_of_every.update(name.name for name in names)
        for peer in rule.pods:
            entry = self._peers.acquire(peer)
            self._by_peer.setdefault(entry, []).append(number)
        for block in rule.blocks:
            self.blocks.append(block)
            self._by_block.setdefault(block, []).append(number)

    def close(self) -> None:
        """Release the peers and ports."""
        self._unions.release(self.any)
        for entry, numbers in self._by_peer.items():
            for _number in numbers:
                self._peers.release(entry)

    def _sets(self, numbers: Iterable[int]) -> list[PortSet]:
        """Return the ports of some rules that do not depend on the peer."""
        rules = [self._rules[number] for number in numbers]
        return [ports for rule in rules for ports in (rule.ports, rule.own) if ports]

    def _matched(self, content: Content) -> set[int]:
        matched: set[int] = set()
        matched.update(*self._found(self._by_peer, content.peers), *self._found(self._by_block, content.blocks))
        self.steps += len(matched) // PER_STEP
        return matched

    def _found(self, used: dict[_Key, list[int]], parts: frozenset[_Key]) -> list[list[int]]:
        """Return the rules of the parts that both have, at a cost of the smaller number of parts."""
        self.steps += min(len(used), len(parts))
        if len(used) < len(parts):
            return [numbers for part, numbers in used.items() if part in parts]
        return [used[part] for part in parts if part in used]

    def _named(self, matched: AbstractSet[int], ports: Iterable[ContainerPort]) -> list[Range]:
        """Return the ports of a peer whose names are in the rules that match it, or in those for every peer."""
        found = []
        for port in ports:
            self.steps += 1
            for name in names_of(port):
                numbers = self._by_name.get(name, ())
                self.steps += len(numbers)
                if any(number in matched or self._rules[number].every_peer for number in numbers):
                    found.append(range_of(port))
        return found

    def grant(self, content: Content) -> Grant:
        """Return the grant to peers of a class, in addition to the grant to every peer."""
        matched = self._matched(content)
        if self.tier != NETWORK_POLICY:
            return self._outcome(matched, content)
        if self.any.everything:
            return NOTHING
        ranges = self._named(matched, content.ports) if self._by_name else []
        if not matched and not ranges:
            return NOTHING
        before = self._unions.steps
        ports = self._unions.of(self._sets(sorted(matched)), ranges)
        self.steps += self._unions.steps - before
        return ports

    def default(self) -> Grant:
        """Return a cluster policy tier's decision for peers without a class."""
        return self._outcome(set(), Content()) if self.tier != NETWORK_POLICY else NOTHING

    def _outcome(self, matched: set[int], content: Content) -> TierOutcome:
        """Return the outcome of a tier; rules for every peer are those that deny all because they failed closed.

        Ports are no steps here: to refuse NetworkPolicies would not make the administrator's policies need less.
        """
        matched.update(self._every)
        found = []
        for number in sorted(matched):
            rule = self._rules[number]
            ports = self._unions.of(self._sets([number]), resolve(rule.names, content.ports))
            found.append((rule.action or DENY, ports))
        return first_match(found)
