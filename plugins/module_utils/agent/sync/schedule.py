# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When the agent syncs: with bounded frequency, like kube-proxy 1.36's runner.

Requests while a run is queued are merged; requests during a run or the cool-down after it wait for its end. The
cool-down counts from the end of a run. Without requests a run happens ``max_interval`` after the last one, and after a
failed run another follows within ``retry_interval``, never before the cool-down is over; any successful run cancels the
retry. Whatever was detected meanwhile, everything is compared with the kernel from time to time.
"""

from __future__ import annotations

import math
from typing import Callable

from ..threads.timers import Timers

#: A full check costs O(cluster): it may take 1 % of a CPU, however short the periods are.
CHECK_PAUSE_FACTOR = 100.0


class Schedule:
    """Pure bookkeeping over a clock that the caller supplies; all times and intervals are in seconds."""

    def __init__(self, min_interval: float, retry_interval: float, max_interval: float) -> None:
        self.min_interval = min_interval
        self.retry_interval = min(retry_interval, max_interval)
        self.max_interval = max_interval
        #: Whether a requested run has not started yet.
        self.requested = False
        self._earliest = -math.inf
        self._retry_at = math.inf
        self._force_at = math.inf

    def request(self) -> None:
        """Request a run as soon as the cool-down allows."""
        self.requested = True

    def delay(self, now: float) -> float:
        """Return the seconds until the next run should start: 0 if it is due, infinity if none is planned."""
        wanted = min(now if self.requested else math.inf, self._retry_at, self._force_at)
        return max(0.0, max(wanted, self._earliest) - now)

    def rests(self, now: float) -> bool:
        """Return whether the cool-down of the last run is not over, in which even a request must wait."""
        return now < self._earliest

    def started(self) -> None:
        """Record the start of a run, which covers all requests so far."""
        self.requested = False

    def ended(self, now: float, succeeded: bool, cool_down: float = 0.0) -> None:
        """Record the end of a run; a failed run is retried. ``cool_down``: at least this long, if it must be longer."""
        self._earliest = now + max(self.min_interval, cool_down)
        self._force_at = now + self.max_interval
        self._retry_at = math.inf if succeeded else now + self.retry_interval


class RegularCheck:
    """Has tables compared with the kernel a period after the last comparison, more rarely if those take long."""

    def __init__(self, timers: Timers, name: str, check: Callable[[], None]) -> None:
        self._timer = timers.add(name, check)

    def synced(self, period: float, compared: bool, seconds: float) -> None:
        """Start the period after a sync, which took ``seconds`` with the comparisons that it ended."""
        if compared:
            self._timer.restart(max(period, CHECK_PAUSE_FACTOR * seconds))
        else:
            # Also after the first sync of an empty node, which observes nothing at its end.
            self._timer.start(period)
