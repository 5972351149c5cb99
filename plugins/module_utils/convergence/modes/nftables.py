# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nftables mode: a separate table for each family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from ...base.errors import KernelError
from ...configuration.model import KubeProxyConfiguration
from ...kernel.netlink.protocol import NETLINK_NETFILTER
from ...kernel.netlink.socket import NetlinkSocket
from ...kernel.nftables.traffic.element_counters import remembered_seconds
from ...preflight.check import ModeNeeds
from ...rendering.nftables.affinity import clients_set
from ...rendering.nftables.layout import LOCALHOST_COUNTS, LOCALHOST_LISTENERS, LOCALHOST_UNOPENED, SERVICES_TABLE
from ...rendering.nftables.mode import RENDERING
from ...rendering.nftables.objects import RESOURCE
from ...resources import Stage
from ...serviceports.info import ServicePortInfo
from ..family import FamilyContext, FamilyTables
from ..handles import KernelHandles
from ..live import Flow, Remembered
from .mode import Refusals, Subsystems
from .validated import TableNeeds, ValidatedMode

if TYPE_CHECKING:
    from ...serviceports.frontends import Frontends
    from ..traffic.account import Sample


class NftablesMode(ValidatedMode):
    """See the base class."""

    rendering = RENDERING
    table = TableNeeds(RESOURCE, SERVICES_TABLE, "nftables mode")
    subsystems = Subsystems(nftables=True)
    refusals = Refusals(KernelError, ("nftables_sync_failures",))
    uncounted = (
        "nftables mode counts connections where traffic.countConnections is true, and packets and bytes, of Services "
        "but not of endpoints, where traffic.countBytes is"
    )
    # As for kube-proxy 1.36.
    needs = ModeNeeds("nftables", kernel=(5, 13, 0))

    def stages(
        self, configuration: KubeProxyConfiguration, families: Sequence[FamilyTables], handles: KernelHandles
    ) -> list[Stage]:
        """Return the table of each family."""
        return [Stage(handles.nftables(context.family), tables[RESOURCE]) for context, tables in families]

    def remembered(self, flow: Flow, port: ServicePortInfo, handles: KernelHandles) -> list[Remembered]:
        """See the base class; each endpoint has a set of its clients."""
        found: list[Remembered] = []
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            for endpoint in port.endpoints if port.affinity_seconds else ():
                seconds = remembered_seconds(sock, flow.family, clients_set(port, endpoint), flow.client.address)
                if seconds is not None:
                    found.append(Remembered(flow.client.address, endpoint.text, int(seconds)))
        return found

    def traffic(self, context: FamilyContext, frontends: Frontends, handles: KernelHandles) -> list[Sample]:
        """See the base class; elements count the connections, or the packets, that look them up."""
        with_connections, with_bytes = context.settings.count_connections, context.settings.count_bytes
        if not with_connections and not with_bytes:
            return []
        from ..traffic.samples import of_elements

        return of_elements(frontends, with_connections, with_bytes)

    def packets(self, contexts: Iterable[FamilyContext], handles: KernelHandles) -> Mapping[str, Any]:
        """See the base class: node ports at loopback addresses (KEP-6032)."""
        families = [context.family for context in contexts if context.settings.localhost_rejected]
        if not families:
            return {}
        from ...kernel.nftables.traffic.element_counters import refused_at_loopback

        sockets = {family: handles.listeners.at_loopback(family) for family in families}
        return {
            LOCALHOST_LISTENERS: {(family,): number for family, (number, _failed) in sockets.items()},
            LOCALHOST_UNOPENED: {(family,): failed for family, (_number, failed) in sockets.items()},
            LOCALHOST_COUNTS: refused_at_loopback(families),
        }


NFTABLES_MODE = NftablesMode()
