# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of network policies, of both families, as one atomic resource: its entries, or as the kernel reports it."""

from __future__ import annotations

from typing import Any, Iterator, List

from ...rendering.networkpolicy.layout import TABLE
from ...rendering.networkpolicy.text import describe, element_text
from ...rendering.nftables.objects import SET_CONCAT, Key
from ...resources import Kind
from .decoding import ranges
from .raw import RawTableResource, key_and_data
from .raw_reading import RawSet
from .resource import NftablesResource

#: Isolation and grants must appear together, so a change is always one transaction.
_ALL_ELEMENTS = 1 << 62


class PolicyTableResource(NftablesResource):
    """Table ``inet kubenode-network-policy`` in the network namespace of the calling thread."""

    kind = Kind.POLICY_OBJECTS
    table = TABLE
    table_family = "inet"

    def __init__(self) -> None:
        super().__init__("", _ALL_ELEMENTS)

    def describe(self, key: Key, value: Any) -> List[str]:
        """Return one entry in the syntax of the nft program."""
        return describe(key, value)


class RawPolicyTableResource(RawTableResource):
    """The same table as saved states contain it: see the module ``raw``."""

    kind = Kind.POLICY_OBJECTS
    table = TABLE
    table_family = "inet"

    def __init__(self) -> None:
        super().__init__("")

    def element_texts(self, name: str, value: RawSet) -> Iterator[str]:
        """Yield the elements of the set of that name in the syntax of the nft program."""
        of_ranges = TABLE.intervals.get(name)
        if of_ranges is not None:
            found = ranges(map(memoryview, value.elements), bool(of_ranges.flags & SET_CONCAT))
        else:
            found = dict(map(key_and_data, value.elements))
        for key, data in found.items():
            yield element_text(name, key, data)
