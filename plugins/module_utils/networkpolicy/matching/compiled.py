# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Policies prepared for evaluation: each rule with its peers by kind and their identity, and its ports merged."""

from __future__ import annotations

from hashlib import blake2b
from typing import Iterable, NamedTuple, Optional, Sequence

from ...base.addresses import FAMILIES, Network, address_bits
from ...cluster.policies.policy_model import EGRESS, BlockPeer, ContainerPort, PodPeer, PolicyPort, PolicyRule
from ...cluster.policies.selectors import LabelSelector
from .ports import EVERYTHING, PROTOCOL_NUMBERS, PortSet, Range, union


def weight(peer: PodPeer) -> int:
    """Return what a comparison of a peer costs: the number of its conditions, at least 1."""
    namespaces = peer.namespaces.requirements if peer.namespaces is not None else ()
    return max(1, len(peer.pods.requirements) + len(namespaces))


class PeerEntry:
    """A pod peer in use, compared by identity.

    ``contents``: those of the pods that it matches. ``weight``: what a comparison with it costs. ``candidates``: what
    it cost to compare it with all pods when it came into use (see :class:`.Candidates`).
    """

    __slots__ = ("candidates", "contents", "digest", "peer", "uses", "weight")

    def __init__(self, peer: PodPeer) -> None:
        self.peer = peer
        self.digest = peer_digest(peer)
        self.contents: set[Content] = set()
        self.candidates = 0
        self.weight = weight(peer)
        self.uses = 0


class Content(NamedTuple):
    """The identity of a class of peers: the pod peers and blocks that match it, and port names that rules use."""

    peers: frozenset[PeerEntry] = frozenset()
    blocks: frozenset[Block] = frozenset()
    ports: frozenset[ContainerPort] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.peers or self.blocks or self.ports)


#: First and last address of a range, as numbers.
Interval = tuple[int, int]
DIGEST_BYTES = 16


def digest(*parts: bytes) -> bytes:
    """Return a hash that is the same in every run and on every node."""
    made = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        made.update(len(part).to_bytes(4, "big"))
        made.update(part)
    return made.digest()


class Block:
    """The addresses of one family in the ipBlocks of one rule, without their ``except`` ranges.

    The intervals neither overlap nor touch.

    Compared by ``digest``, whose cost does not depend on the number of intervals.
    """

    __slots__ = ("digest", "family", "intervals")

    def __init__(self, family: str, intervals: tuple[Interval, ...]) -> None:
        self.family = family
        self.intervals = intervals
        self.digest = digest(family.encode(), repr(intervals).encode())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class NamedPort(NamedTuple):
    """A port that a rule gives by name; protocol 0 means any protocol for which the pod has the name."""

    protocol: int
    name: str


class CompiledRule(NamedTuple):
    """A rule. ``every_peer``: it matches any source or destination. ``ports``: those given by number."""

    every_peer: bool
    pods: tuple[PodPeer, ...]
    blocks: tuple[Block, ...]
    ports: PortSet
    names: frozenset[NamedPort] = frozenset()
    action: str = ""

    @property
    def is_useful(self) -> bool:
        """Return whether the rule can match anything."""
        return (self.every_peer or bool(self.pods or self.blocks)) and bool(self.ports or self.names)


def compile_rule(rule: PolicyRule) -> CompiledRule:
    """Compile a rule."""
    pods = dict.fromkeys(peer for peer in rule.peers if isinstance(peer, PodPeer))
    blocks = [peer for peer in rule.peers if isinstance(peer, BlockPeer)]
    ports, names = _ports(rule.ports)
    return CompiledRule(
        every_peer=not rule.peers,
        pods=tuple(pods),
        blocks=tuple(_blocks(blocks)),
        ports=ports,
        names=names,
        action=rule.action,
    )


def compile_rules(rules: Iterable[Optional[PolicyRule]]) -> tuple[CompiledRule, ...]:
    """Compile the rules that can match anything. Rules of a NetworkPolicy with the same ports become one."""
    merged: dict[Optional[tuple[PolicyPort, ...]], list[PolicyRule]] = {}
    for rule in rules:
        if rule is None:
            continue
        key = tuple(sorted(set(filter(None, rule.ports)))) if rule.ports else None
        if not rule.ports or key:
            merged.setdefault(key, []).append(rule)
    return tuple(found for found in map(compile_rule, map(_merged, merged.values())) if found.is_useful)


def _merged(rules: Sequence[PolicyRule]) -> PolicyRule:
    """Return the union of rules with the same ports. A rule without peers matches every peer."""
    every = not all(rule.peers for rule in rules)
    return PolicyRule(() if every else tuple(peer for rule in rules for peer in rule.peers), rules[0].ports)


def _ports(ports: Sequence[Optional[PolicyPort]]) -> tuple[PortSet, frozenset[NamedPort]]:
    if not ports:
        return EVERYTHING, frozenset()
    ranges: list[Range] = []
    names: set[NamedPort] = set()
    for port in ports:
        if port is None:
            continue
        if port.name:
            names.add(NamedPort(PROTOCOL_NUMBERS.get(port.protocol, 0), port.name))
        else:
            ranges.append((PROTOCOL_NUMBERS[port.protocol], port.first, port.last))
    return union(ranges), frozenset(names)


def interval_of(network: Network) -> Interval:
    """Return the first and the last address of a range."""
    return network.first, network.first + (1 << (address_bits(network.family) - network.prefix_length)) - 1


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for first, last in sorted(intervals):
        if merged and merged[-1][1] >= first - 1:
            if last > merged[-1][1]:
                merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def _without(outer: Interval, excepted: Sequence[Interval]) -> Iterable[Interval]:
    """Yield an ipBlock without its ``except`` ranges."""
    position = outer[0]
    for first, last in merge(excepted):
        if first > position:
            yield position, first - 1
        position = last + 1
    if position <= outer[1]:
        yield position, outer[1]


def _blocks(peers: Sequence[BlockPeer]) -> Iterable[Block]:
    """Yield the union of the ipBlocks of one rule, for each family that has any."""
    for family in FAMILIES:
        intervals: list[Interval] = []
        for peer in peers:
            if peer.network.family == family:
                intervals += _without(interval_of(peer.network), list(map(interval_of, peer.excepted)))
        if intervals:
            yield Block(family, tuple(merge(intervals)))


def _selector_text(selector: Optional[LabelSelector]) -> str:
    if selector is None:
        return "-"
    return repr([(item.key, item.operator, sorted(item.values)) for item in selector.requirements])


def peer_digest(peer: PodPeer) -> bytes:
    """Return a hash of what a peer matches."""
    parts = (peer.namespace, _selector_text(peer.namespaces), _selector_text(peer.pods))
    return digest(*(part.encode("utf-8", "surrogatepass") for part in parts))


def side(direction: str) -> str:
    """Return ``in`` or ``out`` for Ingress and Egress."""
    return "out" if direction == EGRESS else "in"
