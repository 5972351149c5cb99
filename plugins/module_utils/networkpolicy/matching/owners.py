# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pod that owns an address; exactly one, even if several live pods claim the address."""

from __future__ import annotations

from typing import AbstractSet, Dict, FrozenSet, Iterable, Optional, Set, Tuple

from ...addresses import packed
from ...cluster.model import NamespacedName
from ...cluster.policy_model import Pod

#: An address in network order: 4 or 16 bytes.
Address = bytes


def counts(pod: Optional[Pod]) -> bool:
    """Return whether policies apply to a pod: it has not ended and is not on the host's network."""
    return pod is not None and not pod.ended and not pod.host_network


def addresses_of(pod: Optional[Pod]) -> Tuple[Address, ...]:
    """Return the addresses that a pod claims; none if policies do not apply to it."""
    if pod is None or not counts(pod):
        return ()
    return tuple(raw for raw in map(packed, pod.addresses) if raw is not None)


def _strength(pod: Pod) -> Tuple[bool, str, str, NamespacedName]:
    return (not pod.deleting, pod.created, pod.uid, pod.key)


class AddressOwners:
    """The owner of each address.

    Of several live pods with one address the owner is one that is not being deleted, then the youngest, then the one
    with the greatest uid. ``node_addresses``: those of the node, which no pod can have.
    """

    def __init__(self, node_addresses: Iterable[Address] = ()) -> None:
        self.owners: Dict[Address, Pod] = {}
        # Nearly always one pod; a tuple needs a fifth of a dictionary's memory.
        self._claims: Dict[Address, Tuple[Pod, ...]] = {}
        self._node_addresses: AbstractSet[Address] = frozenset(node_addresses)

    def replace(self, before: Optional[Pod], now: Optional[Pod]) -> Set[Address]:
        """Replace one version of a pod by another, and return the addresses whose owner changed."""
        touched: Dict[Address, None] = {}
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

    def set_node_addresses(self, addresses: Iterable[Address]) -> Set[Address]:
        """Apply the node's addresses, and return those whose owner changed."""
        before, self._node_addresses = self._node_addresses, frozenset(addresses)
        return {address for address in before ^ self._node_addresses if self._decide(address)}

    def owners_of(self, pod: Optional[Pod]) -> Set[NamespacedName]:
        """Return the pods that own the addresses that a pod claims."""
        found = (self.owners.get(address) for address in addresses_of(pod))
        return {owner.key for owner in found if owner is not None}

    def owned_by(self, pod: Optional[Pod]) -> FrozenSet[Address]:
        """Return the addresses that a pod both claims and owns."""
        return frozenset(address for address in addresses_of(pod) if self.owners.get(address) is pod)

    def refused(self) -> FrozenSet[Tuple[Address, NamespacedName]]:
        """Return the node's addresses that pods claim, with these pods."""
        return frozenset(
            (address, pod.key) for address in self._node_addresses for pod in self._claims.get(address, ())
        )

    def _decide(self, address: Address) -> bool:
        claims = self._claims.get(address) if address not in self._node_addresses else None
        before = self.owners.get(address)
        if not claims:
            if before is not None:
                del self.owners[address]
            return before is not None
        owner = claims[0] if len(claims) == 1 else max(claims, key=_strength)
        self.owners[address] = owner
        return owner is not before
