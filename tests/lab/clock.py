# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A clock for tests, whose time passes only when they advance it."""

from __future__ import annotations


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
