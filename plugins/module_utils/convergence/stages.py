# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Building blocks of the stages of modes, and the stages that remove what a mode left.

Removals are planned and applied after the resources of the mode in effect: the new entries exist first, and
connections that began meanwhile are not interrupted.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Container, Dict, List, Mapping, NamedTuple, Sequence, Tuple, Union, cast

from ..addresses import FAMILIES, IPV4
from ..errors import KernelError
from ..kernel.ipset.sets import SetElementsResource, SetsResource
from ..kernel.ipvs.connections import used_connections
from ..kernel.ipvs.servers import RealServersResource, TimeoutsResource, VirtualServersResource
from ..kernel.links import AddressDeviceResource, AddressesResource, DummyDeviceResource, MonitoringDeviceResource
from ..kernel.nftables.unused import UnusedResource
from ..kernel.xtables.chains import ChainsResource
from ..kernel.xtables.emptied import EmptiedTablesResource
from ..kernel.xtables.variant import NFT, Survey, XtablesVariant, detect_variant, unsupported_reason
from ..rendering.iptables.fixed import ownership as iptables_ownership
from ..rendering.iptables.tables import Ownership
from ..rendering.ipvs import chains as ipvs_chains
from ..rendering.ipvs import model as ipvs
from ..rendering.ipvs.sets import known_definitions
from ..rendering.settings import DataplaneSettings
from ..rendering.userspace.model import DEVICE as USERSPACE_DEVICE
from ..resources import Change, ObservedOnce, Resource, Stage
from .family import FamilyContext
from .handles import KernelHandles
from .leftovers import StillConnected, node_ports
from .localnet import localnet_stage

Desired = Union[Mapping[Any, Any], Callable[[Mapping[Any, Any]], Mapping[Any, Any]]]


class NotThereYet(Resource[Any, Any]):
    """Check-mode stand-in for a resource whose kernel module is not loaded; always empty."""

    def __init__(self, resource: Resource[Any, Any]) -> None:
        self.kind, self.family = resource.kind, resource.family
        self.atomic = resource.atomic
        self.describe = resource.describe  # type: ignore[method-assign]

    def observe(self) -> Dict[Any, Any]:
        """Return an empty table."""
        return {}

    def apply(self, change: Change[Any, Any]) -> None:
        """Do nothing; never called, because a check applies nothing."""


class OnlyOurServers(Resource[Any, Any]):
    """Virtual or real servers that belong to Services, identified without a record of them, for removal.

    IPVS does not mark ownership. A server is ours if its address is on the dummy device, or if its address is one of
    the node's own and its port is one of the node ports in our sets. All others are kept, except ``others``: virtual
    servers that are known to be ours.
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
        """Return the servers that are ours. Raises KernelError."""
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
        """Describe an entry as the wrapped resource does."""
        return self._resource.describe(key, value)


def chain_ownership(settings: DataplaneSettings, with_shared: bool) -> Ownership:
    """Return the ownership of chains for iptables and ipvs mode: both write to the same tables with the same names."""
    ours = iptables_ownership(settings)
    both = ours._replace(fixed=ours.fixed | ipvs_chains.ownership().fixed)
    return both if with_shared else both._replace(shared=frozenset(), presence_only=frozenset())


def chain_stages(context: FamilyContext, desired: Desired, with_shared: bool) -> List[Stage]:
    """Return the stage of the chains of a family. ``with_shared``: chains shared with other programs are ours too."""
    if context.variant is None:
        return []
    return [Stage(ChainsResource(context.variant, chain_ownership(context.settings, with_shared)), desired)]


def xtables_families(families: Sequence[str]) -> Tuple[Dict[str, XtablesVariant], Dict[str, str]]:
    """Return the iptables of each family, and why a family has none that can do NAT."""
    variants: Dict[str, XtablesVariant] = {}
    missing: Dict[str, str] = {}
    survey = Survey()
    for family in families:
        try:
            variant = detect_variant(family, survey=survey)
        except KernelError as error:
            missing[family] = str(error)
            continue
        reason = unsupported_reason(family, variant)
        if reason:
            missing[family] = reason
        else:
            variants[family] = variant
    return variants, missing


class IpvsResources(NamedTuple):
    """The resources of ipvs mode for one family.

    ``connections`` and ``used`` are results of the last observation of real servers.
    """

    sets: Resource[Any, Any]
    elements: Resource[Any, Any]
    servers: Resource[Any, Any]
    real_servers: Resource[Any, Any]
    addresses: Resource[Any, Any]
    connections: Callable[[], Mapping[ipvs.RealServerKey, int]]
    used: Callable[[], Mapping[ipvs.RealServerKey, int]]


def ipvs_resources(handles: KernelHandles, family: str) -> IpvsResources:
    """Return the resources of ipvs mode for a family. Raises KernelError."""
    known = known_definitions(family)
    real_servers = RealServersResource(handles.ipvs, family)
    return IpvsResources(
        sets=SetsResource(handles.ipset, known, family),
        elements=SetElementsResource(handles.ipset, known, family),
        servers=VirtualServersResource(handles.ipvs, family),
        real_servers=real_servers,
        addresses=AddressesResource(handles.route, family),
        connections=lambda: real_servers.connections,
        used=lambda: real_servers.used,
    )


def observed_once(resources: IpvsResources) -> IpvsResources:
    """Return resources that are observed only once, for one plan in which several stages use them."""
    return resources._replace(
        elements=ObservedOnce(resources.elements),
        servers=ObservedOnce(resources.servers),
        real_servers=ObservedOnce(resources.real_servers),
        addresses=ObservedOnce(resources.addresses),
    )


def unloaded_ipvs_resources(handles: KernelHandles, family: str) -> IpvsResources:
    """Return resources without a socket, which can only describe, for a check while IPVS or ipset is not loaded."""
    known, nowhere = known_definitions(family), cast(Any, None)
    return IpvsResources(
        sets=NotThereYet(SetsResource(nowhere, known, family)),
        elements=NotThereYet(SetElementsResource(nowhere, known, family)),
        servers=NotThereYet(VirtualServersResource(nowhere, family)),
        real_servers=NotThereYet(RealServersResource(nowhere, family)),
        addresses=AddressesResource(handles.route, family),
        connections=dict,
        used=dict,
    )


def device_stage(handles: KernelHandles) -> Stage:
    """Return the stage of the dummy device. Raises KernelError."""
    return Stage(DummyDeviceResource(handles.route), {ipvs.DEVICE: "dummy"})


def timeouts_stage(handles: KernelHandles, timeouts: Mapping[str, int], loaded: bool) -> Stage:
    """Return the stage of IPVS timeouts: seconds by name (tcp, tcp_fin, udp), only those to be set.

    With ``loaded`` False IPVS counts as empty and nothing is opened that would load it. Raises KernelError.
    """
    if loaded:
        return Stage(TimeoutsResource(handles.ipvs, timeouts), timeouts)
    return Stage(NotThereYet(TimeoutsResource(cast(Any, None), timeouts)), timeouts)


def ipvs_removal_stages(handles: KernelHandles, draining: bool = False) -> List[Stage]:
    """Return stages that remove what ipvs mode made except chains, in both families; none if IPVS was never loaded.

    With ``draining``, servers with active connections are kept until these end. Raises KernelError.
    """
    device = DummyDeviceResource(handles.route)
    # An agent that was killed leaves it behind.
    monitoring = Stage(MonitoringDeviceResource(handles.route), {})
    if not handles.has_ipset():
        return [Stage(device, {}), monitoring]
    found: List[StillConnected] = []
    stages: List[Stage] = []
    for family in FAMILIES:
        known = known_definitions(family)
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


def address_device_stage(handles: KernelHandles) -> Stage:
    """Return the stage of the device of userspace mode. Raises KernelError."""
    resource = AddressDeviceResource(handles.route, USERSPACE_DEVICE)
    return Stage(resource, resource.desired)


def userspace_addresses(handles: KernelHandles, family: str) -> AddressesResource:
    """Return the addresses on the device of userspace mode. Raises KernelError."""
    return AddressesResource(handles.route, family, USERSPACE_DEVICE, deprecated=True)


def userspace_removal_stages(handles: KernelHandles) -> List[Stage]:
    """Return stages that remove the device of userspace mode, its addresses, and listeners of the running agent.

    Connections through the agent are reset. They could not continue: another mode redirects their next packets, which
    connection tracking does not know, to an endpoint. Raises KernelError.
    """
    device = AddressDeviceResource(handles.route, USERSPACE_DEVICE)
    addresses = [Stage(userspace_addresses(handles, family), {}) for family in FAMILIES]
    return [Stage(device, {}), *addresses, *(Stage(item, {}) for item in handles.listeners.left(FAMILIES))]


def nftables_removal_stages(handles: KernelHandles) -> List[Stage]:
    """Return stages that remove the tables of nftables mode; none if nf_tables is not loaded."""
    if not handles.has_nftables():
        return []
    return [Stage(handles.nftables(family), {}) for family in FAMILIES]


def release_stages(handles: KernelHandles) -> List[Stage]:
    """Return stages that remove objects that kube-proxy, now in charge in nftables mode, does not use."""
    if not handles.has_nftables():
        return []
    return [Stage(UnusedResource(family, functools.partial(handles.nftables, family)), {}) for family in FAMILIES]


def chain_removal_stages(contexts: Sequence[FamilyContext]) -> List[Stage]:
    """Return stages that remove the chains of iptables and ipvs mode, and the jumps to them, of each family.

    Tables of iptables-nft that are empty afterwards are removed as well.
    """
    stages: List[Stage] = []
    for context in contexts:
        if context.variant is None:
            continue
        chains = ChainsResource(context.variant, chain_ownership(context.settings, True), for_removal=True)
        going = ObservedOnce(chains)
        if context.family == IPV4:
            stages.append(localnet_stage(going))
        stages.append(Stage(going, {}))
        if context.variant.name == NFT:
            stages.append(Stage(EmptiedTablesResource(chains), {}))
    return stages


def shared_chain_stages(contexts: Sequence[FamilyContext]) -> List[Stage]:
    """Return stages that remove the chain that iptables mode shares with kubelet, unless kubelet uses it."""
    stages = []
    for context in contexts:
        if context.variant is None:
            continue
        ours = iptables_ownership(context.settings)
        shared = ours._replace(fixed=frozenset(), prefixes={}, presence_only=frozenset())
        resource = ChainsResource(context.variant, shared, for_removal=True)
        resource.qualifier = "shared with kubelet"
        going = ObservedOnce(resource)
        if context.family == IPV4:
            stages.append(localnet_stage(going))
        stages.append(Stage(going, {}))
    return stages
