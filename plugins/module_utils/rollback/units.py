# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Requests to systemd: which of our units are running, stopping them, and a timer that runs a command later."""

from __future__ import annotations

import os
from typing import Sequence

from ..base.errors import HistoryError, KernelError, ProxyError
from ..kernel.programs import Completed, find_program, run

#: A scheduled convergence, which the timer starts.
RUN_UNIT = "kubenode-proxy-schedule.service"
#: The timer of scheduled convergences.
TIMER = "kubenode-proxy-schedule.timer"
#: Units that would undo a rollback: the agent, and that timer.
CONVERGING_UNITS = ("kubenode-proxy.service", TIMER, RUN_UNIT)
_TIMEOUT_SECONDS = 120.0


def why_not_systemd() -> str:
    """Return why systemd cannot act for this process; empty if it can.

    It must have booted the node, and the processes that it starts must be in the network namespace of this process.
    """
    if not os.path.isdir("/run/systemd/system"):
        return "this node was not booted by systemd"
    if not find_program("systemd-run") or not find_program("systemctl"):
        return "the programs systemd-run and systemctl are not installed"
    try:
        if os.stat("/proc/self/ns/net").st_ino != os.stat("/proc/1/ns/net").st_ino:
            return "this process is in a different network namespace from systemd"
    except OSError as error:
        return f"the network namespace of systemd cannot be determined: {error.strerror}"
    return ""


def systemctl(*arguments: str) -> Completed:
    """Run systemctl. Raises KernelError if it cannot be started or does not end."""
    return run([find_program("systemctl") or "systemctl", *arguments], timeout=_TIMEOUT_SECONDS)


def is_active(unit: str) -> bool:
    """Return whether a unit is active or activating. Raises KernelError if systemd does not answer."""
    done = systemctl("is-active", unit)
    state = done.output.strip()
    if not state:
        # An inactive unit has an exit status other than 0, too: only the output shows whether systemd has answered.
        reason = " ".join(done.errors.split()) or f"systemctl ended with status {done.status}"
        raise KernelError(f"{unit}: its state cannot be read: {reason}")
    return state in ("active", "activating", "reloading", "deactivating")


def running_units() -> list[str]:
    """Return our running units that would undo a rollback; none without systemd. Raises KernelError."""
    if why_not_systemd():
        return []
    return [unit for unit in CONVERGING_UNITS if is_active(unit)]


def _require(done: Completed, failure: str, kind: type[ProxyError] = KernelError) -> None:
    if done.status:
        raise kind(f"{failure}: {' '.join(done.errors.split())}")


def stop(units: Sequence[str]) -> None:
    """Stop units without disabling them. Raises KernelError."""
    if units:
        _require(systemctl("stop", *units), f"{', '.join(units)}: cannot be stopped")


def start_now(unit: str) -> None:
    """Start a unit without waiting until it has started. Raises KernelError."""
    _require(systemctl("start", "--no-block", unit), f"{unit}: cannot be started")


def start_timer(unit: str, seconds: float, description: str, command: Sequence[str], *more: float) -> None:
    """Have systemd run a command that many seconds from now, and again after ``more``, as ``UNIT.service``.

    Raises HistoryError.
    """
    options = [
        f"--unit={unit}",
        f"--on-active={seconds:g}s",
        *(f"--timer-property=OnActiveSec={each:g}s" for each in more),
        "--timer-property=AccuracySec=100ms",
        "--collect",
        "--property=Type=oneshot",
        "--property=KillMode=mixed",
        f"--description={description}",
    ]
    done = run([find_program("systemd-run") or "systemd-run", *options, "--", *command], timeout=_TIMEOUT_SECONDS)
    _require(done, f"the timer {unit}.timer cannot be created", HistoryError)


def stop_timer(unit: str) -> tuple[str, ...]:
    """Stop the timer of a command that is no longer needed; return a warning on failure, which is harmless.

    If the command runs nevertheless, it has nothing to do.
    """
    if why_not_systemd():
        return ()
    try:
        if is_active(f"{unit}.timer"):
            stop([f"{unit}.timer"])
    except KernelError as error:
        return (str(error),)
    return ()
