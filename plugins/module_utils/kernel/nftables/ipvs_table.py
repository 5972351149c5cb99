# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table beside IPVS, which ipvs mode has if its filter backend is nftables."""

from __future__ import annotations

from ...rendering.ipvs.nftables_layout import IPVS_TABLE, SETTLING, exempted
from ...rendering.nftables.objects import Key, Value
from ...resources import Change, Kind, Passes
from .resource import NftablesResource


class IpvsTableResource(NftablesResource):
    """Table ``kubenode-ipvs`` of one family in the network namespace of the calling thread.

    What it loses is removed after virtual servers and addresses: until then it masquerades and filters connections to
    these. Where it loses its hooks it changes at once.
    """

    kind = Kind.IPVS_OBJECTS
    table = IPVS_TABLE

    def passes(self, change: Change[Key, Value]) -> Passes[Key, Value]:
        """See the base class."""
        return super().passes(change) if SETTLING in change.removed else change.passes(exempted)
