# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Determine whether the running kubelet has read a server from its kubeconfig, which it does at its start only.

Times are seconds since the boot, by the clock with which systemd records starts: it is never set, unlike the time of
day. They are kept with the boot's identity, since they mean nothing after another one.
"""

from __future__ import annotations

import os
import time
from typing import Optional

from ..base.errors import KernelError
from ..kernel.facts import boot_identity
from ..kernel.programs import run

_PROPERTY = "ExecMainStartTimestampMonotonic"


def present_moment() -> str:
    """Return this moment, in the form in which it is kept."""
    return f"{boot_identity()} {time.monotonic():.6f}"


def moment_of_change(path: str) -> str:
    """Return the moment at which a file was written last. Raises OSError."""
    age = max(0.0, time.time() - os.stat(path).st_mtime)
    return f"{boot_identity()} {max(0.0, time.monotonic() - age):.6f}"


def kubelet_start() -> Optional[float]:
    """Return when the running kubelet was started, None if none runs as ``kubelet.service`` of systemd."""
    try:
        done = run(["systemctl", "show", "kubelet.service", f"--property=MainPID,{_PROPERTY}"], timeout=30.0)
    except KernelError:
        return None
    found = dict(line.split("=", 1) for line in done.output.splitlines() if "=" in line)
    started = found.get(_PROPERTY, "")
    return int(started) / 1e6 if found.get("MainPID", "0") != "0" and started.isdigit() else None


def reads_between(started: Optional[float], written: str, replaced: str) -> bool:
    """Return whether a kubelet started at ``started`` has read what was in its file between two moments.

    An empty ``written`` means that it has been there for an unknown time, an empty ``replaced`` that it still is.
    """
    if started is None:
        return False
    if replaced and started > _seconds(replaced):
        return False
    return not written or started > _seconds(written)


def _seconds(moment: str) -> float:
    """Return the seconds of a moment, 0 for one before this boot or one that is not valid."""
    boot, _space, seconds = moment.partition(" ")
    try:
        return float(seconds) if boot == boot_identity() else 0.0
    except ValueError:
        return 0.0
