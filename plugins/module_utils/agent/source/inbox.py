# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What wakes the agent's loop: items from other threads, signals, descriptors and time."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
from typing import Any, Iterator, Sequence


class Inbox:
    """A queue that can be waited for together with descriptors. Only :meth:`wait` and :meth:`items` are the loop's."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._read, self._write = os.pipe()
        for descriptor in (self._read, self._write):
            os.set_blocking(descriptor, False)

    def wake(self) -> None:
        """Have the loop look at what is new; may be called from any thread or signal handler."""
        # A full pipe wakes as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def deliver(self, item: Any) -> None:
        """Put an item for the loop to take up."""
        self._items.put(item)
        self.wake()

    def wait(self, descriptors: Sequence[int], seconds: float) -> None:
        """Wait until something was delivered, a descriptor is readable, or the time is over."""
        # Not select(), which knows no descriptor above 1023: an agent has thousands of ports open.
        waiting = select.poll()
        for descriptor in (self._read, *descriptors):
            waiting.register(descriptor, select.POLLIN)
        waiting.poll(math.ceil(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def items(self) -> Iterator[Any]:
        """What was delivered, in its order."""
        while True:
            try:
                yield self._items.get_nowait()
            except queue.Empty:
                return
