# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The event loop: epoll, work requested by other threads, and timers, in one thread."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import select
import threading
import time
from typing import Any, Callable, Optional, TypeVar

from .errors import KernelError

#: Called with the events of its descriptor. Events are hints: the descriptor may have been closed and reopened since.
Handler = Callable[[int], None]
Result = TypeVar("Result")

#: The loop calls ``alive`` at least this often, in seconds.
LONGEST_WAIT_SECONDS = 5.0
_CALL_SECONDS = 15.0
_MOST_EVENTS = 256


class Loop:
    """An epoll loop. Only :meth:`call`, :meth:`post` and :meth:`stop` may be used by other threads.

    ``now`` is the time of ``clock``, in seconds, at which the current round began. ``failed`` is called with the
    exception of a handler or other work, and with the handler. What it raises ends :meth:`run`, which may be called
    again; without ``failed`` every exception does.
    """

    def __init__(
        self,
        failed: Optional[Callable[[Exception, Callable[..., None]], None]] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = clock()
        self._clock = clock
        self._failed = failed or _fail
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._again: collections.deque[Callable[[], None]] = collections.deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._due: dict[int, float] = {}
        self._rounds: list[tuple[Callable[[], Optional[float]], Callable[[], None]]] = []
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = self._ended = False
        self._thread = 0
        self.watch(self._wake_read, self._woken, select.EPOLLIN)

    def clock(self) -> float:
        """Return :attr:`now`, for objects that need the time often."""
        return self.now

    def watch(self, number: int, handler: Handler, events: int) -> None:
        """Call the handler for these events of the descriptor. Raises OSError."""
        self._epoll.register(number, events)
        self._handlers[number] = handler

    def change(self, number: int, events: int) -> None:
        """Change the events to wait for of a descriptor."""
        self._epoll.modify(number, events)

    def hand_over(self, number: int, handler: Handler) -> None:
        """Replace the handler of a watched descriptor."""
        self._handlers[number] = handler

    def forget(self, number: int) -> None:
        """Stop waiting for a descriptor; the caller must close it next."""
        if self._handlers.pop(number, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(number)

    def again(self, work: Callable[[], None]) -> None:
        """Run work in the next round, after the events of other descriptors were handled."""
        self._again.append(work)

    def every(self, seconds: float, work: Callable[[], None]) -> None:
        """Run work periodically."""
        self._due[len(self._timers)] = self.now + seconds
        self._timers.append((seconds, work))

    def each_round(self, due: Callable[[], Optional[float]], work: Callable[[], None]) -> None:
        """Run work at the end of every round, and begin a round at the time that ``due`` returns, if any."""
        self._rounds.append((due, work))

    def post(self, work: Callable[[], None]) -> None:
        """Run work in the loop's thread soon, without waiting for it."""
        self._calls.put(work)
        self._wake()

    def call(self, work: Callable[[], Result]) -> Result:
        """Run work in the loop's thread and return its result, or raise its exception.

        Raises KernelError if the loop does not run it in time.
        """
        if threading.get_ident() == self._thread:
            return work()
        if self._ended:
            raise KernelError("the event loop has ended")
        results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                results.put((True, work()))
            except Exception as error:
                results.put((False, error))

        self.post(run)
        try:
            succeeded, result = results.get(timeout=_CALL_SECONDS)
        except queue.Empty:
            raise KernelError(f"the event loop does not answer within {_CALL_SECONDS:g} seconds") from None
        if not succeeded:
            raise result
        return result  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Make :meth:`run` return soon."""
        self._stopping = True
        self._wake()

    def run(self, alive: Callable[[], None]) -> None:
        """Serve until :meth:`stop`, and call ``alive`` at least every LONGEST_WAIT_SECONDS."""
        self._thread = threading.get_ident()
        try:
            # The byte that announced them may have been read before an exception ended the last call.
            self.run_posted()
            while not self._stopping:
                alive()
                self.step()
        finally:
            self._thread = 0
            self._ended = self._stopping

    def step(self) -> None:
        """Run one round."""
        events = self._epoll.poll(0.0 if self._again else self._wait(), _MOST_EVENTS)
        self.now = self._clock()
        for _count in range(len(self._again)):
            self._guard(self._again.popleft())
        handlers = self._handlers
        for number, mask in events:
            handler = handlers.get(number)
            if handler is None:
                continue
            try:
                handler(mask)
            except Exception as error:
                self._failed(error, handler)
        for number, due in self._due.items():
            if self.now >= due:
                seconds, work = self._timers[number]
                self._due[number] = self.now + seconds
                self._guard(work)
        for _due, work in self._rounds:
            self._guard(work)

    def _wait(self) -> float:
        moments = [*self._due.values(), *(due() for due, _work in self._rounds)]
        now = self._clock()
        return max(0.0, min([LONGEST_WAIT_SECONDS, *(moment - now for moment in moments if moment is not None)]))

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._failed(error, work)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _woken(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        self.run_posted()

    def run_posted(self) -> None:
        """Run what other threads have posted so far: by the loop's thread, or after that has ended."""
        while True:
            try:
                work = self._calls.get_nowait()
            except queue.Empty:
                return
            work()

    def close(self) -> None:
        """Close the loop's own descriptors."""
        self._epoll.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def _fail(error: Exception, _work: Callable[..., None]) -> None:
    raise error
