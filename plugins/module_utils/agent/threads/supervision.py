# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Background threads that cannot die or hang unnoticed.

Every thread of the agent except the main one runs under one Supervisor. An exception in a thread is logged once with
its traceback, and the thread resumes after a pause. Each thread announces when its next sign of life is due. The main
loop checks that and interrupts a late thread; if the thread still does not respond, it counts as stuck: /healthz fails
and the watchdog is no longer fed.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Callable, Optional

from ...base.errors import brief_traceback
from ..telemetry.log import Log

FIRST_PAUSE_SECONDS = 0.8
LONGEST_PAUSE_SECONDS = 30.0
_FORGET_SECONDS = 120.0
#: How long a sign of life may be overdue before the thread is interrupted, and after that before it counts as stuck.
GRACE_SECONDS = 30.0
STUCK_SECONDS = 60.0


class Backoff:
    """Pauses between attempts, in seconds: doubled from 0.8 up to 30, each extended at random up to twice its length.

    The values are those of client-go's reflectors (k8s.io/client-go/tools/cache).
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._next = FIRST_PAUSE_SECONDS

    def pause(self) -> float:
        """Return the next pause."""
        pause = self._next * (1.0 + self._jitter())
        self._next = min(self._next * 2, LONGEST_PAUSE_SECONDS)
        return min(pause, LONGEST_PAUSE_SECONDS)

    def reset(self) -> None:
        """Start again with short pauses after a successful attempt."""
        self._next = FIRST_PAUSE_SECONDS


class Task:
    """A supervised thread. It calls ``body`` with this object and ends when ``body`` returns.

    The main thread calls ``interrupt`` to unblock a body that hangs.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[Task], None],
        *,
        interrupt: Callable[[], None],
        log: Log,
        clock: Callable[[], float],
        backoff: Callable[[], Backoff],
    ) -> None:
        self.name = name
        self.interrupt = interrupt
        self.ended = False
        self.interrupted_for: Optional[float] = None
        self._body = body
        self._log = log
        self._clock = clock
        self._backoff = backoff()
        #: When the next sign of life is due, by the supervisor's clock; None while the thread waits for work.
        self.deadline: Optional[float] = None
        self._closing = threading.Event()
        self._failed_at = 0.0
        self._known_failure = ""
        self._thread: Optional[threading.Thread] = None

    def busy(self, seconds: float) -> None:
        """Announce that the next sign of life is due within this many seconds."""
        self.deadline = self._clock() + seconds

    def idle(self) -> None:
        """Announce that the thread is waiting for work, without a time limit."""
        self.deadline = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start or restart the thread. Raises RuntimeError if the system allows no more threads."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Do not call the body again after a failure."""
        self._closing.set()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most this many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._body(self)
            except Exception as error:
                self._failed(error)
            else:
                break
        self.ended = True

    def _failed(self, error: Exception) -> None:
        now = self._clock()
        if now - self._failed_at > _FORGET_SECONDS:
            self._backoff.reset()
        pause = self._backoff.pause()
        self.busy(pause)
        where = brief_traceback(error)
        failure = f"{type(error).__name__} {where}"
        if failure != self._known_failure:
            self._log.error(
                "a thread has failed and resumes after a pause; this is a defect of the agent",
                thread=self.name,
                error=f"{type(error).__name__}: {error}",
                traceback=where,
                seconds=pause,
            )
        self._known_failure = failure
        self._failed_at = now
        self._closing.wait(pause)


class Supervisor:
    """The agent's background threads. Only the main thread calls its methods. ``clock`` is monotonic, in seconds."""

    def __init__(
        self, log: Log, clock: Callable[[], float] = time.monotonic, backoff: Callable[[], Backoff] = Backoff
    ) -> None:
        self._log = log
        self._clock = clock
        self._backoff = backoff
        self._tasks: list[Task] = []
        self._stuck: set[Task] = set()

    def start(self, name: str, body: Callable[[Task], None], interrupt: Callable[[], None] = lambda: None) -> Task:
        """Run a body in its own thread; see :class:`Task`. If the thread cannot be started now, retry later."""
        task = Task(name, body, interrupt=interrupt, log=self._log, clock=self._clock, backoff=self._backoff)
        self._tasks.append(task)
        self._begin(task)
        return task

    def check(self) -> tuple[str, ...]:
        """Restart dead threads, interrupt late ones, and return the names of those that are stuck."""
        now = self._clock()
        self._tasks = [task for task in self._tasks if not task.ended]
        for task in self._tasks:
            if not task.alive and not task.ended:
                self._log.error("a thread has died and is restarted", thread=task.name)
                self._begin(task)
                continue
            deadline = task.deadline
            if deadline is None or now < deadline + GRACE_SECONDS:
                if task in self._stuck:
                    self._log.info("a stuck thread has recovered", thread=task.name)
                    self._stuck.discard(task)
            elif task.interrupted_for != deadline:
                task.interrupted_for = deadline
                self._log.warning("a thread does not respond; interrupting it", thread=task.name)
                task.interrupt()
            elif now >= deadline + GRACE_SECONDS + STUCK_SECONDS and task not in self._stuck:
                self._stuck.add(task)
                self._log.error("a thread is stuck; the agent is unhealthy", thread=task.name)
        self._stuck.intersection_update(self._tasks)
        return tuple(sorted(task.name for task in self._stuck))

    def delay(self) -> float:
        """Return the seconds until :meth:`check` must be called next."""
        now = self._clock()
        due = [GRACE_SECONDS]
        for task in self._tasks:
            if not task.alive and not task.ended:
                return 1.0
            deadline = task.deadline
            if deadline is not None:
                limit = deadline + GRACE_SECONDS
                due.append(limit - now if task.interrupted_for != deadline else limit + STUCK_SECONDS - now)
        return max(1.0, min(due))

    def _begin(self, task: Task) -> None:
        try:
            task.start()
        except RuntimeError as error:
            self._log.error("a thread cannot be started, retrying", thread=task.name, error=error)
