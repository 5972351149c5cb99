# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""iptables mode: chains and jump rules of each family, in the tables of iptables."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from ...configuration.model import KubeProxyConfiguration
from ...kernel.xtables.nfacct import make_nfacct_counters, nfacct_packets, usable_nfacct_counters
from ...kernel.xtables.recent import last_seen
from ...kernel.xtables.restore import RestoreError
from ...preflight.check import ModeNeeds
from ...preflight.features import IPTABLES_EXTENSIONS
from ...rendering.iptables.fixed import INVALID_COUNTER, LOCALHOST_COUNTER
from ...rendering.iptables.mode import RENDERING
from ...rendering.iptables.names import endpoint_chain
from ...rendering.iptables.observed_order import in_observed_order
from ...rendering.iptables.tables import CHAINS
from ...resources import Stage
from ...serviceports.info import ServicePortInfo
from ..family import FamilyContext, FamilyTables
from ..handles import KernelHandles
from ..live import Flow, Remembered
from .mode import Families, Mode, Refusals, Subsystems
from .stages.chains import chain_stages, xtables_families

if TYPE_CHECKING:
    from ...serviceports.frontends import Frontends
    from ..traffic.account import Sample

#: Created at the start of iptables mode if the kernel supports them, as by kube-proxy; nothing ever removes them.
NFACCT_COUNTERS = (INVALID_COUNTER, LOCALHOST_COUNTER)


class IptablesMode(Mode):
    """See the base class."""

    rendering = RENDERING
    subsystems = Subsystems(chains=True)
    refusals = Refusals(RestoreError, ("iptables_restore_failures", "iptables_partial_restore_failures"))
    needs = ModeNeeds("iptables", extensions=IPTABLES_EXTENSIONS)
    uncounted = "iptables mode counts connections only: no rule sees their other packets"
    # iptables-restore takes as long for a few chains as for all.
    cold_batch = 1 << 30

    def find_families(self, families: Sequence[str]) -> Families:
        """Return the iptables of each family."""
        return Families(*xtables_families(families))

    def counters(self) -> tuple[str, ...]:
        """See the base class."""
        return usable_nfacct_counters()

    def packets(self, contexts: Iterable[FamilyContext], handles: KernelHandles) -> Mapping[str, Any]:
        """See the base class."""
        return nfacct_packets() if any(context.settings.nfacct_counters for context in contexts) else {}

    def make_counters(self) -> bool:
        """See the base class."""
        return make_nfacct_counters(NFACCT_COUNTERS)

    def stages(
        self, configuration: KubeProxyConfiguration, families: Sequence[FamilyTables], handles: KernelHandles
    ) -> list[Stage]:
        """Return the chains of each family."""
        return [
            stage
            for context, tables in families
            for stage in chain_stages(context, functools.partial(in_observed_order, tables[CHAINS]), with_shared=True)
        ]

    def remembered(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> list[Remembered]:
        """See the base class; each endpoint has a list of its clients, named as its chain."""
        found: list[Remembered] = []
        for endpoint in port.endpoints if port.affinity_seconds else ():
            age = last_seen(endpoint_chain(str(port.key), port.protocol, endpoint.text), flow.client.address)
            if age is not None and age < port.affinity_seconds:
                found.append(Remembered(flow.client.address, endpoint.text, int(port.affinity_seconds - age)))
        return found

    def traffic(self, context: FamilyContext, frontends: Frontends, handles: KernelHandles) -> list[Sample]:
        """See the base class; each endpoint has a chain, whose last rule counts connections."""
        from ..traffic.samples import of_chains

        return of_chains(context.variant, frontends, handles) if context.variant is not None else []

    def rule_counts(self, tables: Mapping[str, Mapping[Any, Any]]) -> dict[str, int]:
        """Count the rules of our chains in the tables filter and nat.

        Jumps from built-in chains do not count: kube-proxy counts the lines of its input for iptables-restore, and
        inserts jumps by calls of iptables.
        """
        counts = {"filter": 0, "nat": 0}
        for key, rules in tables.get(CHAINS, {}).items():
            if key.table in counts and isinstance(rules, tuple):
                counts[key.table] += len(rules)
        return counts


IPTABLES_MODE = IptablesMode()
