# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The program that reverts an unconfirmed change; it is minimal, to work even if everything else fails.

systemd runs it when the timeout expires, or immediately after a probe has failed.

Exit status 0: reverted, or nothing left to revert; 1: failed, with one line on standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Sequence

from ..base.errors import ProxyError
from ..convergence.handles import KernelHandles
from ..convergence.runtime.lock import ConvergenceLock
from ..preflight.findings import NAMES
from . import pending, units
from .directory import REVERTED
from .restore import RollbackReport, RollbackRequest, restore, rollback
from .store import History

# A failure may be temporary: another program holds the xtables lock, or is writing the same table.
_ATTEMPTS = 10
_PAUSE_SECONDS = 3.0
# How long to wait for a convergence in progress.
_LOCK_SECONDS = 600.0


def report_text(report: RollbackReport) -> str:
    """Summarise a rollback in one line."""
    counts = ", ".join(
        f"{change.table}: {change.added} added, {change.replaced} replaced, {change.removed} removed"
        for change in report.changes
    )
    stopped = f"; stopped {', '.join(report.stopped)}" if report.stopped else ""
    return f"state {report.record.number}: {counts or 'no differences'}{stopped}"


def revert(number: int, history_directory: str, state_directory: str, directory: str = pending.DIRECTORY) -> str:
    """Roll back to a saved state if the change after it still waits to be confirmed; return a description.

    Raises ProxyError.
    """
    waiting = pending.read(directory)
    if waiting is None or waiting.saved_state != number:
        return "no change waits to be confirmed"
    if not waiting.reverting and not pending.claim(pending.REVERTING, directory):
        return "confirmed or rolled back just now"
    # The agent holds the lock while it runs, so it must be stopped first. The timer of scheduled convergences
    # continues: its settings are those from before the change.
    running = tuple(unit for unit in units.running_units() if unit != units.TIMER)
    units.stop(running)
    holder = "the revert of a change that was not confirmed"
    with ConvergenceLock(state_directory, _LOCK_SECONDS, holder, outlasts_agent=True):
        if pending.read(directory) is None:
            return "rolled back just now"
        history = History(history_directory)
        request = RollbackRequest(number, history_directory, state_directory=state_directory)
        with KernelHandles() as handles:
            report = restore(request, history.load(number), history=history, handles=handles, stopped=running)
        warnings = history.note(number, REVERTED)
        pending.clear(directory)
    # The timer is still active if a failed probe started this program before the timeout expired.
    warnings += units.stop_timer(pending.UNIT)
    notes = "".join(f"; {warning}" for warning in warnings)
    return f"the change was not confirmed and is reverted: {report_text(report)}{notes}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Roll back to a saved state unless the change was confirmed.")
    parser.add_argument("--to", type=int, required=True)
    parser.add_argument("--history", required=True)
    parser.add_argument("--state-directory", required=True)
    parser.add_argument("--pending", default=pending.DIRECTORY)
    parser.add_argument("--check", action="store_true")
    return parser


def main(argv: Sequence[str]) -> int:
    """Revert, or with ``--check`` only check that it is possible; return the exit status."""
    arguments = _parser().parse_args(list(argv))
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if arguments.check:
                # The change was made beside whatever runs here, and its revert refuses as little.
                request = RollbackRequest(
                    arguments.to, arguments.history, check=True, stop_units=False, ignore_findings=NAMES
                )
                text = report_text(rollback(request))
            else:
                text = revert(arguments.to, arguments.history, arguments.state_directory, arguments.pending)
        except ProxyError as error:
            sys.stderr.write(f"kubenode-proxy: {error}\n")
            if arguments.check or attempt == _ATTEMPTS:
                return 1
            time.sleep(_PAUSE_SECONDS)
            continue
        sys.stdout.write(f"kubenode-proxy: {text}\n")
        return 0
    return 1
