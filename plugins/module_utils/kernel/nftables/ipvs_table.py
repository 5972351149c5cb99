# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table beside IPVS, which ipvs mode has if its filter backend is nftables."""

from __future__ import annotations

from ...rendering.ipvs.nftables_layout import IPVS_TABLE
from ...resources import Kind
from .resource import NftablesResource


class IpvsTableResource(NftablesResource):
    """Table ``kubenode-ipvs`` of one family in the network namespace of the calling thread."""

    kind = Kind.IPVS_OBJECTS
    table = IPVS_TABLE
