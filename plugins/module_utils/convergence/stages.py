# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From routes to stages: which resources each mode has, in which order, and what they should hold.

The order is that of dependence: sets before the chains that match them, chains before the virtual servers whose
connections they masquerade, and the addresses that make a Service reachable last. Removal goes the other way.
Leftovers of other modes come after the resources of the mode in effect, so that what is new is there first, and are
looked at then: a connection that began meanwhile is not cut off.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Union, cast

from ..addresses import FAMILIES, IPV4, Network, parse_network
from ..configuration.model import IPVS, NFTABLES, KubeProxyConfiguration
from ..kernel.ipset import SetElementsResource, SetsResource
from ..kernel.ipvs import RealServersResource, TimeoutsResource, VirtualServersResource
from ..kernel.ipvs_connections import used_connections
from ..kernel.links import AddressesResource, DummyDeviceResource, MonitoringDeviceResource
from ..kernel.nftables.unused import UnusedResource
from ..kernel.xtables.chains import ChainsResource
from ..kernel.xtables.emptied import EmptiedTablesResource
from ..kernel.xtables.variant import NFT, XtablesVariant
from ..rendering.iptables.fixed import ownership as iptables_ownership
from ..rendering.iptables.found_order import in_found_order
from ..rendering.iptables.render import desired_tables as iptables_tables
from ..rendering.iptables.tables import Ownership
from ..rendering.ipvs import chains as ipvs_chains
from ..rendering.ipvs import model as ipvs
from ..rendering.ipvs.draining import with_draining, with_excluded_real_servers, with_excluded_servers
from ..rendering.ipvs.sets import definitions
from ..rendering.ipvs.tables import desired_tables as ipvs_tables
from ..rendering.nftables.objects import RESOURCE as NFTABLES_TABLE
from ..rendering.nftables.tables import desired_tables as nftables_tables
from ..rendering.settings import DataplaneSettings
from ..resources import Change, ObservedOnce, Resource, Stage
from ..serviceports.routes import ServicePortName, ServicePortRoute
from .handles import KernelHandles
from .leftovers import StillConnected, node_ports, replaces_iptables_mode
from .localnet import localnet_stage

Routes = Mapping[ServicePortName, ServicePortRoute]
Tables = Mapping[str, Mapping[Any, Any]]
Desired = Union[Mapping[Any, Any], Callable[[Mapping[Any, Any]], Mapping[Any, Any]]]


class FamilyPlan(NamedTuple):
    """One family to program: its settings, its routes and the iptables it uses (None where the mode needs none).

    ``tables``: the desired tables by name, where somebody keeps them up to date; else they are rendered from the
    routes.
    """

    settings: DataplaneSettings
    routes: Routes
    variant: Optional[XtablesVariant]
    tables: Optional[Tables] = None

    @property
    def family(self) -> str:
        """IPv4 or IPv6."""
        return self.settings.family


class NotThereYet(Resource[Any, Any]):
    """Stands for a resource whose kernel subsystem is not loaded, in a check: there is nothing in it."""

    def __init__(self, resource: Resource[Any, Any]) -> None:
        self.kind, self.family = resource.kind, resource.family
        self.atomic = resource.atomic
        self.describe = resource.describe  # type: ignore[method-assign]

    def observe(self) -> Dict[Any, Any]:
        """Nothing."""
        return {}

    def apply(self, change: Change[Any, Any]) -> None:
        """Never called: a check applies nothing."""


class OnlyOurServers(Resource[Any, Any]):
    """Virtual or real servers that belong to Services, seen without a record of them: for taking them away.

    IPVS has no mark of ownership. Those are ours whose address is on the dummy device, or is one of the node's own and
    the port is one of the node ports that our sets hold. All others stay, except ``others``: virtual servers that are
    known to be ours.
    """

    def __init__(
        self,
        resource: Resource[Any, Any],
        addresses: Resource[str, bool],
        elements: Resource[Any, bool],
        others: Container[ipvs.VirtualServerKey] = (),
    ) -> None:
        self.kind, self.family = resource.kind, resource.family
        self._resource = resource
        self._addresses = addresses
        self._elements = elements
        self._others = others

    def observe(self) -> Dict[Any, Any]:
        """The servers that are ours. Raises KernelError."""
        addresses = self._addresses.observe()
        known_ports = node_ports(self._elements.observe())

        def is_ours(server: ipvs.VirtualServerKey) -> bool:
            if server.address in addresses or (server.protocol, server.port) in known_ports:
                return True
            return server in self._others

        return {key: value for key, value in self._resource.observe().items() if is_ours(ipvs.server_of(key))}

    def apply(self, change: Change[Any, Any]) -> None:
        """Apply the change. Raises KernelError."""
        self._resource.apply(change)

    def describe(self, key: Any, value: Any) -> List[str]:
        """As the resource itself describes it."""
        return self._resource.describe(key, value)


def chain_ownership(settings: DataplaneSettings, with_shared: bool) -> Ownership:
    """Chains of iptables mode and of ipvs mode alike: both write to the same tables, under one set of names."""
    ours = iptables_ownership(settings)
    both = ours._replace(fixed=ours.fixed | ipvs_chains.ownership().fixed)
    return both if with_shared else both._replace(shared=frozenset(), presence_only=frozenset())


def _chains(plan: FamilyPlan, desired: Desired, with_shared: bool) -> List[Stage]:
    if plan.variant is None:
        return []
    return [Stage(ChainsResource(plan.variant, chain_ownership(plan.settings, with_shared)), desired)]


def iptables_stages(plans: Sequence[FamilyPlan]) -> List[Stage]:
    """Stages of iptables mode: the chains of each family."""
    stages: List[Stage] = []
    for plan in plans:
        tables: Tables = plan.tables or dict(iptables_tables(plan.routes, plan.settings))
        stages += _chains(plan, functools.partial(in_found_order, tables["chains"]), with_shared=True)
    return stages


class IpvsResources(NamedTuple):
    """The resources of ipvs mode for one family.

    ``connections`` and ``used`` are what the last observation of real servers told.
    """

    sets: Resource[Any, Any]
    elements: Resource[Any, Any]
    servers: Resource[Any, Any]
    real_servers: Resource[Any, Any]
    addresses: Resource[Any, Any]
    connections: Callable[[], Mapping[ipvs.RealServerKey, int]]
    used: Callable[[], Mapping[ipvs.RealServerKey, int]]


def ipvs_resources(handles: KernelHandles, family: str) -> IpvsResources:
    """The resources of ipvs mode for a family. Raises KernelError."""
    known = definitions(family)
    real_servers = RealServersResource(handles.ipvs, family)
    return IpvsResources(
        SetsResource(handles.ipset, known, family),
        SetElementsResource(handles.ipset, known, family),
        VirtualServersResource(handles.ipvs, family),
        real_servers,
        AddressesResource(handles.route, family),
        lambda: real_servers.connections,
        lambda: real_servers.used,
    )


def observed_once(resources: IpvsResources) -> IpvsResources:
    """The same for one plan, in which several stages look at them."""
    return resources._replace(
        elements=ObservedOnce(resources.elements),
        servers=ObservedOnce(resources.servers),
        real_servers=ObservedOnce(resources.real_servers),
        addresses=ObservedOnce(resources.addresses),
    )


def unloaded_ipvs_resources(handles: KernelHandles, family: str) -> IpvsResources:
    """The same for a check where IPVS or ipset is not loaded: a resource without a socket can still describe."""
    known, nowhere = definitions(family), cast(Any, None)
    return IpvsResources(
        NotThereYet(SetsResource(nowhere, known, family)),
        NotThereYet(SetElementsResource(nowhere, known, family)),
        NotThereYet(VirtualServersResource(nowhere, family)),
        NotThereYet(RealServersResource(nowhere, family)),
        AddressesResource(handles.route, family),
        dict,
        dict,
    )


def ipvs_stages(
    plans: Sequence[FamilyPlan], handles: KernelHandles, timeouts: Mapping[str, int], loaded: bool = True
) -> List[Stage]:
    """Stages of ipvs mode. ``timeouts``: seconds by name (tcp, tcp_fin, udp), only those to be set.

    With ``loaded`` False nothing is opened that would load IPVS or ipset: both count as empty. Raises KernelError.
    """
    stages = [Stage(DummyDeviceResource(handles.route), {ipvs.DEVICE: "dummy"})]
    if timeouts:
        resource: Resource[Any, Any] = TimeoutsResource(handles.ipvs if loaded else cast(Any, None), timeouts)
        stages.append(Stage(resource if loaded else NotThereYet(resource), timeouts))
    for plan in plans:
        find = ipvs_resources if loaded else unloaded_ipvs_resources
        stages += _ipvs_family_stages(plan, find(handles, plan.family))
    return stages


def _ipvs_family_stages(plan: FamilyPlan, resources: IpvsResources) -> List[Stage]:
    tables: Tables = plan.tables or ipvs_tables(plan.routes, plan.settings)
    networks = map(parse_network, plan.settings.exclude_cidrs)
    excluded: List[Network] = [network for network in networks if network is not None]
    servers, real_servers = tables[ipvs.VIRTUAL_SERVERS], tables[ipvs.REAL_SERVERS]

    def all_servers(observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return with_excluded_servers(servers, observed, excluded)

    def all_real_servers(observed: Mapping[Any, Any]) -> Mapping[Any, Any]:
        kept = with_excluded_real_servers(real_servers, observed, servers, excluded)
        return with_draining(kept, observed, resources.connections(), servers)

    return [
        Stage(resources.sets, tables[ipvs.SETS]),
        Stage(resources.elements, tables[ipvs.SET_ELEMENTS]),
        # Where the chains of iptables mode go, these serve until everything else is there.
        *(item._replace(postponed=replaces_iptables_mode) for item in _chains(plan, tables[ipvs.CHAINS], False)),
        Stage(resources.servers, all_servers),
        Stage(resources.real_servers, all_real_servers),
        Stage(resources.addresses, tables[ipvs.ADDRESSES]),
    ]


def ipvs_removal_stages(handles: KernelHandles, draining: bool = False) -> List[Stage]:
    """Stages that take away what ipvs mode made, chains aside, in both families; nothing if IPVS was never loaded.

    With ``draining``, what connections in use go through stays as long as they are. Raises KernelError.
    """
    device = DummyDeviceResource(handles.route)
    # An agent that was killed leaves it behind.
    monitoring = Stage(MonitoringDeviceResource(handles.route), {})
    if not handles.has_ipset():
        return [Stage(device, {}), monitoring]
    found: List[StillConnected] = []
    stages: List[Stage] = []
    for family in FAMILIES:
        known = definitions(family)
        sets, elements = SetsResource(handles.ipset, known, family), SetElementsResource(handles.ipset, known, family)
        if not handles.has_ipvs():
            stages += [Stage(sets, {}), Stage(elements, {})]
            continue
        resources = observed_once(ipvs_resources(handles, family))
        owned = resources.addresses, resources.elements
        servers = OnlyOurServers(resources.servers, *owned)
        real_servers = OnlyOurServers(resources.real_servers, *owned)
        listed = functools.partial(used_connections, family)
        kept = StillConnected(real_servers, resources.elements, listed, resources.used, draining)
        found.append(kept)
        stages += [
            Stage(resources.sets, kept.sets),
            Stage(resources.elements, kept.elements),
            Stage(servers, kept.servers),
            Stage(real_servers, kept.real_servers),
            Stage(resources.addresses, kept.addresses),
        ]

    def devices(observed: Mapping[str, str]) -> Mapping[str, str]:
        return observed if any(kept.any() for kept in found) else {}

    return [Stage(device, devices), *stages, monitoring]


def nftables_stages(plans: Sequence[FamilyPlan], handles: KernelHandles) -> List[Stage]:
    """Stages of nftables mode: the table of each family."""
    stages: List[Stage] = []
    for plan in plans:
        tables: Tables = plan.tables or dict(nftables_tables(plan.routes, plan.settings))
        stages.append(Stage(handles.nftables(plan.family), tables[NFTABLES_TABLE]))
    return stages


def nftables_removal_stages(handles: KernelHandles) -> List[Stage]:
    """Stages that take away the tables of nftables mode; nothing if the kernel has no nf_tables loaded."""
    if not handles.has_nftables():
        return []
    return [Stage(handles.nftables(family), {}) for family in FAMILIES]


def release_stages(handles: KernelHandles) -> List[Stage]:
    """Stages that remove what kube-proxy, which has taken the node over in nftables mode, does not use."""
    if not handles.has_nftables():
        return []
    return [Stage(UnusedResource(family, functools.partial(handles.nftables, family)), {}) for family in FAMILIES]


def chain_removal_stages(plans: Sequence[FamilyPlan]) -> List[Stage]:
    """Stages that take away the chains of iptables and ipvs mode, and the jumps to them, of each family.

    Tables of iptables-nft that are empty afterwards go as well.
    """
    stages: List[Stage] = []
    for item in plans:
        if item.variant is None:
            continue
        chains = ChainsResource(item.variant, chain_ownership(item.settings, True), for_removal=True)
        going = ObservedOnce(chains)
        if item.family == IPV4:
            stages.append(localnet_stage(going))
        stages.append(Stage(going, {}))
        if item.variant.name == NFT:
            stages.append(Stage(EmptiedTablesResource(chains), {}))
    return stages


def own_stages(
    configuration: KubeProxyConfiguration, plans: Sequence[FamilyPlan], handles: KernelHandles, loaded: bool = True
) -> List[Stage]:
    """The stages of the configured mode alone. ``loaded`` as in :func:`ipvs_stages`. Raises KernelError."""
    if configuration.mode == IPVS:
        settings = configuration.ipvs
        timeouts = {"tcp": settings.tcp_timeout, "tcp_fin": settings.tcp_fin_timeout, "udp": settings.udp_timeout}
        wanted = {name: int(seconds) for name, seconds in timeouts.items() if seconds >= 1}
        return ipvs_stages(plans, handles, wanted, loaded)
    return nftables_stages(plans, handles) if configuration.mode == NFTABLES else iptables_stages(plans)


def leftover_stages(mode: str, handles: KernelHandles, others: Sequence[FamilyPlan] = ()) -> List[Stage]:
    """The stages that take away what other modes than ``mode`` left behind.

    ``others``: the iptables of the node, in which nftables mode looks for chains that another mode made. The chains of
    iptables and ipvs mode are one table, so these two need nothing for each other. Raises KernelError.
    """
    stages = [] if mode == IPVS else ipvs_removal_stages(handles, draining=True)
    return [*stages, *(chain_removal_stages(others) if mode == NFTABLES else nftables_removal_stages(handles))]


def shared_chain_stages(plans: Sequence[FamilyPlan]) -> List[Stage]:
    """Stages that take away the chain that iptables mode shares with kubelet, where kubelet does not use it."""
    stages = []
    for plan in plans:
        if plan.variant is None:
            continue
        ours = iptables_ownership(plan.settings)
        shared = ours._replace(fixed=frozenset(), prefixes={}, presence_only=frozenset())
        resource = ChainsResource(plan.variant, shared, for_removal=True)
        resource.qualifier = "shared with kubelet"
        going = ObservedOnce(resource)
        if plan.family == IPV4:
            stages.append(localnet_stage(going))
        stages.append(Stage(going, {}))
    return stages


def mode_stages(
    configuration: KubeProxyConfiguration, plans: Sequence[FamilyPlan], handles: KernelHandles, check: bool
) -> List[Stage]:
    """The stages of the configured mode; those of :func:`leftover_stages` come after they have been applied.

    In a check, subsystems that are not loaded yet count as empty instead of being loaded. Raises KernelError.
    """
    loaded = not check or (handles.has_ipvs() and handles.has_ipset())
    stages = own_stages(configuration, plans, handles, loaded)
    return [*stages, *(shared_chain_stages(plans) if configuration.mode == IPVS else ())]


def removal_stages(plans: Sequence[FamilyPlan], handles: KernelHandles) -> List[Stage]:
    """The stages that take away all that any mode made, in an order in which nothing is still referred to."""
    return [*ipvs_removal_stages(handles), *chain_removal_stages(plans), *nftables_removal_stages(handles)]
