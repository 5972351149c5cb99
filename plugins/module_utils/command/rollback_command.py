# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``rollback``: list and restore saved states."""

from __future__ import annotations

import argparse
from typing import Any, Optional

from ..convergence.handles import KernelHandles
from ..convergence.runtime.state_directory import control_socket
from ..rollback.lost_endpoints import Sources, judge_state
from ..rollback.restore import RollbackRequest, rollback
from ..rollback.state import observe_state
from ..rollback.store import History, SavedState
from ..rollback.units import RUN_UNIT
from .result import DIFFERENT, OK, CommandResult, change_lines


def _state_line(item: SavedState) -> str:
    if item.problem:
        return f"{item.number:>6}  cannot be used: {item.problem}"
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in item.counts.items() if count)
    outcome = f"; the change after it was {item.outcome}" if item.outcome else ""
    what = f"{item.mode}: {counts}" if item.mode else counts or "nothing programmed"
    return f"{item.number:>6}  {item.created}  {item.reason}  {what}{outcome}"


def list_states(directory: str) -> CommandResult:
    """List the saved states, newest first. Raises HistoryError."""
    states = History(directory).list()
    lines = [_state_line(item) for item in states] or [f"no saved states in {directory}"]
    return CommandResult(OK, lines, {"states": [item._asdict() for item in states]})


def save_before(mode: str, directory: str, keep: Optional[int]) -> CommandResult:
    """Save what is programmed before the agent changes the mode. Raises HistoryError, KernelError."""
    with KernelHandles() as handles:
        state = observe_state(handles)
    before, number = state.mode(), None
    if before and before != mode:
        number = History(directory, keep).save(state).number
    line = f"nothing to save: {before or 'nothing'} is programmed" if number is None else f"saved as {number}: {before}"
    return CommandResult(OK, [line], {"savedState": number, "mode": before})


def roll_back(arguments: argparse.Namespace) -> CommandResult:
    """Restore a saved state, with --check show what would change, with --list list the states (``rollback``)."""
    if arguments.list:
        return list_states(arguments.history)
    if arguments.save_before:
        return save_before(arguments.save_before, arguments.history, arguments.keep_states)
    sources = Sources(control=control_socket(arguments.state_directory))
    request = RollbackRequest(
        to=arguments.to,
        history_directory=arguments.history,
        keep=arguments.keep_states,
        check=arguments.check,
        describe=arguments.diff,
        state_directory=arguments.state_directory,
        lock_timeout=arguments.lock_timeout,
        judge=lambda record: judge_state(record, arguments.accept_loss, sources),
        ignore_findings=arguments.ignore,
    )
    report = rollback(request)
    lines = change_lines(report.changes, arguments.check, arguments.diff)
    if report.stopped:
        verb = "would stop" if arguments.check else "stopped"
        started = " ".join(unit for unit in report.stopped if unit != RUN_UNIT)
        lines.append(f"{verb} {', '.join(report.stopped)}: systemctl start {started} undoes the rollback")
    number = report.record.number
    if not report.changed:
        lines.append(f"the node already matches state {number}")
    elif not arguments.check:
        lines.append(f"rolled back to state {number}; saved the previous state as {report.saved}")
    document: dict[str, Any] = {
        "state": number,
        "changed": report.changed,
        "changes": [change._asdict() for change in report.changes],
        "savedState": report.saved,
        "stopped": list(report.stopped),
        "durations": {name: round(seconds, 6) for name, seconds in report.durations.items()},
    }
    code = DIFFERENT if arguments.check and report.changed else OK
    return CommandResult(code, lines, document, report.warnings)
