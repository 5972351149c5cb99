# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All health checks of the node in one thread: a loop over non-blocking attempts."""

from __future__ import annotations

import random
import threading
from typing import Callable, Iterable, NamedTuple, Optional

from ...base.loop import LONGEST_WAIT_SECONDS, Loop
from ..threads.supervision import Task
from ..threads.timers import monotonic
from .attempt import Attempt, Failed, Target, TlsContexts

#: The maximum random addition to an interval, as a share of it, so that the nodes of a cluster do not check in step.
JITTER = 0.1


class Verdict(NamedTuple):
    """The results of a target's checks.

    ``passing``: whether the target may be used. ``failures``: failed checks in a row. ``checks``: number of finished
    checks.
    """

    passing: bool = True
    failures: int = 0
    error: str = ""
    checks: int = 0


class VerdictChange(NamedTuple):
    """A target whose verdict has changed."""

    target: Target
    verdict: Verdict


class _Checked:
    """A target with its results, and the time of its next check."""

    def __init__(self, due: float) -> None:
        self.due = due
        self.verdict = Verdict()
        self.attempt: Optional[Attempt] = None
        self.deadline = 0.0
        self._passed = 0

    def record(self, check_fall: int, check_rise: int, error: str) -> bool:
        """Record the result of a check, without ``error`` if it has passed; return whether the verdict has changed.

        A new target counts as passing, and fails with its first failed check.
        """
        passing, failures, _error, checks = self.verdict
        first = not checks
        failures = failures + 1 if error else 0
        self._passed = 0 if error else self._passed + 1
        now = passing
        if passing and (failures >= check_fall or (first and error)):
            now = False
        elif not passing and self._passed >= check_rise:
            now = True
        self.verdict = Verdict(now, failures, error or self.verdict.error, checks + 1)
        return now != passing


class Prober:
    """Checks targets until :meth:`stop`; :meth:`run` is the body of a supervised thread.

    ``deliver`` receives each :class:`VerdictChange`, in that thread. Only the main thread calls the other methods.
    """

    def __init__(
        self,
        deliver: Callable[[VerdictChange], None],
        clock: Callable[[], float] = monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._deliver = deliver
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._wanted: set[Target] = set()
        self._verdicts: dict[Target, Verdict] = {}
        # Only the thread uses what follows.
        self._checked: dict[Target, _Checked] = {}
        self._contexts = TlsContexts()
        self._loop = Loop(clock=clock)
        self._loop.each_round(self._next_moment, self._begin_and_time_out)

    def follow(self, targets: Iterable[Target]) -> None:
        """Replace the targets; the results of targets that were checked before are kept."""
        with self._lock:
            self._wanted = set(targets)
        self._loop.post(self._follow_wanted)

    def verdicts(self) -> dict[Target, Verdict]:
        """Return the results of all targets that have been checked."""
        with self._lock:
            return dict(self._verdicts)

    def stop(self) -> None:
        """Stop the thread soon."""
        self._loop.stop()

    def interrupt(self) -> None:
        """Wake the thread."""
        self._loop.post(self._follow_wanted)

    def run(self, task: Task) -> None:
        """Run checks until stopped."""
        try:
            self._follow_wanted()
            self._loop.run(lambda: task.busy(2 * LONGEST_WAIT_SECONDS))
        finally:
            for item in self._checked.values():
                self._end(item)
            self._checked.clear()

    def _follow_wanted(self) -> None:
        checked = self._checked
        with self._lock:
            wanted = self._wanted
            for target in [target for target in checked if target not in wanted]:
                self._end(checked.pop(target))
                self._verdicts.pop(target, None)
        now = self._clock()
        for target in wanted.difference(checked):
            checked[target] = _Checked(now)

    def _next_moment(self) -> Optional[float]:
        moments = (item.deadline if item.attempt is not None else item.due for item in self._checked.values())
        return min(moments, default=None)

    def _begin_and_time_out(self) -> None:
        now = self._clock()
        for target, item in self._checked.items():
            if item.attempt is None:
                if item.due <= now:
                    self._begin(target, item)
            elif item.deadline <= now:
                self._result(target, item, f"no answer within {target.check.timeout:g} s")

    def _begin(self, target: Target, item: _Checked) -> None:
        now = self._clock()
        item.due = now + target.check.interval * (1.0 + JITTER * self._jitter())
        item.deadline = now + target.check.timeout
        try:
            attempt = item.attempt = Attempt(target, self._contexts)
            self._loop.watch(attempt.socket.fileno(), lambda _mask: self._advance(target, item), attempt.events)
        except (Failed, OSError) as error:
            self._result(target, item, str(error))

    def _advance(self, target: Target, item: _Checked) -> None:
        attempt = item.attempt
        if attempt is None:
            return
        before, descriptor = attempt.events, attempt.socket.fileno()
        try:
            passed = attempt.advance()
        except Failed as error:
            self._result(target, item, str(error) or "failed")
            return
        if passed:
            self._result(target, item, "")
        elif attempt.events != before:
            # TLS replaces the socket object; the descriptor stays the same.
            self._loop.change(descriptor, attempt.events)

    def _result(self, target: Target, item: _Checked, error: str) -> None:
        self._end(item)
        turned = item.record(target.check.fall, target.check.rise, error)
        if target.check.fast_interval and item.verdict.passing == bool(error):
            # The verdict may be about to change, so check again sooner.
            item.due = min(item.due, self._clock() + target.check.fast_interval)
        with self._lock:
            self._verdicts[target] = item.verdict
        if turned:
            self._deliver(VerdictChange(target, item.verdict))

    def _end(self, item: _Checked) -> None:
        attempt, item.attempt = item.attempt, None
        if attempt is not None:
            self._loop.forget(attempt.socket.fileno())
            attempt.close()
