# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All health checks of the node in one thread: a loop over non-blocking attempts."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import threading
from typing import Callable, Dict, Iterable, NamedTuple, Optional, Set

from ..supervision import Task
from ..timers import monotonic
from .attempt import Attempt, Failed, Target, TlsContexts

#: The maximum random addition to an interval, as a share of it, so that the nodes of a cluster do not check in step.
JITTER = 0.1
_LONGEST_WAIT_SECONDS = 10.0


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
        self._wanted: Set[Target] = set()
        self._verdicts: Dict[Target, Verdict] = {}
        self._read, self._write = os.pipe()
        for descriptor in (self._read, self._write):
            os.set_blocking(descriptor, False)
        self._stop = False

    def follow(self, targets: Iterable[Target]) -> None:
        """Replace the targets; the results of targets that were checked before are kept."""
        with self._lock:
            self._wanted = set(targets)
        self.interrupt()

    def verdicts(self) -> Dict[Target, Verdict]:
        """Return the results of all targets that have been checked."""
        with self._lock:
            return dict(self._verdicts)

    def stop(self) -> None:
        """Stop the thread soon."""
        self._stop = True
        self.interrupt()

    def interrupt(self) -> None:
        """Wake the thread."""
        # A full pipe wakes the thread as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def run(self, task: Task) -> None:
        """Run checks until stopped."""
        checked: Dict[Target, _Checked] = {}
        contexts = TlsContexts()
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            try:
                while not self._stop:
                    self._follow_wanted(checked, selector)
                    task.busy(_LONGEST_WAIT_SECONDS)
                    for key, _events in selector.select(self._wait(checked)):
                        if key.data is not None:
                            self._advance(key.data, checked[key.data], selector)
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._read, 4096)
                    self._begin_and_time_out(checked, selector, contexts)
            finally:
                for item in checked.values():
                    self._end(item, selector)

    def _follow_wanted(self, checked: Dict[Target, _Checked], selector: selectors.BaseSelector) -> None:
        with self._lock:
            wanted = self._wanted
            for target in [target for target in checked if target not in wanted]:
                self._end(checked.pop(target), selector)
                self._verdicts.pop(target, None)
        now = self._clock()
        for target in wanted.difference(checked):
            checked[target] = _Checked(now)

    def _wait(self, checked: Dict[Target, _Checked]) -> float:
        now = self._clock()
        moments = [item.deadline if item.attempt is not None else item.due for item in checked.values()]
        return max(0.0, min([_LONGEST_WAIT_SECONDS / 2, *(moment - now for moment in moments)]))

    def _begin_and_time_out(
        self, checked: Dict[Target, _Checked], selector: selectors.BaseSelector, contexts: TlsContexts
    ) -> None:
        now = self._clock()
        for target, item in checked.items():
            if item.attempt is None:
                if item.due <= now:
                    self._begin(target, item, selector, contexts)
            elif item.deadline <= now:
                self._result(target, item, selector, f"no answer within {target.check.timeout:g} s")

    def _begin(self, target: Target, item: _Checked, selector: selectors.BaseSelector, contexts: TlsContexts) -> None:
        now = self._clock()
        item.due = now + target.check.interval * (1.0 + JITTER * self._jitter())
        item.deadline = now + target.check.timeout
        try:
            item.attempt = Attempt(target, contexts)
            selector.register(item.attempt.socket, item.attempt.events, target)
        except (Failed, OSError) as error:
            self._result(target, item, selector, str(error))

    def _advance(self, target: Target, item: _Checked, selector: selectors.BaseSelector) -> None:
        attempt = item.attempt
        if attempt is None:
            return
        before, descriptor = attempt.events, attempt.socket.fileno()
        try:
            passed = attempt.advance()
        except Failed as error:
            self._result(target, item, selector, str(error) or "failed")
            return
        if passed:
            self._result(target, item, selector, "")
        elif attempt.events != before:
            # TLS replaces the socket object; the descriptor stays the same.
            selector.modify(descriptor, attempt.events, target)

    def _result(self, target: Target, item: _Checked, selector: selectors.BaseSelector, error: str) -> None:
        self._end(item, selector)
        turned = item.record(target.check.fall, target.check.rise, error)
        if target.check.fast_interval and item.verdict.passing == bool(error):
            # The verdict may be about to change, so check again sooner.
            item.due = min(item.due, self._clock() + target.check.fast_interval)
        with self._lock:
            self._verdicts[target] = item.verdict
        if turned:
            self._deliver(VerdictChange(target, item.verdict))

    @staticmethod
    def _end(item: _Checked, selector: selectors.BaseSelector) -> None:
        attempt, item.attempt = item.attempt, None
        if attempt is not None:
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(attempt.socket)
            attempt.close()
