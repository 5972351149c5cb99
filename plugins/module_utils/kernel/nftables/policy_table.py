# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of network policies, of both families, as one atomic resource."""

from __future__ import annotations

from typing import Any, List

from ...rendering.networkpolicy.sets import TABLE
from ...rendering.nftables.objects import Key
from ...resources import Kind
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
        # Imported late: only changes are described.
        from ...rendering.networkpolicy.text import describe

        return describe(key, value)
