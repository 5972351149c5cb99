# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ipvs mode with its packet filter in iptables: ipsets, and chains that match them, as kube-proxy makes them."""

from __future__ import annotations

import itertools
from typing import Iterable, Sequence

from ...kernel.xtables.restore import RestoreError
from ...preflight.check import ModeNeeds
from ...preflight.features import IPVS_EXTENSIONS
from ...preflight.ipvs_sets import ipvs_set_contributions
from ...preflight.limits import SetContribution
from ...rendering.iptables.tables import CHAINS
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.mode import RENDERING
from ...resources import Stage
from ..family import FamilyContext, FamilyServices, FamilyTables
from ..handles import KernelHandles
from .ipvs import IpvsMode
from .mode import Families, Refusals, Subsystems
from .stages.chains import chain_stages, iptables_remainder_stages, xtables_families
from .stages.ipvs_filter_backend import set_resources, unloaded_set_resources
from .stages.still_connected import replaces_iptables_mode


class IpvsWithIptables(IpvsMode):
    """See the base class."""

    rendering = RENDERING
    filter_backend = RENDERING.filter_backend.name
    refusals = Refusals(RestoreError, ("iptables_restore_failures",))
    subsystems = Subsystems(chains=True, ipvs=True, ipsets=True, device=ipvs.DEVICE)
    needs = ModeNeeds("ipvs", extensions=IPVS_EXTENSIONS, ipvs=True, ipsets=True)

    def find_families(self, families: Sequence[str]) -> Families:
        """Return the iptables of each family."""
        return Families(*xtables_families(families))

    def set_contributions(self, families: Iterable[FamilyServices]) -> Iterable[SetContribution]:
        """See the base class."""
        return itertools.chain.from_iterable(
            ipvs_set_contributions(item.service_ports, item.context.settings) for item in families
        )

    def is_loaded(self, handles: KernelHandles) -> bool:
        """See the base class."""
        return handles.has_ipvs() and handles.has_ipset()

    def filter_backend_stages(self, family: FamilyTables, handles: KernelHandles, loaded: bool) -> list[Stage]:
        """Return the ipsets, and the chains that match them."""
        context, tables = family
        found = set_resources(handles, context.family) if loaded else unloaded_set_resources(context.family)
        chains = chain_stages(context, tables[CHAINS], False)
        return [
            Stage(found.sets, tables[ipvs.SETS]),
            Stage(found.elements, tables[ipvs.SET_ELEMENTS]),
            # If this change removes the chains of iptables mode, it does so last, so that they serve until then.
            *(item._replace(postponed=replaces_iptables_mode) for item in chains),
        ]

    def extra_stages(self, families: Sequence[FamilyContext]) -> list[Stage]:
        """Return the stages that remove what only iptables mode has."""
        return iptables_remainder_stages(families)


IPVS_MODE = IpvsWithIptables()
