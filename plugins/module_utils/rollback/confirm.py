# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decisions on a pending change: keep it, revert it now, or withdraw it because it was rolled back."""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..base.errors import HistoryError, KernelError
from ..base.installed import HISTORY_DIRECTORY
from . import boot_directory, pending, units
from .directory import CONFIRMED, REVERTED, WITHDRAWN, HistoryDirectory


class ConfirmReport(NamedTuple):
    """The result of a confirmation.

    ``state``: the number of the state saved before the change, None if no change was pending. ``changed``: a change was
    pending and is now confirmed. ``remaining``: seconds that were left.
    """

    state: Optional[int]
    changed: bool
    remaining: float
    warnings: tuple[str, ...] = ()


def confirm(
    state: Optional[int] = None, check: bool = False, history_directory: str = HISTORY_DIRECTORY
) -> ConfirmReport:
    """Confirm the pending change; confirming again changes nothing.

    ``state``: the number that the convergence reported; if given, it is an error if that change is no longer in effect,
    because it was reverted, rolled back, or lost in a reboot. Raises HistoryError, KernelError.
    """
    waiting = pending.read()
    if waiting is None or (state is not None and waiting.saved_state != state):
        return _nothing_waits(waiting, state, HistoryDirectory(history_directory))
    report = ConfirmReport(waiting.saved_state, True, round(waiting.remaining, 1))
    if waiting.reverting:
        raise HistoryError(str(waiting))
    if check:
        return report
    if not pending.claim(pending.DECIDED):
        raise HistoryError(f"the change after state {waiting.saved_state}: its timeout has just expired")
    warnings = HistoryDirectory(waiting.history_directory).note(waiting.saved_state, CONFIRMED)
    warnings += boot_directory.confirm()
    pending.clear()
    return report._replace(warnings=(*warnings, *units.stop_timer(pending.UNIT)))


def reject(state: Optional[int] = None) -> str:
    """Have the pending change reverted now instead of after its timeout; return a description of the effect.

    ``state``: as for :func:`confirm`. The text is a clause for an error message, empty if that change is not pending.
    The revert is left to the unit of the timer, which needs neither this process nor its connection. Where the unit
    cannot be started, the timer still reverts the change. Raises HistoryError.
    """
    waiting = pending.read()
    if waiting is None or (state is not None and waiting.saved_state != state):
        return ""
    if waiting.reverting:
        return str(waiting)
    later = f"{waiting}, then the node rolls back"
    reason = units.why_not_systemd()
    if reason:
        return f"{later} ({reason})"
    try:
        units.start_now(f"{pending.UNIT}.service")
    except KernelError as error:
        return f"{later} ({error})"
    return f"the node rolls back to state {waiting.saved_state} now; {pending.UNIT}.service logs the result"


def _nothing_waits(
    waiting: Optional[pending.Pending], state: Optional[int], history: HistoryDirectory
) -> ConfirmReport:
    if state is None:
        return ConfirmReport(None, False, 0.0)
    outcome = history.outcome(state)
    if outcome == CONFIRMED:
        return ConfirmReport(state, False, 0.0)
    if outcome == REVERTED:
        raise HistoryError(f"the change after state {state} was not confirmed: the node has rolled back to it")
    if outcome == WITHDRAWN:
        raise HistoryError(f"the change after state {state} was rolled back before it was confirmed")
    if waiting is not None:
        raise HistoryError(f"state {state}: another change is pending: {waiting}")
    raise HistoryError(f"no change after state {state} waits to be confirmed: there was none, or the node was rebooted")


def withdraw() -> tuple[str, ...]:
    """Remove the pending change because it was rolled back; the caller still holds the convergence lock.

    A revert that waits for that lock, or has failed and is about to be retried, finds nothing to revert afterwards.
    Returns warnings. Raises HistoryError.
    """
    waiting = pending.read()
    if waiting is not None and not waiting.reverting and not pending.claim(pending.DECIDED):
        # It was just confirmed, or its revert has just begun.
        waiting = pending.read()
    if waiting is None:
        return ()
    warnings = HistoryDirectory(waiting.history_directory).note(waiting.saved_state, WITHDRAWN)
    pending.clear()
    return (*warnings, *units.stop_timer(pending.UNIT))
