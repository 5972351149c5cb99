# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Confirmation of a pending change, so that the node keeps it."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

from ...errors import HistoryError
from . import pending, units
from .directory import CONFIRMED, DEFAULT_DIRECTORY, REVERTED, WITHDRAWN, HistoryDirectory


class ConfirmReport(NamedTuple):
    """The result of a confirmation.

    ``state``: the number of the state saved before the change, None if no change was pending. ``changed``: a change was
    pending and is now confirmed. ``remaining``: seconds that were left.
    """

    state: Optional[int]
    changed: bool
    remaining: float
    warnings: Tuple[str, ...] = ()


def confirm(
    state: Optional[int] = None, check: bool = False, history_directory: str = DEFAULT_DIRECTORY
) -> ConfirmReport:
    """Confirm the pending change; confirming again changes nothing.

    ``state``: the number that the convergence reported; if given, it is an error if that change is no longer in effect,
    because it was reverted, rolled back, or lost in a reboot. Raises HistoryError, KernelError.
    """
    waiting = pending.read()
    if waiting is None or (state is not None and waiting.state != state):
        return _nothing_waits(waiting, state, HistoryDirectory(history_directory))
    report = ConfirmReport(waiting.state, True, round(waiting.remaining, 1))
    if waiting.reverting:
        raise HistoryError(str(waiting))
    if check:
        return report
    if not pending.claim(pending.DECIDED):
        raise HistoryError(f"the change after state {waiting.state}: its timeout has just expired")
    HistoryDirectory(waiting.history_directory).note(waiting.state, CONFIRMED)
    pending.clear()
    return report._replace(warnings=_stop_timer())


def _stop_timer() -> Tuple[str, ...]:
    """Stop the timer; return a warning on failure, which is harmless: the timer's program finds nothing to revert."""
    if units.why_not_systemd():
        return ()
    done = units.systemctl("stop", f"{pending.UNIT}.timer")
    return (f"{pending.UNIT}.timer: {' '.join(done.errors.split())}",) if done.status else ()


def _nothing_waits(
    waiting: Optional[pending.Pending], state: Optional[int], history: HistoryDirectory
) -> ConfirmReport:
    if state is None:
        return ConfirmReport(None, False, 0.0)
    outcome = history.outcome(state)
    if outcome == CONFIRMED:
        return ConfirmReport(state, False, 0.0)
    if outcome == REVERTED:
        raise HistoryError(f"the change after state {state} was not confirmed in time: the node has gone back to it")
    if outcome == WITHDRAWN:
        raise HistoryError(f"the change after state {state} was rolled back before it was confirmed")
    if waiting is not None:
        raise HistoryError(f"state {state}: not this change but another one waits: {waiting}")
    raise HistoryError(f"no change after state {state} waits to be confirmed: the node was rebooted, or never made one")


def withdraw() -> Optional[int]:
    """Forget a change that waits, since it is being rolled back; the caller holds the convergence lock.

    Returns the number of its state. Raises HistoryError.
    """
    waiting = pending.read()
    if waiting is None:
        return None
    if waiting.reverting or not pending.claim(pending.DECIDED):
        raise HistoryError(str(waiting))
    HistoryDirectory(waiting.history_directory).note(waiting.state, WITHDRAWN)
    pending.clear()
    _stop_timer()
    return waiting.state
