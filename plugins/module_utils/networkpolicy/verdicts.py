# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The rule of the policy that decides about a connection, for explanations.

The rows give the verdict of a packet, but not the policy behind it. This module evaluates the rules one by one, for a
pod of any node. Tests with random clusters check that both always agree.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Sequence

from ..base.addresses import unpacked
from ..cluster.parsing.policy_objects import PolicyObjects
from ..cluster.policies import policy_model as model
from .limits import PolicySide
from .matching.node_peers import known_rule, selects
from .matching.owners import Address, AddressOwners

_FROM, _TO = "from", "to"
#: The reason why traffic of a pod to its own address is allowed, which no tier judges: it does not leave the pod.
ITSELF = "a pod always reaches itself"


class Flow(NamedTuple):
    """A connection as one side sees it: the other end's address, the protocol (tcp, ...) and its port."""

    peer: Address
    protocol: str
    port: int


class SideVerdict(NamedTuple):
    """Whether one side allows a connection.

    ``by``: the path of the rule that decides; empty if none does, for example if the pod is isolated and no rule
    matches. ``isolated_by``: the NetworkPolicies that isolate the pod. ``misses``: why each of their rules does not
    match, if none matches.
    """

    allowed: bool
    reason: str
    by: str = ""
    isolated_by: tuple[str, ...] = ()
    misses: tuple[str, ...] = ()


class _Match(NamedTuple):
    """Whether a rule matches: the matching peer and port, or the reason why not."""

    matches: bool
    text: str


class Verdicts:
    """Evaluate the rules that apply to a pod.

    ``too_large``: policies that allow nothing in a direction, with the reason.
    """

    def __init__(
        self, objects: PolicyObjects, owners: AddressOwners, cluster_policies: bool, too_large: Mapping[PolicySide, str]
    ) -> None:
        self._objects = objects
        self._owners = owners
        self._cluster_policies = cluster_policies
        self._too_large = too_large

    def side(self, direction: str, own: Address, flow: Flow) -> SideVerdict:
        """Return the decision for the side whose pods claim an address. ``direction``: Ingress or Egress."""
        pods = self._owners.judged(own)
        decided = self._tier(model.ADMIN, direction, pods, flow)
        if decided is not None:
            return decided
        isolating = self._isolating(direction, pods)
        if isolating:
            return self._network_policies(isolating, direction, pods, itself=own == flow.peer, flow=flow)
        return self._tier(model.BASELINE, direction, pods, flow) or SideVerdict(True, "not isolated")

    # ---- NetworkPolicy

    def _isolating(self, direction: str, pods: Sequence[model.Pod]) -> list[model.NetworkPolicy]:
        return [
            policy
            for key, policy in sorted(self._objects.policies.items())
            if direction in policy.directions
            and any(key.namespace == pod.namespace and policy.pods.matches(pod.labels) for pod in pods)
        ]

    def _network_policies(
        self,
        isolating: list[model.NetworkPolicy],
        direction: str,
        pods: Sequence[model.Pod],
        *,
        itself: bool,
        flow: Flow,
    ) -> SideVerdict:
        names = tuple(str(policy.key) for policy in isolating)
        if itself:
            return SideVerdict(True, ITSELF, isolated_by=names)
        misses: list[str] = []
        for policy in isolating:
            too_large = self._too_large.get((policy.key, direction))
            if too_large:
                misses.append(f"{policy.key}: allows nothing, because it has {too_large}")
                continue
            rules = policy.rules(direction)
            if not rules:
                misses.append(f"{policy.key}: has no {direction.lower()} rules")
            for number, rule in enumerate(rules):
                path = f"{policy.key} {direction.lower()}[{number}]"
                found = self._match(rule, direction, pods, flow)
                if found.matches:
                    by = f"{path}: {found.text}"
                    return SideVerdict(True, "isolated, and a rule allows it", by=by, isolated_by=names)
                misses.append(f"{path}: {found.text}")
        return SideVerdict(False, "isolated, and no rule allows it", isolated_by=names, misses=tuple(misses))

    # ---- ClusterNetworkPolicy

    def _tier(self, tier: str, direction: str, pods: Sequence[model.Pod], flow: Flow) -> Optional[SideVerdict]:
        """Return a tier's decision, or None if no rule matches or a rule passes the packet to the next tier."""
        for policy in self._cluster_selecting(tier, pods):
            for number, rule in enumerate(policy.rules(direction)):
                found = self._match(known_rule(rule, self._objects), direction, pods, flow)
                if not found.matches:
                    continue
                action = known_rule(rule, self._objects).action
                if action == model.PASS:
                    return None
                name = f" ({rule.name})" if rule.name else ""
                by = f"ClusterNetworkPolicy {policy.name} {direction.lower()}[{number}]{name}: {found.text}"
                return SideVerdict(action == model.ACCEPT, f"{action} by the {tier} tier", by=by)
        return None

    def _cluster_selecting(self, tier: str, pods: Sequence[model.Pod]) -> Iterator[model.ClusterNetworkPolicy]:
        policies = self._objects.cluster_policies.values() if self._cluster_policies else ()
        for policy in sorted(policies, key=lambda item: (item.priority, item.name)):
            if policy.tier == tier and any(self._is_pod(policy.subject, pod) for pod in pods):
                yield policy

    # ---- rules

    def _is_pod(self, peer: model.PodPeer, pod: model.Pod) -> bool:
        if peer.namespaces is None:
            return peer.namespace == pod.namespace and peer.pods.matches(pod.labels)
        namespace = self._objects.namespaces.get(pod.namespace)
        return namespace is not None and peer.namespaces.matches(namespace.labels) and peer.pods.matches(pod.labels)

    def _match(self, rule: Optional[model.PolicyRule], direction: str, pods: Sequence[model.Pod], flow: Flow) -> _Match:
        if rule is None:
            return _Match(False, "is not understood, and matches nothing")
        peers, ports = (_FROM, _TO)[direction != model.INGRESS], "ports"
        peer_owner = self._owners.owners.get(flow.peer)
        targets = pods if direction == model.INGRESS else (peer_owner,)
        named = [port for pod in targets if pod is not None for port in pod.ports]

        def is_peer(peer: model.Peer) -> bool:
            return self._is_peer(peer, flow.peer, peer_owner)

        by_peer = self._first(rule.peers, peers, is_peer, "every peer")
        by_port = self._first(rule.ports, ports, lambda port: _is_port(port, named, flow), "every port")
        if by_peer and by_port:
            return _Match(True, f"{by_peer}, {by_port}")
        if by_peer:
            return _Match(False, f"{by_peer} matches, but no entry of ports has {flow.port or flow.protocol}")
        if by_port:
            near = _hint(rule, peer_owner)
            return _Match(False, f"{by_port} matches, but no entry of {peers} has the other end{near}")
        return _Match(False, f"neither {peers} nor ports match")

    @staticmethod
    def _first(items: Sequence[object], field: str, matches: Callable[[Any], bool], everything: str) -> str:
        """Return the path and text of the first matching item, or an empty text."""
        if not items:
            return everything
        for number, item in enumerate(items):
            if item is not None and matches(item):
                return f"{field}[{number}] ({item})"
        return ""

    def _is_peer(self, peer: model.Peer, address: Address, owner: Optional[model.Pod]) -> bool:
        if isinstance(peer, model.BlockPeer):
            text = unpacked(address)
            return peer.network.contains(text) and not any(part.contains(text) for part in peer.excepted)
        if isinstance(peer, model.NodePeer):
            text = unpacked(address)
            return any(text in node.addresses and selects(peer, node) for node in self._objects.nodes.values())
        return owner is not None and self._is_pod(peer, owner)


def _is_port(port: model.PolicyPort, named: Sequence[model.ContainerPort], flow: Flow) -> bool:
    if port.name:
        return any(
            item.name == port.name
            and port.protocol in ("", item.protocol)
            and item.protocol.lower() == flow.protocol
            and item.port == flow.port
            for item in named
        )
    return port.protocol.lower() == flow.protocol and port.first <= flow.port <= port.last


def _hint(rule: model.PolicyRule, owner: Optional[model.Pod]) -> str:
    """Return a hint about the most frequent mistakes with peers."""
    selectors = [peer for peer in rule.peers if isinstance(peer, model.PodPeer)]
    if owner is None:
        return ", which is not a pod" if selectors and len(selectors) == len(rule.peers) else ""
    near = [str(peer) for peer in selectors if peer.pods.matches(owner.labels) and peer.pods.requirements]
    return f": the labels of the pod match {near[0]}, but its namespace does not" if near else ""
