# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Timed tasks of the main loop, each a value with a name and an action."""

from __future__ import annotations

import time
from typing import Callable, Optional


def monotonic() -> float:
    """Return the time of the loop's clock in seconds, looked up with each call so that tests can replace it."""
    return time.monotonic()


AFTER_FAILURE_SECONDS = 30.0
#: When to try again what another program, or the state of the node, may have prevented.
RETRY_SECONDS = 5.0
#: Runs an action by name, and returns whether it succeeded.
Attempt = Callable[[str, Callable[[], None]], bool]


def _directly(_name: str, action: Callable[[], None]) -> bool:
    action()
    return True


class Timer:
    """One task of the loop; :meth:`Timers.add` makes it. ``due``: when it runs, by the timers' clock, or None."""

    def __init__(self, name: str, action: Callable[[], object], clock: Callable[[], float]) -> None:
        self.name = name
        self.due: Optional[float] = None
        self._action = action
        self._clock = clock

    def start(self, seconds: float) -> None:
        """Run the action after this time, unless it is already due earlier."""
        if self.due is None:
            self.due = self._clock() + seconds

    def restart(self, seconds: float) -> None:
        """Run the action after this time; replaces an earlier start."""
        self.due = self._clock() + seconds

    def cancel(self) -> None:
        """Do not run the action unless it is started again."""
        self.due = None

    def run(self) -> None:
        """Run the action, which may start the timer again."""
        self.due = None
        self._action()


class Pace:
    """Limits the share of the loop's time that some work takes, for which others would wait.

    After each time it rests ``factor`` times as long as it took, and at least ``least`` seconds.
    """

    def __init__(self, clock: Callable[[], float], factor: float, least: float = 0.0) -> None:
        self._clock = clock
        self._factor = factor
        self._least = least
        self._earliest = float("-inf")

    def rest(self) -> float:
        """Return the seconds to rest before the next time."""
        return max(0.0, self._earliest - self._clock())

    def worked(self, seconds: float) -> None:
        """Record that the work has just ended, which took ``seconds``."""
        self._earliest = self._clock() + max(self._least, self._factor * seconds)


class Timers:
    """The timers of one loop. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._timers: list[Timer] = []

    def add(self, name: str, action: Callable[[], object]) -> Timer:
        """Return a new timer, which is not started."""
        timer = Timer(name, action, self.clock)
        self._timers.append(timer)
        return timer

    def delay(self) -> float:
        """Return the seconds until the next timer is due: 0 if one is due now, infinity if none is started."""
        due = [timer.due for timer in self._timers if timer.due is not None]
        return max(0.0, min(due) - self.clock()) if due else float("inf")

    def run(self, attempt: Attempt = _directly) -> None:
        """Run the actions of all timers that are due, in the order in which the timers were added.

        ``attempt`` runs an action by name and returns whether it succeeded; one that did not runs again after a pause.
        """
        now = self.clock()
        for timer in [timer for timer in self._timers if timer.due is not None and timer.due <= now]:
            if not attempt(timer.name, timer.run):
                timer.start(AFTER_FAILURE_SECONDS)
