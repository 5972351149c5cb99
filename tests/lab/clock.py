# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clocks for tests: one whose time passes only when they advance it, and the clock of a guest, which they set."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Iterator

from .system import LabError


class Clock:
    """A function that returns the time in seconds; tests set ``now``."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@contextlib.contextmanager
def guest_clock_set(seconds: float) -> Iterator[None]:
    """Set the clock of a user-mode Linux guest forward, or back, within the block.

    Raises LabError on any other machine, whose clock belongs to all its programs.
    """
    if "User Mode Linux" not in Path("/proc/cpuinfo").read_text(encoding="ascii"):
        raise LabError("only the clock of a user-mode Linux guest may be set")
    time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)
    try:
        yield
    finally:
        time.clock_settime(time.CLOCK_REALTIME, time.time() - seconds)
