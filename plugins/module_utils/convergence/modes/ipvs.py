# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ipvs mode: virtual servers, ipsets, chains that match them, and addresses on the dummy device.

Sets come before the chains that match them, chains before the virtual servers whose connections they masquerade, and
the addresses that make a Service reachable last.
"""

from __future__ import annotations

import itertools
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

from ...configuration.model import KubeProxyConfiguration
from ...errors import ProxyError
from ...kernel.ipvs.servers import RealServersResource
from ...kernel.xtables.restore import RestoreError
from ...preflight.check import ModeNeeds
from ...preflight.features import IPVS_EXTENSIONS
from ...preflight.limits import SetContribution, ipvs_set_contributions
from ...rendering.desired import Changes
from ...rendering.iptables.tables import CHAINS
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.draining import (
    drain_change,
    draining_servers,
    ended,
    keep_excluded,
    leaving,
    networks_of,
    with_draining,
    with_excluded_real_servers,
    with_excluded_servers,
)
from ...rendering.ipvs.mode import RENDERING
from ...resources import Change, Stage
from ...serviceports.info import Endpoint, ServicePortInfo
from ..family import FamilyContext, FamilyServices, FamilyTables
from ..handles import KernelHandles
from ..stages.chains import chain_stages, shared_chain_stages, xtables_families
from ..stages.ipvs import IpvsResources, device_stage, ipvs_resources, timeouts_stage, unloaded_ipvs_resources
from ..stages.still_connected import replaces_iptables_mode
from .mode import Adjustments, Deprecation, Families, Mode, Subsystems


class IpvsMode(Mode):
    """See the base class."""

    rendering = RENDERING
    subsystems = Subsystems(chains=True, ipvs=True, device=ipvs.DEVICE)
    needs = ModeNeeds("ipvs", extensions=IPVS_EXTENSIONS, ipvs=True)
    measures_kinds = False
    deprecation = Deprecation(
        "IPVSDeprecation", "The ipvs proxier is now deprecated and may be removed in a future release."
    )

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

    def stages(
        self,
        configuration: KubeProxyConfiguration,
        families: Sequence[FamilyTables],
        handles: KernelHandles,
        loaded: bool = True,
    ) -> List[Stage]:
        """Return the dummy device, the timeouts that are set, and the tables of each family."""
        settings = configuration.ipvs
        timeouts = {"tcp": settings.tcp_timeout, "tcp_fin": settings.tcp_fin_timeout, "udp": settings.udp_timeout}
        wanted = {name: int(seconds) for name, seconds in timeouts.items() if seconds >= 1}
        stages = [device_stage(handles)]
        if wanted:
            stages.append(timeouts_stage(handles, wanted, loaded))
        find = ipvs_resources if loaded else unloaded_ipvs_resources
        for context, tables in families:
            stages += _family_stages(context, tables, find(handles, context.family))
        return stages

    def extra_stages(self, families: Sequence[FamilyContext]) -> List[Stage]:
        """Return the stages that remove the chain which iptables mode shares with kubelet."""
        return shared_chain_stages(families)

    def adjustments(self, context: FamilyContext, stages: Sequence[Stage], handles: KernelHandles) -> Adjustments:
        """See the base class."""
        resource = next(item.resource for item in stages if isinstance(item.resource, RealServersResource))
        return ServersInUse(context, resource, handles)

    def failure_counters(self, error: ProxyError, partial: bool) -> Tuple[str, ...]:
        """Count transactions that iptables-restore refused."""
        return ("iptables_restore_failures",) if isinstance(error, RestoreError) else ()


def _family_stages(
    context: FamilyContext, tables: Mapping[str, Mapping[Any, Any]], resources: IpvsResources
) -> List[Stage]:
    excluded = networks_of(context.settings.exclude_cidrs)
    servers, real_servers = tables[ipvs.VIRTUAL_SERVERS], tables[ipvs.REAL_SERVERS]

    def all_servers(observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return with_excluded_servers(servers, observed, excluded)

    def all_real_servers(observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        kept = with_excluded_real_servers(real_servers, observed, servers, excluded)
        return with_draining(kept, observed, resources.connections(), servers)

    # If this change removes the chains of iptables mode, it does so last, so that they serve until then.
    chains = [item._replace(postponed=replaces_iptables_mode) for item in chain_stages(context, tables[CHAINS], False)]
    return [
        Stage(resources.sets, tables[ipvs.SETS]),
        Stage(resources.elements, tables[ipvs.SET_ELEMENTS]),
        *chains,
        Stage(resources.servers, all_servers),
        Stage(resources.real_servers, all_real_servers),
        Stage(resources.addresses, tables[ipvs.ADDRESSES]),
    ]


class ServersInUse(Adjustments):
    """Keeps draining real servers, and virtual servers in excluded ranges, in partial syncs of one family."""

    def __init__(self, context: FamilyContext, resource: RealServersResource, handles: KernelHandles) -> None:
        self._excluded = networks_of(context.settings.exclude_cidrs)
        self._resource = resource
        self._handles = handles
        self._draining: Dict[ipvs.RealServerKey, ipvs.RealServer] = {}

    @property
    def draining(self) -> int:
        """The number of real servers that are kept at weight 0 until their last connection has ended."""
        return len(self._draining)

    def adjust(self, changes: Changes) -> None:
        """See the base class."""
        nothing: Change[Any, Any] = Change()
        servers = changes.get(ipvs.VIRTUAL_SERVERS, nothing)
        real_servers = changes.get(ipvs.REAL_SERVERS, nothing)
        if real_servers:
            connections = self._connections(leaving(real_servers, servers.removed))
            drain_change(real_servers, self._draining, connections, servers.removed)
        keep_excluded(servers, real_servers, self._excluded)

    def observed(self, desired: Mapping[str, Mapping[Any, Any]]) -> None:
        """See the base class."""
        servers = draining_servers(
            desired[ipvs.REAL_SERVERS], self._resource.connections, desired[ipvs.VIRTUAL_SERVERS]
        )
        self._draining = dict.fromkeys(servers, ipvs.RealServer(0))

    def drain(self) -> int:
        """See the base class."""
        if not self._draining:
            return 0
        gone = ended(self._draining, self._connections(self._draining))
        if gone:
            self._resource.apply(Change(removed=gone))
            for key in gone:
                del self._draining[key]
        return len(gone)

    def drop(self, port: ServicePortInfo, endpoint: Endpoint) -> int:
        """Remove the real servers of an endpoint that are kept at weight 0.

        With net.ipv4.vs.expire_nodest_conn their connections end at the next packet.
        """
        addresses = (port.cluster_ip, *port.external_ips, *port.load_balancer_ips)
        gone = {
            key: value
            for key, value in self._draining.items()
            if (key.ip, key.port, key.server.protocol) == (endpoint.ip, endpoint.port, port.protocol)
            and (
                (key.server.port == port.port and key.server.address in addresses) or key.server.port == port.node_port
            )
        }
        if gone:
            self._resource.apply(Change(removed=gone))
            for key in gone:
                del self._draining[key]
        return 0

    def _connections(self, keys: Iterable[ipvs.RealServerKey]) -> Mapping[ipvs.RealServerKey, int]:
        """Return the connections of all real servers of the virtual servers that these keys belong to."""
        servers = {key.server for key in keys}
        return self._handles.ipvs.real_servers_of(servers).connections if servers else {}


IPVS_MODE = IpvsMode()
