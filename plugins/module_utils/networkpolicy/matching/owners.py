# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who is at an address, if several live pods claim it: as a peer one of them, as a pod of the node each of them."""

from __future__ import annotations

from typing import AbstractSet, Iterable, Optional

from ...base.addresses import packed
from ...cluster.model import NamespacedName
from ...cluster.policies.policy_model import Pod

#: An address in network order: 4 or 16 bytes.
Address = bytes


def counts(pod: Optional[Pod]) -> bool:
    """Return whether policies apply to a pod: it has not ended and is not on the host's network."""
    return pod is not None and not pod.ended and not pod.host_network


def addresses_of(pod: Optional[Pod]) -> tuple[Address, ...]:
    """Return the addresses that a pod claims; none if policies do not apply to it."""
    if pod is None or not counts(pod):
        return ()
    return tuple(raw for raw in map(packed, pod.addresses) if raw is not None)


class AddressOwners:
    """The owner of each address: the pod that it is as a peer.

    Of several live pods with one address the owner is one that is not being deleted, then one of the node, then the
    youngest, then the one with the greatest uid. A claim by a pod of another node must not end the isolation of a pod
    of this one: the policies of all pods in ``local`` are in force. ``node_addresses``: those of the node, which no pod
    can have.
    """

    def __init__(self, node_name: str, node_addresses: Iterable[Address] = ()) -> None:
        self.owners: dict[Address, Pod] = {}
        #: The pods of the node that claim an address, the strongest claim first.
        self.local: dict[Address, tuple[Pod, ...]] = {}
        #: The addresses that pods of the node and others claim, of which none is being deleted.
        self.disputed: set[Address] = set()
        self._node_name = node_name
        # Nearly always one pod; a tuple needs a fifth of a dictionary's memory.
        self._claims: dict[Address, tuple[Pod, ...]] = {}
        self._node_addresses: AbstractSet[Address] = frozenset(node_addresses)

    def replace(self, before: Optional[Pod], now: Optional[Pod]) -> set[Address]:
        """Replace one version of a pod by another, and return the addresses whose owner changed."""
        touched: dict[Address, None] = {}
        if before is not None:
            touched = dict.fromkeys(addresses_of(before))
            for address in touched:
                left = tuple(pod for pod in self._claims.pop(address) if pod.key != before.key)
                if left:
                    self._claims[address] = left
        if now is not None:
            for address in addresses_of(now):
                self._claims[address] = (*self._claims.get(address, ()), now)
                touched[address] = None
        return {address for address in touched if self._decide(address)}

    def set_node_addresses(self, addresses: Iterable[Address]) -> set[Address]:
        """Apply the node's addresses, and return those whose owner changed."""
        before, self._node_addresses = self._node_addresses, frozenset(addresses)
        return {address for address in before ^ self._node_addresses if self._decide(address)}

    def owners_of(self, pod: Optional[Pod]) -> set[NamespacedName]:
        """Return the pods that own the addresses that a pod claims."""
        found = (self.owners.get(address) for address in addresses_of(pod))
        return {owner.key for owner in found if owner is not None}

    def owned_by(self, pod: Optional[Pod]) -> frozenset[Address]:
        """Return the addresses that a pod both claims and owns."""
        return frozenset(address for address in addresses_of(pod) if self.owners.get(address) is pod)

    def judged(self, address: Address) -> tuple[Pod, ...]:
        """Return the pods whose policies apply to an address: all those of the node, or else the owner."""
        owner = self.owners.get(address)
        return self.local.get(address) or ((owner,) if owner is not None else ())

    def claims(self, address: Address) -> tuple[Pod, ...]:
        """Return the pods that claim an address."""
        return self._claims.get(address, ())

    def refused(self) -> frozenset[tuple[Address, NamespacedName]]:
        """Return the node's addresses that pods claim, with these pods."""
        return frozenset((address, pod.key) for address in self._node_addresses for pod in self.claims(address))

    def _strength(self, pod: Pod) -> tuple[bool, bool, str, str, NamespacedName]:
        return (not pod.deleting, pod.node_name == self._node_name, pod.created, pod.uid, pod.key)

    def _decide(self, address: Address) -> bool:
        claims = self._claims.get(address, ()) if address not in self._node_addresses else ()
        local = [pod for pod in claims if pod.node_name == self._node_name]
        self.local.pop(address, None)
        self.disputed.discard(address)
        if local:
            self.local[address] = tuple(sorted(local, key=self._strength, reverse=True))
            if sum(not pod.deleting for pod in claims) > 1:
                self.disputed.add(address)
        before = self.owners.pop(address, None)
        if claims:
            self.owners[address] = claims[0] if len(claims) == 1 else max(claims, key=self._strength)
        return self.owners.get(address) is not before
