# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inbox of the agent's loop, which wakes for items, signals, readable descriptors and timeouts."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
from typing import Generic, Iterator, Sequence, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A queue that can be waited for together with descriptors. Only the loop calls :meth:`wait` and :meth:`items`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._read, self._write = os.pipe()
        for descriptor in (self._read, self._write):
            os.set_blocking(descriptor, False)

    def wake(self) -> None:
        """Wake the loop; may be called from any thread or signal handler."""
        # A full pipe wakes the loop as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def deliver(self, item: Item) -> None:
        """Add an item for the loop to process."""
        self._items.put(item)
        self.wake()

    def wait(self, descriptors: Sequence[int], seconds: float) -> None:
        """Wait until an item is delivered, a descriptor becomes readable, or the time has passed."""
        # Not select(), which supports no descriptor above 1023: an agent has thousands of ports open.
        waiting = select.poll()
        for descriptor in (self._read, *descriptors):
            waiting.register(descriptor, select.POLLIN)
        waiting.poll(math.ceil(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    @property
    def is_empty(self) -> bool:
        """Whether nothing was delivered that the loop has not processed."""
        return self._items.empty()

    def items(self) -> Iterator[Item]:
        """Yield the delivered items in order."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._items.get_nowait()
