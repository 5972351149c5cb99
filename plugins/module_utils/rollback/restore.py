# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollback: show or apply the difference between the node and a saved state.

It uses the mechanism of a convergence, with the saved state as the desired tables: entries are restored before others
are removed, nftables and iptables change in one transaction per table, and nothing of other programs is changed.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..base.addresses import FAMILIES
from ..base.errors import HistoryError, KernelError, ProxyError
from ..base.mode_names import IPVS
from ..convergence.defaults import DEFAULT_LOCK_SECONDS
from ..convergence.handles import KernelHandles
from ..convergence.modes.stages.ipvs import (
    IpvsResources,
    ServerTables,
    after_servers,
    ipvs_resources,
    kept_stages,
    observed_once,
    unloaded_ipvs_resources,
)
from ..convergence.modes.stages.ipvs_filter_backend import (
    FilterBackendResources,
    filter_backend_resources,
    unloaded_set_resources,
    unused_filter_backend_stages,
)
from ..convergence.modes.stages.still_connected import StillConnected, node_port_record, replaces_iptables_mode
from ..convergence.modes.stages.userspace import userspace_removal_stages
from ..convergence.report import Stopwatch, table_changes
from ..convergence.request import TableChange
from ..convergence.runtime.ledger import Flows, write_ledger
from ..convergence.runtime.lock import ConvergenceLock
from ..convergence.runtime.state_directory import DEFAULT_DIRECTORY as DEFAULT_STATE
from ..kernel.facts import capabilities, node_facts
from ..kernel.ipvs.servers import TimeoutsResource
from ..kernel.modules.module_profile import modules_for
from ..kernel.modules.modules import ModulesResource
from ..kernel.nftables.raw.reading import RawSet
from ..kernel.nftables.raw.resource import RawIpvsTableResource, RawPolicyTableResource, RawTableResource
from ..kernel.parameters.sysctls import SysctlsResource, read_value, unchangeable
from ..kernel.rtnetlink.links import AddressesResource, DummyDeviceResource
from ..kernel.xtables.empty_tables import EmptyTablesResource
from ..kernel.xtables.variant import NFT
from ..preflight.features import rights_findings
from ..preflight.findings import judge
from ..preflight.processes import service_proxy_findings
from ..rendering.ipvs.draining import with_draining
from ..rendering.ipvs.nftables_filter_backend import NFTABLES_FILTER_BACKEND
from ..rendering.ipvs.nftables_layout import NODE_PORTS
from ..rendering.nftables.objects import ObjectKey
from ..resources import Kind, PlannedChange, Stage, always, apply_plan, never, plan
from . import pending, units
from .confirm import withdraw
from .form import StateRecord
from .leftovers import without_leftovers
from .places import DEFAULT_DIRECTORY
from .state import NodeState, chains_resources, observe_policies, observe_state, of_family
from .store import BEFORE_ROLLBACK, History

Table = Mapping[Any, Any]
_CONNTRACK_MAX = "net.netfilter.nf_conntrack_max"
_CONNTRACK_COUNT = "net.netfilter.nf_conntrack_count"


class RollbackRequest(NamedTuple):
    """One rollback of this node.

    ``to``: the number of a saved state; None for the newest that was saved before a convergence. ``check``: change
    nothing at all. ``describe``: fill in the lines of every changed table. ``keep``: how many saved states are kept;
    None for all. ``stop_units``: stop the agent and the timer of scheduled convergences, which would undo the rollback.
    ``state_directory`` and ``lock_timeout``: as for a convergence. ``judge``: returns warnings about the saved state,
    or raises HistoryError if it must not be restored. ``ignore_findings``: names of preflight findings to ignore.
    """

    to: Optional[int] = None
    history_directory: str = DEFAULT_DIRECTORY
    keep: Optional[int] = None
    check: bool = False
    describe: bool = False
    stop_units: bool = True
    state_directory: str = DEFAULT_STATE
    lock_timeout: float = DEFAULT_LOCK_SECONDS
    judge: Callable[[StateRecord], Tuple[str, ...]] = lambda _record: ()
    ignore_findings: Sequence[str] = ()


class RollbackReport(NamedTuple):
    """The result of a rollback.

    ``record``: the restored state. ``changed``: something differed (and was changed, unless checking).
    ``saved``: the number under which the previous state was saved, None if nothing was changed. ``stopped``: units that
    were, or would be, stopped. ``durations``: seconds per stage and table.
    """

    record: StateRecord
    changed: bool
    changes: Tuple[TableChange, ...]
    saved: Optional[int]
    stopped: Tuple[str, ...]
    warnings: Tuple[str, ...]
    durations: Dict[str, float]


def _sysctl_stage(state: NodeState) -> Tuple[Stage, List[str]]:
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

    before: List[Stage]
    after: List[Stage]
    kept: StillConnected


def _ipvs_stages(
    state: NodeState,
    resources: IpvsResources,
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
    desired = ServerTables(
        sets=of_family(state.sets, family),
        elements=of_family(state.set_elements, family),
        servers=servers,
        real_servers=lambda observed: with_draining(real_servers, observed, resources.connections(), servers),
        addresses=of_family(state.addresses, family),
    )
    draining = loaded and not _serves_through_ipvs(state)
    stages = kept_stages(
        resources, filter_backend, family, draining=draining, desired=desired, others=state.virtual_servers
    )
    before = list(stages.sets)
    saved = state.ipvs_tables.get(family, {})
    if saved:
        table = saved if to_end else functools.partial(_with_ports, saved)
        before.append(Stage(RawIpvsTableResource(family), table, postponed=after_servers(resources.addresses)))
    elif filter_backend.table is not None:
        left = stages.kept.table if to_end else node_port_record
        before.append(Stage(filter_backend.table, left, postponed=always))
    return _IpvsStages(before, stages.servers, stages.kept)


def _with_ports(saved: Table, observed: Table) -> Table:
    """Return a saved table beside IPVS with the node ports of the present one, which identify virtual servers."""
    key = ObjectKey("set", NODE_PORTS)
    old, now = saved.get(key), observed.get(key)
    if not isinstance(old, RawSet) or not isinstance(now, RawSet):
        return saved
    return {**saved, key: old._replace(elements=tuple(dict.fromkeys((*old.elements, *now.elements))))}


def _filter_backend(state: NodeState, handles: KernelHandles, family: str) -> FilterBackendResources:
    """Return the loaded resources of the filter backends; ipsets for descriptions only if a saved state has them."""
    found = filter_backend_resources(handles, family)
    if found.sets is None and of_family(state.sets, family):
        return found._replace(sets=unloaded_set_resources(family))
    return found


def restore_stages(
    state: NodeState, handles: KernelHandles, check: bool, to_end: bool = True
) -> Tuple[List[Stage], List[str]]:
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
    find = ipvs_resources if usable else unloaded_ipvs_resources
    families = [
        _ipvs_stages(
            state,
            observed_once(find(handles, family)),
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


def _policy_stages(state: NodeState, handles: KernelHandles) -> List[Stage]:
    """Return the stage that restores the network policies; none if the state does not say whether there were any."""
    table = state.network_policy
    if table is None or not (table or handles.has_nftables()):
        return []
    return [Stage(RawPolicyTableResource(), table)]


def _table_stages(state: NodeState, handles: KernelHandles, warnings: List[str]) -> List[Stage]:
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
    chains: List[Stage] = []
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


def _module_stages(state: NodeState) -> List[Stage]:
    if not state.virtual_servers and not state.sets:
        return []
    schedulers = sorted({server.scheduler for server in state.virtual_servers.values()})
    filter_backend = NFTABLES_FILTER_BACKEND.name if any(state.ipvs_tables.values()) and not state.sets else ""
    modules = ModulesResource(modules_for(IPVS, schedulers, node_facts().kernel_version, filter_backend=filter_backend))
    return [Stage(modules, modules.desired())]


def _kept_server_warnings(state: NodeState, planned: Sequence[PlannedChange]) -> List[str]:
    """Return a warning if real servers are kept for their connections."""
    servers = [item for item in planned if item.resource.kind == Kind.REAL_SERVERS]
    observed = [key for item in servers for key in item.observed if key not in item.change.removed]
    count = sum(key not in state.real_servers for key in observed)
    if _serves_through_ipvs(state) or not count:
        return []
    text = "are kept with their virtual servers until their connections end; then roll back to the same state again"
    return [f"{count} real servers of IPVS {text}"]


def _differs(planned: Sequence[PlannedChange]) -> bool:
    return any(item.change for item in planned)


def rollback(request: RollbackRequest) -> RollbackReport:
    """Restore a saved state of the node, or with ``request.check`` only report what would change.

    The current state is saved first. Raises HistoryError if there is no such state or its file cannot be used;
    PreflightError without the necessary privileges, or if another service proxy runs and the state is not of network
    policies only; KernelError if the kernel refuses a change.
    """
    warnings: List[str] = list(judge(rights_findings(capabilities()), request.ignore_findings))
    history = History(request.history_directory, request.keep)
    record = history.load(history.newest() if request.to is None else request.to)
    if not record.state.policies_standalone:
        warnings += judge(service_proxy_findings(), request.ignore_findings)
    warnings += request.judge(record)
    running = tuple(units.running_units()) if request.stop_units else ()
    if not request.check:
        units.stop(running)
    try:
        with contextlib.ExitStack() as stack:
            if not request.check:
                stack.enter_context(ConvergenceLock(request.state_directory, request.lock_timeout))
                # A pending change that cannot be read is an error before anything is changed.
                pending.read()
            handles = stack.enter_context(KernelHandles())
            report = restore(request, record, history=history, handles=handles, stopped=running, warnings=warnings)
            if request.check:
                return report
            # Only now: if the rollback fails, the automatic revert of an unconfirmed change is still armed.
            return report._replace(warnings=(*report.warnings, *withdraw()))
    except ProxyError as error:
        if running and not request.check:
            raise type(error)(f"{error} ({', '.join(running)} was stopped before and is not restarted)") from error
        raise


def restore(
    request: RollbackRequest,
    record: StateRecord,
    *,
    history: History,
    handles: KernelHandles,
    stopped: Tuple[str, ...] = (),
    warnings: Sequence[str] = (),
) -> RollbackReport:
    """Restore a saved state; the caller holds the convergence lock. Raises as :func:`rollback` does."""
    state, watch, check = without_leftovers(record.state), Stopwatch(), request.check
    with watch.stage("observe"):
        modules = plan(_module_stages(state))
    if not check:
        apply_plan(modules)
    with watch.stage("observe"):
        stages, more = restore_stages(state, handles, check, to_end=check)
        planned = plan(stages)
    saved, rest = None, planned
    if not check and _differs(planned):
        with watch.stage("save"):
            saved = _save_current(state, record, history, handles, more)
        with watch.stage("apply"):
            rest = _apply(state, handles, planned, watch)
            if not state.policies_standalone:
                _forget_flows(request.state_directory, more)
    changes = table_changes([*modules, *planned], request.describe)
    more += _kept_server_warnings(state, rest)
    return RollbackReport(
        record=record,
        changed=bool(changes),
        changes=changes,
        saved=saved,
        stopped=stopped,
        warnings=(*warnings, *more),
        durations=dict(watch.seconds),
    )


def _save_current(
    state: NodeState, record: StateRecord, history: History, handles: KernelHandles, warnings: List[str]
) -> Optional[int]:
    """Save the current state and return its number, or None with a warning added. Raises KernelError.

    Only what ``state``, that of ``record``, has is saved: policies only, or everything.
    """
    try:
        if state.policies_standalone:
            current = observe_policies(handles)
        else:
            current = observe_state(handles, state.uses_ipvs, state.exclude_cidrs)
        return history.save(current, BEFORE_ROLLBACK, [record.number]).number
    except HistoryError as error:
        warnings.append(f"the current state is not saved, so this rollback cannot be undone: {error}")
        return None


def _apply(
    state: NodeState, handles: KernelHandles, planned: Sequence[PlannedChange], watch: Stopwatch
) -> List[PlannedChange]:
    """Apply the changes, and return the second plan, which has the removals. Raises KernelError.

    Removals are planned after everything has been restored, so that connections that began meanwhile are seen.
    """
    watch.add(apply_plan(planned, removals=False))
    rest = plan(restore_stages(state, handles, check=False)[0])
    watch.add(apply_plan(rest))
    return rest


def _forget_flows(state_directory: str, warnings: List[str]) -> None:
    """Have the next convergence look for stale connection tracking entries of UDP Services."""
    try:
        write_ledger(state_directory, Flows())
    except KernelError as error:
        warnings.append(str(error))
