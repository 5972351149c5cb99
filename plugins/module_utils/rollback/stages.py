# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stages that restore a saved state: the mechanism of a convergence, with the state as the desired tables."""

from __future__ import annotations

import functools
from typing import Any, Mapping, NamedTuple, Sequence

from ..base.addresses import FAMILIES
from ..base.mode_names import IPVS
from ..convergence.handles import KernelHandles
from ..convergence.modes.stages import ipvs
from ..convergence.modes.stages.ipvs_filter_backend import (
    FilterBackendResources,
    filter_backend_resources,
    unloaded_set_resources,
    unused_filter_backend_stages,
)
from ..convergence.modes.stages.still_connected import StillConnected, replaces_iptables_mode
from ..convergence.modes.stages.userspace import userspace_removal_stages
from ..kernel.facts import node_facts
from ..kernel.ipvs.servers import TimeoutsResource
from ..kernel.modules.module_profile import modules_for
from ..kernel.modules.modules import ModulesResource
from ..kernel.nftables.raw.reading import RawSet
from ..kernel.nftables.raw.resource import RawIpvsTableResource, RawPolicyTableResource, RawTableResource
from ..kernel.parameters.sysctls import SysctlsResource, read_value, unchangeable
from ..kernel.rtnetlink.links import AddressesResource, DummyDeviceResource
from ..kernel.xtables.empty_tables import EmptyTablesResource
from ..kernel.xtables.variant import NFT
from ..rendering.ipvs.draining import with_draining
from ..rendering.ipvs.nftables_filter_backend import NFTABLES_FILTER_BACKEND
from ..rendering.ipvs.own_servers import RECORD_SETS, server_record
from ..rendering.nftables.objects import ObjectKey
from ..resources import Kind, PlannedChange, Stage, always, never
from .state import NodeState, chains_resources, of_family

Table = Mapping[Any, Any]
_CONNTRACK_MAX = "net.netfilter.nf_conntrack_max"
_CONNTRACK_COUNT = "net.netfilter.nf_conntrack_count"


def _sysctl_stage(state: NodeState) -> tuple[Stage, list[str]]:
    """Return the stage that restores kernel parameters, and warnings about those that are kept."""
    observed = SysctlsResource(state.sysctls).observe()
    desired = {key: value for key, value in state.sysctls.items() if key in observed}
    differing = [key for key, value in desired.items() if observed[key] != value]
    blocked = dict(unchangeable(differing))
    count = read_value(_CONNTRACK_COUNT) or "0"
    if _CONNTRACK_MAX in differing:
        maximum = int(desired[_CONNTRACK_MAX] or 0)
        if maximum < int(observed[_CONNTRACK_MAX] or 0) and maximum < 2 * int(count):
            blocked[_CONNTRACK_MAX] = f"{count} connections are tracked now, so it is not lowered"
    warnings = [f"sysctl {key}: was {desired[key]}: {reason}" for key, reason in blocked.items()]
    kept = {key: value for key, value in desired.items() if key not in blocked}
    return Stage(SysctlsResource(kept), kept), warnings


def _serves_through_ipvs(state: NodeState) -> bool:
    return state.uses_ipvs and bool(state.virtual_servers)


class _IpvsStages(NamedTuple):
    """The stages of ipvs mode for one family before and after the chains, and entries kept besides the saved ones."""

    before: list[Stage]
    after: list[Stage]
    kept: StillConnected


def _ipvs_stages(
    state: NodeState,
    resources: ipvs.IpvsResources,
    filter_backend: FilterBackendResources,
    family: str,
    *,
    loaded: bool,
    to_end: bool,
) -> _IpvsStages:
    """Return the stages of one family. With a state of another mode, servers with active connections are kept.

    Servers are limited to those that belong to Services now, or were saved; what other programs add later is kept.
    """
    servers, real_servers = of_family(state.virtual_servers, family), of_family(state.real_servers, family)
    desired = ipvs.ServerTables(
        sets=of_family(state.sets, family),
        elements=of_family(state.set_elements, family),
        servers=servers,
        real_servers=lambda observed: with_draining(real_servers, observed, resources.connections(), servers),
        addresses=of_family(state.addresses, family),
    )
    draining = loaded and not _serves_through_ipvs(state)
    stages = ipvs.kept_stages(
        resources, filter_backend, family, draining=draining, desired=desired, others=state.virtual_servers
    )
    before = list(stages.sets)
    saved = state.ipvs_tables.get(family, {})
    if saved:
        table = saved if to_end else functools.partial(_with_record, saved)
        before.append(Stage(RawIpvsTableResource(family), table, postponed=ipvs.after_servers(resources.addresses)))
    elif filter_backend.table is not None:
        left = stages.kept.table if to_end else server_record
        # In the end it goes after the servers that it records, or a rollback that is broken off would not know them.
        before.append(Stage(filter_backend.table, left, postponed=never if to_end else always))
    return _IpvsStages(before, stages.servers, stages.kept)


def _with_record(saved: Table, observed: Table) -> Table:
    """Return a saved table beside IPVS with the elements of the present one that record virtual servers."""
    found = dict(saved)
    for key in (ObjectKey("set", name) for name in RECORD_SETS):
        old, now = saved.get(key), observed.get(key)
        if isinstance(old, RawSet) and isinstance(now, RawSet):
            found[key] = old._replace(elements=tuple(dict.fromkeys((*old.elements, *now.elements))))
    return found


def _filter_backend(state: NodeState, handles: KernelHandles, family: str) -> FilterBackendResources:
    """Return the loaded resources of the filter backends; ipsets for descriptions only if a saved state has them."""
    found = filter_backend_resources(handles, family)
    if found.sets is None and of_family(state.sets, family):
        return found._replace(sets=unloaded_set_resources(family))
    return found


def restore_stages(
    state: NodeState, handles: KernelHandles, check: bool, to_end: bool = True
) -> tuple[list[Stage], list[str]]:
    """Return the stages that restore a state, in order, and warnings. Raises KernelError.

    Kernel parameters come first if the state is one of ipvs mode, otherwise last: without net.ipv4.vs.conntrack, IPVS
    would not masquerade the connections that it still serves. Objects that another program made for Services are not
    part of a state with policies only, and do not change. ``to_end`` False: the table beside IPVS keeps what identifies
    virtual servers that are to be removed later.
    """
    if state.policies_standalone:
        return _policy_stages(state, handles), []
    sysctls, warnings = _sysctl_stage(state)
    tables = [*_policy_stages(state, handles), *_table_stages(state, handles, warnings)]
    first, last = ([sysctls], []) if _serves_through_ipvs(state) else ([], [sysctls])
    device = DummyDeviceResource(handles.route)
    # The listeners of userspace mode end with the agent, so its addresses lead nowhere and are in no saved state.
    userspace = userspace_removal_stages(handles)
    loaded = handles.has_ipvs()
    if not state.sets and not state.virtual_servers and not loaded:
        addresses = [AddressesResource(handles.route, family) for family in FAMILIES]
        own = [Stage(item, of_family(state.addresses, family)) for item, family in zip(addresses, FAMILIES)]
        unused = unused_filter_backend_stages(handles, False, False)
        return [*first, Stage(device, state.devices), *tables, *own, *unused, *last, *userspace], warnings
    # Except in a check, the modules have been loaded by now.
    usable = loaded or not check
    find = ipvs.ipvs_resources if usable else ipvs.unloaded_ipvs_resources
    families = [
        _ipvs_stages(
            state,
            ipvs.observed_once(find(handles, family)),
            _filter_backend(state, handles, family),
            family,
            loaded=usable,
            to_end=to_end,
        )
        for family in FAMILIES
    ]

    def devices(observed: Table) -> Table:
        return {**state.devices, **(observed if any(item.kept.has_connections() for item in families) else {})}

    first.append(Stage(device, devices))
    if state.timeouts and usable:
        first.append(Stage(TimeoutsResource(handles.ipvs, state.timeouts), state.timeouts))
    before = [stage for item in families for stage in item.before]
    after = [stage for item in families for stage in item.after]
    return [*first, *before, *tables, *after, *last, *userspace], warnings


def _policy_stages(state: NodeState, handles: KernelHandles) -> list[Stage]:
    """Return the stage that restores the network policies; none if the state does not say whether there were any."""
    table = state.network_policy
    if table is None or not (table or handles.has_nftables()):
        return []
    return [Stage(RawPolicyTableResource(), table)]


def _table_stages(state: NodeState, handles: KernelHandles, warnings: list[str]) -> list[Stage]:
    """Return the stages of nftables and iptables, beginning with the subsystem in which entries are restored.

    Removals come last: a table of nftables mode, and on the way to ipvs mode the chains of iptables mode, serve until
    everything else has been restored. Chains beside IPVS masquerade until the table in their place exists.
    """
    to_ipvs = _serves_through_ipvs(state)
    late = replaces_iptables_mode if to_ipvs else never
    if any(state.ipvs_tables.values()):
        late = always
    nftables = []
    for family in FAMILIES:
        table = state.nftables.get(family, {})
        if table:
            nftables.append(Stage(RawTableResource(family), table))
        elif handles.has_nftables():
            nftables.append(Stage(RawTableResource(family), {}, postponed=always))
    chains: list[Stage] = []
    resources = chains_resources(state.chains)
    for resource in resources:
        chains.append(Stage(resource, resource.desired, postponed=late))
        if resource.variant.name == NFT:
            emptied = EmptyTablesResource(resource)
            # After its chains, wherever these are.
            chains.append(Stage(emptied, {}, postponed=lambda _change: to_ipvs))
    known = {(resource.variant.family, resource.variant.name) for resource in resources}
    for item in state.chains:
        if item.chains and (item.family, item.variant) not in known:
            warnings.append(
                f"{len(item.chains)} {item.family} chains cannot be restored: no {item.variant} iptables here"
            )
    return [*nftables, *chains] if any(state.nftables.values()) else [*chains, *nftables]


def module_stages(state: NodeState) -> list[Stage]:
    """Return the stage that loads the kernel modules of a state; none without entries that need any."""
    if not state.virtual_servers and not state.sets:
        return []
    schedulers = sorted({server.scheduler for server in state.virtual_servers.values()})
    filter_backend = NFTABLES_FILTER_BACKEND.name if any(state.ipvs_tables.values()) and not state.sets else ""
    modules = ModulesResource(modules_for(IPVS, schedulers, node_facts().kernel_version, filter_backend=filter_backend))
    return [Stage(modules, modules.desired())]


def kept_server_warnings(state: NodeState, planned: Sequence[PlannedChange]) -> list[str]:
    """Return a warning if real servers are kept for their connections."""
    servers = [item for item in planned if item.resource.kind == Kind.REAL_SERVERS]
    observed = [key for item in servers for key in item.observed if key not in item.change.removed]
    count = sum(key not in state.real_servers for key in observed)
    if _serves_through_ipvs(state) or not count:
        return []
    text = "are kept with their virtual servers until their connections end; then roll back to the same state again"
    return [f"{count} real servers of IPVS {text}"]
