# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ipvs mode with its packet filter in nf_tables: one table of each family; neither iptables nor ipset is needed."""

from __future__ import annotations

from typing import List, Sequence, Tuple

from ...errors import ProxyError
from ...kernel.nftables.probe import refused_part
from ...kernel.nftables.resource import TransactionRefused
from ...kernel.rtnetlink.links import AddressesResource
from ...preflight.check import ModeNeeds
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.mode import OVER_NFTABLES
from ...rendering.ipvs.nftables_layout import IPVS_TABLE, RESOURCE
from ...resources import NotThereYet, Stage
from ..family import FamilyTables
from ..handles import KernelHandles
from ..stages.ipvs import after_servers
from .ipvs import IpvsMode
from .mode import Families, Subsystems


class IpvsWithNftables(IpvsMode):
    """See the base class."""

    rendering = OVER_NFTABLES
    glue = OVER_NFTABLES.glue.name
    subsystems = Subsystems(ipvs=True, ipvs_table=True, device=ipvs.DEVICE)
    # As for nftables mode.
    needs = ModeNeeds("ipvs", kernel=(5, 13, 0), ipvs=True, glue=OVER_NFTABLES.glue.name)

    def find_families(self, families: Sequence[str]) -> Families:
        """Have the kernel validate a table with everything that the glue uses, without keeping it."""
        refused = {family: refused_part(family, OVER_NFTABLES, RESOURCE, IPVS_TABLE) for family in families}
        why = "nf_tables refuses rules that ipvs mode with the glue nftables needs"
        return Families({}, {family: f"{why}: {part}" for family, part in refused.items() if part})

    def unsupported_reasons(self, families: Sequence[str]) -> List[str]:
        """See the base class."""
        return list(self.find_families(families).missing.values())

    def is_loaded(self, handles: KernelHandles) -> bool:
        """See the base class."""
        return handles.has_ipvs() and handles.has_nftables()

    def glue_stages(self, family: FamilyTables, handles: KernelHandles, loaded: bool) -> List[Stage]:
        """Return the table."""
        context, tables = family
        table = handles.ipvs_table(context.family)
        late = after_servers(AddressesResource(handles.route, context.family))
        return [Stage(table if loaded else NotThereYet(table), tables[RESOURCE], postponed=late)]

    def failure_counters(self, error: ProxyError, partial: bool) -> Tuple[str, ...]:
        """Count transactions that the kernel refused."""
        return ("nftables_sync_failures",) if isinstance(error, TransactionRefused) else ()


IPVS_WITH_NFTABLES = IpvsWithNftables()
