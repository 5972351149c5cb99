# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rollback: show or apply the difference between the node and a saved state.

It uses the mechanism of a convergence, with the saved state as the desired tables: entries are restored before others
are removed, nftables and iptables change in one transaction per table, and nothing of other programs is changed.

What a saved state contains of ipvs mode only because connections through it had not ended served nothing new, and need
not be restored: they end with the node's present virtual servers, which a rollback keeps as long as they have any.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, Callable, NamedTuple, Optional, Sequence

from ..base.errors import HistoryError, KernelError, ProxyError
from ..base.installed import HISTORY_DIRECTORY, STATE_DIRECTORY
from ..convergence.defaults import DEFAULT_LOCK_SECONDS
from ..convergence.handles import KernelHandles
from ..convergence.report import Stopwatch, table_changes
from ..convergence.request import TableChange
from ..convergence.runtime.ledger import Flows, write_ledger
from ..convergence.runtime.lock import ConvergenceLock
from ..kernel.facts import capabilities
from ..kernel.nftables.raw.reading import RawSet
from ..kernel.nftables.raw.resource import key_and_data
from ..preflight.features import rights_findings
from ..preflight.findings import judge
from ..preflight.kubelet import address_findings
from ..preflight.processes import other_rules_findings, service_proxy_findings
from ..rendering.ipvs.own_servers import OwnServers
from ..rendering.nftables.objects import ElementKey, ObjectKey
from ..resources import PlannedChange, apply_plan, plan
from . import pending, units
from .confirm import withdraw
from .form import StateRecord
from .stages import kept_server_warnings, module_stages, restore_stages
from .state import NodeState, observe_policies, observe_state
from .store import BEFORE_ROLLBACK, History

_MATCHED_SET = re.compile(r"--match-set (\S+)")


def without_leftovers(state: NodeState) -> NodeState:
    """Return the state without entries kept only for open IPVS connections; a state of ipvs mode is returned as is.

    Virtual servers of other programs remain, and so do ipsets that saved chains refer to.
    """
    if state.uses_ipvs:
        return state
    record: list[Any] = list(state.set_elements)
    for table in state.ipvs_tables.values():
        for key, held in table.items():
            if isinstance(key, ObjectKey) and isinstance(held, RawSet):
                record += [ElementKey("element", key.name, key_and_data(element)[0]) for element in held.elements]
    own = OwnServers(record, state.addresses)
    servers = {key: value for key, value in state.virtual_servers.items() if key not in own}
    matched = {name for rule in state.rules() for name in _MATCHED_SET.findall(rule)}
    return state._replace(
        virtual_servers=servers,
        real_servers={key: value for key, value in state.real_servers.items() if key.server in servers},
        ipvs_tables={},
        sets={name: value for name, value in state.sets.items() if name in matched},
        set_elements={key: value for key, value in state.set_elements.items() if key.set in matched},
        devices={},
        addresses={},
    )


class RollbackRequest(NamedTuple):
    """One rollback of this node.

    ``to``: the number of a saved state; None for the newest that was saved before a convergence. ``check``: change
    nothing at all. ``describe``: fill in the lines of every changed table. ``keep``: how many saved states are kept;
    None for all. ``stop_units``: stop the agent and the timer of scheduled convergences, which would undo the rollback.
    ``state_directory`` and ``lock_timeout``: as for a convergence. ``judge``: returns warnings about the saved state,
    or raises HistoryError if it must not be restored. ``ignore_findings``: names of preflight findings to ignore.
    """

    to: Optional[int] = None
    history_directory: str = HISTORY_DIRECTORY
    keep: Optional[int] = None
    check: bool = False
    describe: bool = False
    stop_units: bool = True
    state_directory: str = STATE_DIRECTORY
    lock_timeout: float = DEFAULT_LOCK_SECONDS
    judge: Callable[[StateRecord], tuple[str, ...]] = lambda _record: ()
    ignore_findings: Sequence[str] = ()


class RollbackReport(NamedTuple):
    """The result of a rollback.

    ``record``: the restored state. ``changed``: something differed (and was changed, unless checking).
    ``saved``: the number under which the previous state was saved, None if nothing was changed. ``stopped``: units that
    were, or would be, stopped. ``durations``: seconds per stage and table.
    """

    record: StateRecord
    changed: bool
    changes: tuple[TableChange, ...]
    saved: Optional[int]
    stopped: tuple[str, ...]
    warnings: tuple[str, ...]
    durations: dict[str, float]


def rollback(request: RollbackRequest) -> RollbackReport:
    """Restore a saved state of the node, or with ``request.check`` only report what would change.

    The current state is saved first. Raises HistoryError if there is no such state or its file cannot be used;
    PreflightError without the necessary privileges, if another service proxy runs or its rules would be replaced, if
    none would serve, or if kubelet uses an address of the API servers; KernelError if the kernel refuses a change.
    """
    warnings: list[str] = list(judge(rights_findings(capabilities()), request.ignore_findings))
    history = History(request.history_directory, request.keep)
    record = history.load(history.newest() if request.to is None else request.to)
    standalone = record.state.policies_standalone
    found = service_proxy_findings(standalone=standalone)
    if not standalone:
        found += [*other_rules_findings(), *address_findings(request.check)]
    warnings += judge(found, request.ignore_findings)
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
    stopped: tuple[str, ...] = (),
    warnings: Sequence[str] = (),
) -> RollbackReport:
    """Restore a saved state; the caller holds the convergence lock. Raises as :func:`rollback` does."""
    state, watch, check = without_leftovers(record.state), Stopwatch(), request.check
    with watch.stage("observe"):
        modules = plan(module_stages(state))
    if not check:
        apply_plan(modules)
    with watch.stage("observe"):
        stages, more = restore_stages(state, handles, check, to_end=check)
        planned = plan(stages)
    saved, rest = None, planned
    if not check and any(item.change for item in planned):
        with watch.stage("save"):
            saved = _save_current(state, record, history, handles, more)
        with watch.stage("apply"):
            rest = _apply(state, handles, planned, watch)
            if not state.policies_standalone:
                _forget_flows(request.state_directory, more)
    if not check:
        try:
            if not history.boot_with(record.number) and any(state.counts().values()):
                more.append("a reboot restores nothing until the next convergence: none was kept with this state")
        except ProxyError as error:
            more.append(f"the next boot does not restore this state: {error}")
    changes = table_changes([*modules, *planned], request.describe)
    more += kept_server_warnings(state, rest)
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
    state: NodeState, record: StateRecord, history: History, handles: KernelHandles, warnings: list[str]
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
) -> list[PlannedChange]:
    """Apply the changes, and return the second plan, which has the removals. Raises KernelError.

    Removals are planned after everything has been restored, so that connections that began meanwhile are seen.
    """
    watch.add(apply_plan(planned, removals=False))
    rest = plan(restore_stages(state, handles, check=False)[0])
    watch.add(apply_plan(rest))
    return rest


def _forget_flows(state_directory: str, warnings: list[str]) -> None:
    """Have the next convergence look for stale connection tracking entries of UDP Services."""
    try:
        write_ledger(state_directory, Flows())
    except KernelError as error:
        warnings.append(str(error))
