# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Background threads that cannot die or hang unnoticed.

Every thread of the agent beside the main one runs under one Supervisor. An exception in it is logged once with its
traceback, and the thread goes on after a pause. It says until when it will show the next sign of life; the main loop
checks that, breaks off what a late thread waits for, and reports a thread that does not come back even then, upon which
/healthz fails and the watchdog is no longer fed.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from typing import Callable, Dict, List, Optional, Tuple

from .surface.log import Log

FIRST_PAUSE_SECONDS = 0.8
LONGEST_PAUSE_SECONDS = 30.0
_FORGET_SECONDS = 120.0
#: How much later than announced a sign of life may come before the thread is interrupted, and after that.
GRACE_SECONDS = 30.0
STUCK_SECONDS = 60.0
_FRAMES = 6


class Backoff:
    """Pauses between attempts, in seconds: doubled from 0.8 up to 30, each stretched at random by up to its double.

    These are the numbers of client-go's reflectors (k8s.io/client-go/tools/cache).
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
        """Begin with short pauses again: an attempt was successful."""
        self._next = FIRST_PAUSE_SECONDS


def brief_traceback(error: BaseException) -> str:
    """Return the innermost frames of an exception on one line, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames)


class Task:
    """A supervised thread. ``body`` is called with this object; when it returns the thread has done its work.

    ``interrupt`` makes the body go on if it hangs; it is called from the main thread.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[Task], None],
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
        self._deadline: Optional[float] = None
        self._closing = threading.Event()
        self._failed_at = 0.0
        self._known_failure = ""
        self._thread: Optional[threading.Thread] = None

    def busy(self, seconds: float) -> None:
        """Announce that the next sign of life comes within so many seconds."""
        self._deadline = self._clock() + seconds

    def idle(self) -> None:
        """Announce that the thread waits for work, for as long as it takes."""
        self._deadline = None

    @property
    def deadline(self) -> Optional[float]:
        """When the next sign of life is due, by the supervisor's clock; None while the thread waits for work."""
        return self._deadline

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, or start it again. Raises RuntimeError if the system allows no more threads."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Do not call the body again after a failure."""
        self._closing.set()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most so long."""
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
                "a thread has failed and goes on after a pause; this is a defect of the agent",
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
        self._tasks: List[Task] = []
        self._stuck: Dict[Task, float] = {}

    def start(self, name: str, body: Callable[[Task], None], interrupt: Callable[[], None] = lambda: None) -> Task:
        """Run a body in a thread of its own; see :class:`Task`. If no thread can be started now, it is tried again."""
        task = Task(name, body, interrupt, self._log, self._clock, self._backoff)
        self._tasks.append(task)
        self._begin(task)
        return task

    def check(self) -> Tuple[str, ...]:
        """Start dead threads again, interrupt late ones, and return the names of those that are stuck all the same."""
        now = self._clock()
        self._tasks = [task for task in self._tasks if not task.ended]
        for task in self._tasks:
            if not task.alive and not task.ended:
                self._log.error("a thread has died and is started again", thread=task.name)
                self._begin(task)
                continue
            deadline = task.deadline
            if deadline is None or now < deadline + GRACE_SECONDS:
                if task in self._stuck:
                    self._log.info("a thread that was stuck goes on", thread=task.name)
                    del self._stuck[task]
            elif task.interrupted_for != deadline:
                task.interrupted_for = deadline
                self._log.warning("a thread shows no sign of life: what it waits for is broken off", thread=task.name)
                task.interrupt()
            elif now >= deadline + GRACE_SECONDS + STUCK_SECONDS and task not in self._stuck:
                self._stuck[task] = now
                self._log.error("a thread is stuck: the agent counts as unhealthy", thread=task.name)
        self._stuck = {task: since for task, since in self._stuck.items() if task in self._tasks}
        return tuple(sorted(task.name for task in self._stuck))

    def delay(self) -> float:
        """Return the seconds after which :meth:`check` has to be called next."""
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
            self._log.error("a thread cannot be started, and is tried again", thread=task.name, error=error)
