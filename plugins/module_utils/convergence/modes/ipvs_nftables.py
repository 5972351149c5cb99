# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ipvs mode with its packet filter in nf_tables: one table of each family; neither iptables nor ipset is needed."""

from __future__ import annotations

from ...kernel.nftables.resource import TransactionRefused
from ...kernel.rtnetlink.links import AddressesResource
from ...preflight.check import ModeNeeds
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.mode import OVER_NFTABLES
from ...rendering.ipvs.nftables_layout import IPVS_TABLE, RESOURCE
from ...resources import Stage, UnloadedResource
from ..family import FamilyTables
from ..handles import KernelHandles
from .ipvs import IpvsMode
from .mode import Refusals, Subsystems
from .stages.ipvs import after_servers
from .validated import TableNeeds, ValidatedMode


class IpvsWithNftables(ValidatedMode, IpvsMode):
    """See the base class."""

    rendering = OVER_NFTABLES
    table = TableNeeds(RESOURCE, IPVS_TABLE, "ipvs mode with the filter backend nftables")
    filter_backend = OVER_NFTABLES.filter_backend.name
    refusals = Refusals(TransactionRefused, ("nftables_sync_failures",))
    subsystems = Subsystems(ipvs=True, ipvs_table=True, device=ipvs.DEVICE)
    # As for nftables mode.
    needs = ModeNeeds("ipvs", kernel=(5, 13, 0), ipvs=True, filter_backend=OVER_NFTABLES.filter_backend.name)

    def is_loaded(self, handles: KernelHandles) -> bool:
        """See the base class."""
        return handles.has_ipvs() and handles.has_nftables()

    def filter_backend_stages(self, family: FamilyTables, handles: KernelHandles, loaded: bool) -> list[Stage]:
        """Return the table."""
        context, tables = family
        table = handles.ipvs_table(context.family)
        late = after_servers(AddressesResource(handles.route, context.family))
        return [Stage(table if loaded else UnloadedResource.instead_of(table), tables[RESOURCE], postponed=late)]


IPVS_WITH_NFTABLES = IpvsWithNftables()
