# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A separate processor for each guest of user-mode Linux.

Such a guest is a tracer and the processes that it traces, which take turns: on one processor that is several times
faster than on two. Guests of all users of this machine share the processors out by locked files.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import tempfile
from typing import Iterator, NamedTuple

from tests.lab.system import LabError

_MOST_GUESTS = 64


class Pin(NamedTuple):
    """The words that precede a pinned command, and the descriptors that it must inherit."""

    words: list[str]
    descriptors: tuple[int, ...]


UNPINNED = Pin([], ())


@contextlib.contextmanager
def pinned() -> Iterator[Pin]:
    """Choose the processor with the fewest guests, for a command that is started meanwhile.

    The choice counts until the last process that has inherited the descriptor ends.
    """
    processors = sorted(os.sched_getaffinity(0))
    for turn, processor in itertools.product(range(_MOST_GUESTS), processors):
        path = os.path.join(tempfile.gettempdir(), f"kubenode-guest-{os.getuid()}-{processor}-{turn}.lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield Pin(["taskset", "--cpu-list", str(processor)], (descriptor,))
            return
        finally:
            os.close(descriptor)
    raise LabError(f"there are {_MOST_GUESTS} guests of user-mode Linux on each processor")
