# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One IP family on this node: its desired tables, the resources that hold them, and the two ways to sync.

A *partial* sync applies what changed in the desired tables without looking at the kernel. A *full* one observes
everything; it comes first, after a failure, and when somebody else may have changed something.
"""

from __future__ import annotations

import time
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Set, Tuple

from ...addresses import parse_network
from ...cluster.model import NamespacedName, Service
from ...cluster.state import ClusterState
from ...configuration.model import IPVS, KubeProxyConfiguration
from ...convergence.handles import KernelHandles
from ...convergence.stages import FamilyPlan, own_stages
from ...kernel.conntrack import ConntrackSocket, delete_stale_udp
from ...kernel.ipset import SetElementsResource, SetsResource
from ...kernel.ipvs import RealServersResource, VirtualServersResource
from ...kernel.links import AddressesResource
from ...kernel.nftables.resource import NftablesResource
from ...kernel.xtables.chains import ChainsResource
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.draining import in_networks
from ...rendering.ipvs.entries import is_node_address
from ...rendering.nftables.objects import RESOURCE
from ...rendering.settings import DataplaneSettings
from ...resources import Change, PlannedChange, Resource, Stage, apply_plan, plan
from ...serviceports.table import RoutingContext, routes_for_service
from .summaries import Summaries
from .tables import Changes, DesiredTables, desired_tables

_TABLE_OF = (
    (ChainsResource, ipvs.CHAINS),
    (SetsResource, ipvs.SETS),
    (SetElementsResource, ipvs.SET_ELEMENTS),
    (VirtualServersResource, ipvs.VIRTUAL_SERVERS),
    (RealServersResource, ipvs.REAL_SERVERS),
    (AddressesResource, ipvs.ADDRESSES),
    (NftablesResource, RESOURCE),
)

_SERVICES_BETWEEN_PROGRESS = 500


def table_of(resource: Resource[Any, Any]) -> str:
    """The name of the desired table that a resource holds; empty for one that never changes (the dummy device)."""
    return next((name for kind, name in _TABLE_OF if isinstance(resource, kind)), "")


def settings_in_use(settings: DataplaneSettings, mode: str) -> DataplaneSettings:
    """Return the settings with nothing in them that the mode does not use, for comparison.

    Addresses count as a set. Which interface has one does not matter, link-local ones are no addresses of the node, and
    where node ports answer on all addresses no list of them is used but by ipvs mode.
    """
    owned = {address for _interface, address in settings.node_addresses if is_node_address(address)}
    chosen = settings.node_port_addresses if settings.node_port_cidrs else ()
    return settings._replace(
        node_addresses=tuple(("", address) for address in sorted(owned)) if mode == IPVS else (),
        node_port_addresses=tuple(sorted(set(chosen))),
    )


def _is_external(service: Service) -> bool:
    """Whether a Service can be reached by addresses of the node, or by addresses that may be the node's as well."""
    return bool(
        service.external_ips or service.load_balancer_ips or any(port.node_port for port in service.ports)
    )


class SyncResult(NamedTuple):
    """What a sync did: entries added, replaced, removed; seconds by label of the resource; the changes."""

    added: int
    replaced: int
    removed: int
    seconds: Dict[str, float]
    changes: List[PlannedChange]


def result_of(planned: Iterable[PlannedChange], seconds: Dict[str, float]) -> SyncResult:
    """Count planned changes that have been applied."""
    changes = [item for item in planned if item.change]
    return SyncResult(
        sum(len(item.change.added) for item in changes),
        sum(len(item.change.replaced) for item in changes),
        sum(len(item.change.removed) for item in changes),
        seconds,
        changes,
    )


class Proxier:
    """Keeps one family true. ``needs_full``: the next sync has to observe the kernel.

    ``draining``: real servers at weight 0 that go when their last connection has ended.
    """

    def __init__(
        self,
        configuration: KubeProxyConfiguration,
        empty_plan: FamilyPlan,
        context: RoutingContext,
        handles: KernelHandles,
    ) -> None:
        self.family = empty_plan.family
        self.context = context
        self.mode = configuration.mode
        self.settings = empty_plan.settings
        self.variant = empty_plan.variant
        self.needs_full = True
        self.summaries = Summaries()
        self.tables: DesiredTables = desired_tables(configuration.mode, empty_plan.settings)
        plans = [empty_plan._replace(tables=self.tables.desired)]
        self.stages: List[Stage] = own_stages(configuration, plans, handles)
        for stage in self.stages:
            stage.resource.report_to(handles.progress)
        self.draining: Dict[ipvs.RealServerKey, ipvs.RealServer] = {}
        self._handles = handles
        self._excluded = [network for network in map(parse_network, self.settings.exclude_cidrs) if network is not None]
        self._udp_changed: Set[NamespacedName] = set()

    def take(self, state: ClusterState, services: Iterable[NamespacedName]) -> None:
        """Route these Services anew and bring the desired tables up to date; the kernel is not touched."""
        self._put(state, services)
        if self.tables.stale:
            self.tables.settle()
            self._put(state, state.services)

    def follow(self, settings: DataplaneSettings, state: ClusterState) -> bool:
        """Take settings whose addresses or ServiceCIDRs may be others; return whether this changed desired tables.

        Only what depends on them is worked out again, and the next sync applies the difference. The kernel is not
        touched.
        """
        before, self.settings = self.settings, settings
        if settings_in_use(before, self.mode) == settings_in_use(settings, self.mode):
            return False
        if self.tables.follow(settings):
            self._put(state, [name for name, service in state.services.items() if _is_external(service)])
        return True

    def _put(self, state: ClusterState, services: Iterable[NamespacedName]) -> None:
        for number, service in enumerate(services):
            if number % _SERVICES_BETWEEN_PROGRESS == 0:
                self._handles.progress()
            routes = routes_for_service(state, service, self.context)
            self.tables.put(service, routes)
            if self.summaries.put(service, routes):
                self._udp_changed.add(service)

    def is_cold(self) -> bool:
        """Whether the kernel holds nothing of ours yet. Raises KernelError."""
        return not any(stage.resource.observe() for stage in self.stages if table_of(stage.resource))

    def full(self) -> SyncResult:
        """Observe everything and repair what differs. Raises KernelError; the next sync is full then, too."""
        self.needs_full = True
        self.tables.take_changes()
        planned = plan(self.stages)
        seconds = apply_plan(planned)
        self._remember_draining()
        self.needs_full = False
        return result_of(planned, seconds)

    def partial(self) -> SyncResult:
        """Apply what changed in the desired tables. Raises KernelError; the next sync is full then."""
        changes = self.tables.take_changes()
        self.needs_full = True
        planned = self._planned(changes)
        seconds = apply_plan(planned)
        self.needs_full = False
        return result_of(planned, seconds)

    def _planned(self, changes: Changes) -> List[PlannedChange]:
        if ipvs.REAL_SERVERS in changes:
            changes[ipvs.REAL_SERVERS] = self._with_draining(changes)
        if self._excluded and ipvs.VIRTUAL_SERVERS in changes:
            self._leave_excluded(changes)
        nothing: Change[Any, Any] = Change()
        return [
            PlannedChange(stage.resource, changes.get(table_of(stage.resource), nothing)) for stage in self.stages
        ]

    def _leave_excluded(self, changes: Changes) -> None:
        """Virtual servers in the excluded ranges are left to others even when a Service that had them goes."""
        servers = changes[ipvs.VIRTUAL_SERVERS]
        kept = {key for key in servers.removed if in_networks(key.address, self._excluded)}
        for key in kept:
            del servers.removed[key]
        real = changes.get(ipvs.REAL_SERVERS)
        if real is not None:
            for key in [key for key in real.removed if key.server in kept]:
                del real.removed[key]

    def _real_servers_resource(self) -> RealServersResource:
        return next(stage.resource for stage in self.stages if isinstance(stage.resource, RealServersResource))

    def _remember_draining(self) -> None:
        """After a full sync: the real servers that the resource's stage left at weight 0."""
        self.draining.clear()
        desired: Mapping[Any, Any] = self.tables.desired.get(ipvs.REAL_SERVERS, {})
        servers: Mapping[Any, Any] = self.tables.desired.get(ipvs.VIRTUAL_SERVERS, {})
        if not servers:
            return
        for key, count in self._real_servers_resource().connections.items():
            if count and key not in desired and key.server.protocol == "tcp" and key.server in servers:
                self.draining[key] = ipvs.RealServer(0)

    def _connections(self, keys: Iterable[ipvs.RealServerKey]) -> Mapping[ipvs.RealServerKey, int]:
        """Connections of the real servers of those virtual servers that these keys belong to."""
        return self._handles.ipvs.real_servers_of({key.server for key in keys}).connections

    def _with_draining(self, changes: Changes) -> Change[Any, Any]:
        """The change of real servers: those that go but have connections are kept at weight 0 until these ended."""
        change = changes[ipvs.REAL_SERVERS]
        removed_servers = changes[ipvs.VIRTUAL_SERVERS].removed if ipvs.VIRTUAL_SERVERS in changes else {}
        for key in [key for key in self.draining if key.server in removed_servers]:
            del self.draining[key]
        for key in [key for key in change.added if key in self.draining]:
            change.replaced[key] = (self.draining.pop(key), change.added.pop(key))
        leaving = [
            key for key in change.removed if key.server.protocol == "tcp" and key.server not in removed_servers
        ]
        if leaving:
            connections = self._connections(leaving)
            for key in leaving:
                if connections.get(key):
                    before = change.removed.pop(key)
                    self.draining[key] = before._replace(weight=0)
                    change.replaced[key] = (before, self.draining[key])
        return change

    def drain(self) -> int:
        """Remove draining real servers whose last connection has ended; returns their number. Raises KernelError."""
        if not self.draining:
            return 0
        connections = self._connections(self.draining)
        ended = {key: value for key, value in self.draining.items() if not connections.get(key)}
        if ended:
            self._real_servers_resource().apply(Change(removed=ended))
            for key in ended:
                del self.draining[key]
        return len(ended)

    def clean_conntrack(self, state: ClusterState) -> Tuple[int, float]:
        """Delete stale UDP entries of the Services whose serving UDP endpoints changed since the last call.

        Returns how many, and the seconds it took (0 if nothing was looked at). Raises KernelError.
        """
        services, self._udp_changed = self._udp_changed, set()
        if not services:
            return 0, 0.0
        started = time.monotonic()
        routes = [route for name in services for route in routes_for_service(state, name, self.context)]
        try:
            with ConntrackSocket() as sock:
                deleted = delete_stale_udp(sock, self.family, routes)
        except BaseException:
            self._udp_changed |= services
            raise
        return deleted, time.monotonic() - started
