# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of a node: all that any mode, of this project or of kube-proxy, may have programmed, as observed.

``form`` has its file format, and ``store`` reads and writes the files.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple, Optional, Sequence

from ..base.addresses import FAMILIES, Network, family_of, networks_of
from ..base.errors import HistoryError
from ..base.mode_names import MODES
from ..convergence.family import removal_contexts
from ..convergence.handles import KernelHandles
from ..convergence.modes.stages.chains import chain_ownership
from ..convergence.modes.stages.ipvs import OnlyOurServers, ipvs_resources, observed_once
from ..convergence.modes.stages.ipvs_filter_backend import filter_backend_resources
from ..kernel.facts import node_facts
from ..kernel.ipvs.servers import TimeoutsResource
from ..kernel.nftables.raw.reading import RawTable
from ..kernel.nftables.raw.resource import RawIpvsTableResource, RawPolicyTableResource, RawTableResource
from ..kernel.parameters.sysctl_profile import (
    CONNTRACK_TIMEOUTS,
    ConntrackProfile,
    ProfileSettings,
    profile,
    wanted_values,
)
from ..kernel.parameters.sysctls import SysctlsResource
from ..kernel.rtnetlink.links import AddressesResource, DummyDeviceResource
from ..kernel.xtables.saved import CHAIN, SavedChainKey, SavedChainsResource
from ..kernel.xtables.variant import XtablesVariant
from ..rendering.iptables.fixed import NODE_PORTS as IPTABLES_NODE_PORTS
from ..rendering.iptables.tables import ChainKey
from ..rendering.ipvs import model as ipvs
from ..rendering.ipvs.chains import LOAD_BALANCER_CHAIN
from ..rendering.ipvs.draining import in_networks
from ..rendering.ipvs.nftables_layout import SETTLING
from ..rendering.ipvs.sets import FAMILY_OF_SET
from ..rendering.settings import DataplaneSettings
from ..resources import ObservedOnce, Resource

TIMEOUTS = ("tcp", "tcp_fin", "udp")


class ChainsState(NamedTuple):
    """The chains in one iptables variant of one family (see kernel.xtables.saved).

    ``places``: the tables and built-in chains that existed.
    """

    family: str
    variant: str
    places: tuple[str, ...]
    chains: dict[SavedChainKey, tuple[str, ...]]


class NodeState(NamedTuple):
    """The observed entries by kind. Both families share one mapping if their keys are distinct."""

    chains: tuple[ChainsState, ...] = ()
    #: By family, the table ``kube-proxy`` (see kernel.nftables.raw.reading), empty if it did not exist.
    nftables: Mapping[str, RawTable] = {}
    #: By family, the table beside IPVS in the same form.
    ipvs_tables: Mapping[str, RawTable] = {}
    #: The table of network policies in the same form; None if an older version saved the state.
    network_policy: Optional[RawTable] = None
    sets: Mapping[str, ipvs.SetDefinition] = {}
    set_elements: Mapping[ipvs.SetElementKey, bool] = {}
    virtual_servers: Mapping[ipvs.VirtualServerKey, ipvs.VirtualServer] = {}
    real_servers: Mapping[ipvs.RealServerKey, ipvs.RealServer] = {}
    #: The dummy device and its kind, if it existed.
    devices: Mapping[str, str] = {}
    #: The addresses on the dummy device.
    addresses: Mapping[str, bool] = {}
    #: Timeouts of IPVS, in seconds.
    timeouts: Mapping[str, int] = {}
    sysctls: Mapping[str, str] = {}
    #: Networks of virtual servers of other programs, which are not in ``virtual_servers``.
    exclude_cidrs: tuple[str, ...] = ()
    #: Another program served the Services, so the state has nothing of them to restore.
    policies_standalone: bool = False

    def counts(self) -> dict[str, int]:
        """Return the number of entries of each kind, for a list of saved states."""
        return {
            "chains": sum(key.kind == "chain" for item in self.chains for key in item.chains),
            "nftables_objects": sum(len(table) for table in self.nftables.values()),
            "ipvs_table_objects": sum(len(table) for table in self.ipvs_tables.values()),
            "network_policy_objects": len(self.network_policy or {}),
            "virtual_servers": len(self.virtual_servers),
            "real_servers": len(self.real_servers),
            "set_elements": len(self.set_elements),
            "addresses": len(self.addresses),
        }

    def rules(self) -> Iterator[str]:
        """Yield the rules of all chains."""
        for item in self.chains:
            for rules in item.chains.values():
                yield from rules

    @property
    def uses_ipvs(self) -> bool:
        """Whether Services are served through IPVS.

        Another mode may have left the device and virtual servers there, because connections through them had not ended.
        """
        if not (self.devices or self.virtual_servers):
            return False
        if self._has_chain(LOAD_BALANCER_CHAIN) or any(SETTLING in table for table in self.ipvs_tables.values()):
            return True
        return not (any(self.nftables.values()) or self._has_chain(IPTABLES_NODE_PORTS))

    def _has_chain(self, chain: ChainKey) -> bool:
        key = SavedChainKey(CHAIN, chain.table, chain.chain)
        return any(key in item.chains for item in self.chains)

    def mode(self) -> str:
        """Return the mode that the entries belong to: nftables, ipvs, iptables, or empty if nothing is programmed."""
        if self.uses_ipvs:
            return "ipvs"
        if any(self.nftables.values()):
            return "nftables"
        return "iptables" if any(item.chains for item in self.chains) else ""


def sysctl_keys() -> list[str]:
    """Return the kernel parameters that any mode may set on this node. Raises KernelError."""
    version = node_facts().kernel_version
    conntrack = ConntrackProfile(maximum=1, timeouts=dict.fromkeys(CONNTRACK_TIMEOUTS, 1), be_liberal=True)
    keys: dict[str, None] = {}
    for mode in MODES:
        settings = ProfileSettings(
            mode=mode, kernel_version=version, strict_arp=True, route_localnet=True, conntrack=conntrack
        )
        keys.update(dict.fromkeys(wanted_values(profile(settings))))
    return list(keys)


def chains_resources(states: Sequence[ChainsState]) -> list[SavedChainsResource]:
    """Return a resource for every installed iptables variant, which restores the chains of its saved state."""
    known = {(item.family, item.variant): item for item in states}
    found = []
    for item in removal_contexts():
        if item.variant is not None:
            state = known.get((item.family, item.variant.name))
            found.append(
                SavedChainsResource(
                    item.variant,
                    chain_ownership(item.settings, True),
                    state.chains if state is not None else {},
                    state.places if state is not None else (),
                )
            )
    return found


def _observed_chains(variant: XtablesVariant, settings: DataplaneSettings) -> ChainsState:
    resource = SavedChainsResource(variant, chain_ownership(settings, True))
    chains = resource.observe()
    return ChainsState(variant.family, variant.name, resource.places, chains)


def _observed_ipvs(
    handles: KernelHandles, all_servers: bool, networks: Sequence[Network], addresses: Mapping[str, Resource[str, bool]]
) -> dict[str, dict[Any, Any]]:
    """Return sets, elements and servers; loads nothing. ``all_servers``: as for :func:`observe_state`.

    ``addresses``: by family those on the dummy device.
    """
    found: dict[str, dict[Any, Any]] = {"sets": {}, "set_elements": {}, "virtual_servers": {}, "real_servers": {}}
    if not handles.has_ipvs():
        return found
    for family in FAMILIES:
        resources = observed_once(ipvs_resources(handles, family))._replace(addresses=addresses[family])
        filter_backend = filter_backend_resources(handles, family)
        if filter_backend.sets is not None:
            sets = filter_backend.sets.sets.observe()
            found["sets"].update({name: value for name, value in sets.items() if name in FAMILY_OF_SET})
            found["set_elements"].update(filter_backend.sets.elements.observe())
        for name, resource in (("virtual_servers", resources.servers), ("real_servers", resources.real_servers)):
            chosen: Resource[Any, Any] = resource
            if not all_servers:
                # Modes without IPVS do not change servers that are not known to belong to a Service.
                chosen = OnlyOurServers(resource, resources.addresses, filter_backend.record(family))
            for key, value in chosen.observe().items():
                if not in_networks(ipvs.server_of(key).address, networks):
                    found[name][key] = value
    return found


def _restorable(resource: RawTableResource) -> RawTable:
    table = resource.observe()
    refusal = resource.refusal(table)
    if refusal:
        raise HistoryError(refusal)
    return table


def observe_state(handles: KernelHandles, all_servers: bool = False, exclude_cidrs: Sequence[str] = ()) -> NodeState:
    """Return what is currently programmed on the node. Change nothing, and load no module.

    ``all_servers``: the node is about to be converged to a mode with IPVS, which owns all virtual servers outside
    ``exclude_cidrs``, so all of them are observed; else only those that evidently belong to Services.
    Raises KernelError, and HistoryError if a table could not be restored.
    """
    addresses = {family: ObservedOnce(AddressesResource(handles.route, family)) for family in FAMILIES}
    servers = _observed_ipvs(handles, all_servers, networks_of(exclude_cidrs), addresses)
    has_nftables = handles.has_nftables()
    return NodeState(
        chains=tuple(
            _observed_chains(item.variant, item.settings) for item in removal_contexts() if item.variant is not None
        ),
        nftables={family: _restorable(RawTableResource(family)) if has_nftables else {} for family in FAMILIES},
        ipvs_tables={family: _restorable(RawIpvsTableResource(family)) if has_nftables else {} for family in FAMILIES},
        network_policy=_restorable(RawPolicyTableResource()) if has_nftables else {},
        devices=DummyDeviceResource(handles.route).observe(),
        addresses={address: True for each in addresses.values() for address in each.observe()},
        timeouts=TimeoutsResource(handles.ipvs, TIMEOUTS).observe() if handles.has_ipvs() else {},
        sysctls=SysctlsResource(sysctl_keys()).observe(),
        exclude_cidrs=tuple(exclude_cidrs),
        policies_standalone=False,
        **servers,
    )


def observe_policies(handles: KernelHandles) -> NodeState:
    """Return the state of a node where another program serves the Services: only the table of network policies.

    Raises KernelError, and HistoryError if the table could not be restored.
    """
    table = _restorable(RawPolicyTableResource()) if handles.has_nftables() else {}
    return NodeState(network_policy=table, policies_standalone=True)


def of_family(table: Mapping[Any, Any], family: str) -> dict[Any, Any]:
    """Return the entries of a table of sets, elements, servers or addresses that belong to a family."""
    return {key: value for key, value in table.items() if _family(key) == family}


def _family(key: Any) -> str:
    if isinstance(key, (ipvs.RealServerKey, ipvs.VirtualServerKey)):
        return family_of(ipvs.server_of(key).address)
    name = key.set if isinstance(key, ipvs.SetElementKey) else key
    return FAMILY_OF_SET.get(name) or family_of(name)
