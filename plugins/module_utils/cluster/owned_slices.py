# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The EndpointSlices of each Service."""

from __future__ import annotations

from typing import Dict, Iterator, Mapping, Optional, Tuple, Union

from .model import EndpointSlice, NamespacedName

Slices = Mapping[str, EndpointSlice]
"""The EndpointSlices of one Service, by name."""

_NONE: Slices = {}


class OwnedSlices:
    """EndpointSlices by the Service that owns them (which may not exist) and by name.

    Nearly every Service has one EndpointSlice of up to a hundred endpoints. It is stored without a dict, which would
    need more memory than the EndpointSlice itself.
    """

    def __init__(self) -> None:
        self._slices: Dict[NamespacedName, Union[EndpointSlice, Dict[str, EndpointSlice]]] = {}

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

    def items(self) -> Iterator[Tuple[NamespacedName, Slices]]:
        """Yield each Service that has EndpointSlices, and these."""
        return ((owner, self.of(owner)) for owner in self._slices)

    def put(self, owner: NamespacedName, item: EndpointSlice) -> None:
        """Add an EndpointSlice to a Service, or replace the one with its name."""
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
        del found[name]
        if len(found) == 1:
            self._slices[owner] = next(iter(found.values()))

    def replace(self, owner: NamespacedName, slices: Slices) -> None:
        """Give a Service these EndpointSlices and no others."""
        self._slices.pop(owner, None)
        for item in slices.values():
            self.put(owner, item)

    def pop(self, owner: NamespacedName) -> Slices:
        """Remove the EndpointSlices of a Service and return them."""
        found = self.of(owner)
        self._slices.pop(owner, None)
        return found
