# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The EndpointSlices of each Service, and how many endpoints these have."""

from __future__ import annotations

from math import gcd
from typing import Any, Iterable, Iterator, Mapping, Optional, Union

from .model import EndpointSlice, NamespacedName

Slices = Mapping[str, EndpointSlice]
"""The EndpointSlices of one Service, by name."""

_NONE: Slices = {}

#: The weight of an EndpointSlice without Cilium's annotation, for Cilium.
CILIUM_DEFAULT = 100
#: Family, name and protocol of a port.
_PortKey = tuple[str, str, str]
#: The weights of an EndpointSlice: by the annotation of this project, and by Cilium's.
_Weights = tuple[Optional[int], Optional[int]]


def has_weight(item: EndpointSlice) -> bool:
    """Return whether an EndpointSlice has a weight by any annotation."""
    return item.weight is not None or item.alias_weight is not None


class EndpointCounts:
    """How many endpoints some EndpointSlices have.

    ``endpoints``: in all; ``listed``: times the ports of their slices. Ports that the Service does not have count, too.
    """

    def __init__(self, slices: Iterable[EndpointSlice] = ()) -> None:
        self.endpoints = self.listed = 0
        self._by_port: dict[_PortKey, int] = {}
        #: Those in slices with weights.
        self._weighted: dict[_PortKey, dict[_Weights, int]] = {}
        for item in slices:
            self.add(item)

    def of_port(self, family: str, name: str, protocol: str) -> int:
        """Return how many endpoints of a family a port has."""
        return self._by_port.get((family, name, protocol), 0)

    @property
    def are_weighted(self) -> bool:
        """Whether any endpoints have a weight by an annotation."""
        return bool(self._weighted)

    def shares_of_port(self, family: str, name: str, protocol: str) -> int:
        """Return the sum of the shares of a port's endpoints, as the smallest integers; whichever annotations apply."""
        key = family, name, protocol
        weighted = self._weighted.get(key)
        if weighted is None:
            return self._by_port.get(key, 0)
        rest = self._by_port[key] - sum(weighted.values())
        found = {**weighted, (None, None): rest}
        own = [(1 if weight is None else weight, number) for (weight, _alias), number in found.items()]
        other = [
            ((CILIUM_DEFAULT if alias is None else alias) if weight is None else weight, number)
            for (weight, alias), number in found.items()
        ]
        return max(_sum_of_shares(own), _sum_of_shares(other))

    def add(self, item: EndpointSlice) -> None:
        """Count the endpoints of an EndpointSlice."""
        self._add(item, len(item.endpoints))

    def remove(self, item: EndpointSlice) -> None:
        """Stop counting the endpoints of an EndpointSlice."""
        self._add(item, -len(item.endpoints))

    def _add(self, item: EndpointSlice, number: int) -> None:
        self.endpoints += number
        self.listed += number * len(item.ports)
        for port in item.ports:
            key = item.family, port.name, port.protocol
            _count(self._by_port, key, number)
            if has_weight(item):
                weights = self._weighted.setdefault(key, {})
                _count(weights, (item.weight, item.alias_weight), number)
                if not weights:
                    del self._weighted[key]


def _count(numbers: dict[Any, int], key: Any, number: int) -> None:
    """Add to one of some numbers, which has no entry while it is 0."""
    now = numbers.pop(key, 0) + number
    if now:
        numbers[key] = now


def _sum_of_shares(weights: Iterable[tuple[int, int]]) -> int:
    """Return the sum of weights, each with the number of endpoints that have it, as the smallest integers."""
    found = [(weight, number) for weight, number in weights if weight and number]
    return sum(weight * number for weight, number in found) // (gcd(*[weight for weight, _number in found]) or 1)


class OwnedSlices:
    """EndpointSlices by the Service that owns them (which may not exist) and by name.

    Nearly every Service has one EndpointSlice of up to a hundred endpoints. It is stored without a dict, which would
    need more memory than the EndpointSlice itself.

    Endpoints are counted at the first request, which is made for Services that may exceed their limit. From then on a
    change costs what it changes: the EndpointSlices of one Service may be thousands.
    """

    def __init__(self) -> None:
        self._slices: dict[NamespacedName, Union[EndpointSlice, dict[str, EndpointSlice]]] = {}
        #: Of Services with several EndpointSlices.
        self._counts: dict[NamespacedName, EndpointCounts] = {}

    def __contains__(self, owner: NamespacedName) -> bool:
        return owner in self._slices

    def of(self, owner: NamespacedName) -> Slices:
        """Return the EndpointSlices of a Service; empty if there are none. The caller must not change them."""
        found = self._slices.get(owner)
        if found is None:
            return _NONE
        return {found.name: found} if isinstance(found, EndpointSlice) else found

    def get(self, owner: NamespacedName, name: str) -> Optional[EndpointSlice]:
        """Return one EndpointSlice of a Service, None if it does not have it."""
        return self.of(owner).get(name)

    def counts_of(self, owner: NamespacedName) -> EndpointCounts:
        """Return how many endpoints a Service has now."""
        counts = self._counts.get(owner)
        if counts is None:
            found = self.of(owner)
            counts = EndpointCounts(found.values())
            if len(found) > 1:
                self._counts[owner] = counts
        return counts

    def have_weights(self, owner: NamespacedName) -> bool:
        """Return whether any endpoints of a Service have a weight by an annotation."""
        found = self._slices.get(owner)
        if found is None:
            return False
        if isinstance(found, EndpointSlice):
            return has_weight(found)
        # The slices of one Service may be thousands, but of nearly all Services they are two.
        return any(map(has_weight, found.values())) if len(found) <= 2 else self.counts_of(owner).are_weighted

    def items(self) -> Iterator[tuple[NamespacedName, Slices]]:
        """Yield each Service that has EndpointSlices, and these."""
        return ((owner, self.of(owner)) for owner in self._slices)

    def put(self, owner: NamespacedName, item: EndpointSlice) -> None:
        """Add an EndpointSlice to a Service, or replace the one with its name."""
        self._count(owner, item.name, item)
        found = self._slices.get(owner)
        if found is None or (isinstance(found, EndpointSlice) and found.name == item.name):
            self._slices[owner] = item
        elif isinstance(found, EndpointSlice):
            self._slices[owner] = {found.name: found, item.name: item}
        else:
            found[item.name] = item

    def drop(self, owner: NamespacedName, name: str) -> None:
        """Remove an EndpointSlice of a Service. Raises KeyError if it does not have it."""
        found = self._slices[owner]
        if isinstance(found, EndpointSlice):
            if found.name != name:
                raise KeyError(name)
            del self._slices[owner]
            return
        self._count(owner, name)
        del found[name]
        if len(found) == 1:
            self._slices[owner] = next(iter(found.values()))
            self._counts.pop(owner, None)

    def _count(self, owner: NamespacedName, name: str, added: Optional[EndpointSlice] = None) -> None:
        """Count the endpoints of an EndpointSlice instead of those of the one with its name."""
        counts = self._counts.get(owner)
        if counts is None:
            return
        removed = self.get(owner, name)
        if removed is not None:
            counts.remove(removed)
        if added is not None:
            counts.add(added)

    def replace(self, owner: NamespacedName, slices: Slices) -> None:
        """Give a Service these EndpointSlices and no others."""
        self.pop(owner)
        for item in slices.values():
            self.put(owner, item)

    def pop(self, owner: NamespacedName) -> Slices:
        """Remove the EndpointSlices of a Service and return them."""
        found = self.of(owner)
        self._slices.pop(owner, None)
        self._counts.pop(owner, None)
        return found
