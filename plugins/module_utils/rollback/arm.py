# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Before a change: arm the timer that rolls back to the saved state unless the change is confirmed in time."""

from __future__ import annotations

import sys
import time
from typing import Optional

from ..base.errors import HistoryError, PreflightError
from ..base.timestamps import timestamp
from ..kernel.programs import run
from . import pending, units
from .pending import Pending

_CHECK_SECONDS = 120.0
_LONGEST_SECONDS = 86_400.0


def check_timeout(seconds: float) -> None:
    """Check that changes can be reverted after that many seconds. Raises PreflightError."""
    if not 1 <= seconds <= _LONGEST_SECONDS:
        raise PreflightError(f"confirm_timeout: {seconds:g} is not between 1 and {_LONGEST_SECONDS:g} seconds")
    reason = units.why_not_systemd()
    if reason:
        raise PreflightError(
            f"confirm_timeout: {reason}, so nothing would revert the change; set it to 0 to need no confirmation"
        )


def refuse_if_pending(check: bool = False) -> Optional[str]:
    """Raise HistoryError if a change waits to be confirmed; return a warning if its timer no longer exists.

    With ``check`` only warn, and keep the file of the pending change. Raises KernelError if systemd does not answer.
    """
    waiting = pending.read()
    if waiting is None:
        # A decision that was cut short leaves the directory, for which the runs of other users are refused.
        return None if check else _remove_leftovers()
    if check:
        return str(waiting)
    if not units.why_not_systemd():
        if units.is_active(f"{pending.UNIT}.timer") or units.is_active(f"{pending.UNIT}.service"):
            raise HistoryError(
                f"{waiting}: confirm it (service_proxy_confirm or kubenode-proxy confirm), roll it back, or wait"
            )
        pending.clear()
        return (
            f"the change after state {waiting.saved_state} was not confirmed, but its timer no longer exists: "
            "the change stays in effect"
        )
    raise HistoryError(
        f"{waiting}: remove {pending.DIRECTORY} manually, because the timer is not visible to this process"
    )


def _remove_leftovers() -> Optional[str]:
    """Remove the directory of a change that is no longer pending; return a warning on failure."""
    try:
        pending.clear()
    except HistoryError as error:
        return str(error)
    return None


def arm(number: int, seconds: float, history_directory: str, state_directory: str) -> Pending:
    """Have systemd roll back to the saved state after that many seconds, after checking that the rollback would work.

    The caller holds the convergence lock. Nothing is armed if it raises HistoryError, PreflightError or
    ConfigurationError.
    """
    # Imported late: most changes need no confirmation.
    from ..packaging.running import pack_running
    from . import revert

    check_timeout(seconds)
    deadline = timestamp(time.time() + seconds)
    waiting = Pending(
        saved_state=number,
        armed=time.monotonic(),
        timeout=seconds,
        deadline=deadline,
        history_directory=history_directory,
        state_directory=state_directory,
    )
    try:
        path = pending.write(waiting, pack_running(revert.__name__))
        command = [sys.executable or "/usr/bin/python3", "-I", "-B", path]
        command += ["--to", str(number), "--history", history_directory, "--state-directory", state_directory]
        trial = run([*command, "--check"], timeout=_CHECK_SECONDS)
        if trial.status:
            message = " ".join(trial.errors.split()) or f"exit status {trial.status}"
            raise HistoryError(f"rolling back to state {number} would not work: {message}")
        units.start_timer(pending.UNIT, seconds, "Revert an unconfirmed change of the service proxy", command)
    except BaseException:
        pending.clear()
        raise
    return waiting._replace(armed=time.monotonic())
