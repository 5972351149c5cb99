# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table beside IPVS, which ipvs mode has where its glue is nftables: its entries, or as the kernel reports it."""

from __future__ import annotations

from typing import List

from ...rendering.ipvs.nftables_layout import IPVS_TABLE
from ...rendering.nftables.objects import Key, Value
from ...rendering.nftables.text import describe
from ...resources import Kind
from .raw import RawTableResource
from .resource import NftablesResource


class IpvsTableResource(NftablesResource):
    """Table ``kubenode-ipvs`` of one family in the network namespace of the calling thread."""

    kind = Kind.IPVS_OBJECTS
    table = IPVS_TABLE

    def describe(self, key: Key, value: Value) -> List[str]:
        """Return one entry in the syntax of the nft program."""
        return describe(self.family, key, value, self.table.name)


class RawIpvsTableResource(RawTableResource):
    """The same table as saved states contain it: see the module ``raw``."""

    kind = Kind.IPVS_OBJECTS
    table = IPVS_TABLE
