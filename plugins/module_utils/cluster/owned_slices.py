# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The EndpointSlices of each Service, and how many endpoints these have."""

from __future__ import annotations

from typing import Dict, Iterable, Iterator, Mapping, Optional, Tuple, Union

from .model import EndpointSlice, NamespacedName

Slices = Mapping[str, EndpointSlice]
"""The EndpointSlices of one Service, by name."""

_NONE: Slices = {}


class EndpointCounts:
    """How many endpoints some EndpointSlices have.

    ``endpoints``: in all; ``listed``: times the ports of their slices. Ports that the Service does not have count, too.
    """

    def __init__(self, slices: Iterable[EndpointSlice] = ()) -> None:
        self.endpoints = self.listed = 0
        self._by_port: Dict[Tuple[str, str, str], int] = {}
        for item in slices:
            self.add(item)

    def of_port(self, family: str, name: str, protocol: str) -> int:
        """Return how many endpoints of a family a port has."""
        return self._by_port.get((family, name, protocol), 0)

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
            now = self._by_port.pop(key, 0) + number
            if now:
                self._by_port[key] = now


class OwnedSlices:
    """EndpointSlices by the Service that owns them (which may not exist) and by name.

    Nearly every Service has one EndpointSlice of up to a hundred endpoints. It is stored without a dict, which would
    need more memory than the EndpointSlice itself.

    Endpoints are counted at the first request, which is made for Services that may exceed their limit. From then on a
    change costs what it changes: the EndpointSlices of one Service may be thousands.
    """

    def __init__(self) -> None:
        self._slices: Dict[NamespacedName, Union[EndpointSlice, Dict[str, EndpointSlice]]] = {}
        #: Of Services with several EndpointSlices.
        self._counts: Dict[NamespacedName, EndpointCounts] = {}

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

    def items(self) -> Iterator[Tuple[NamespacedName, Slices]]:
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
