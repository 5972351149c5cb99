# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The clients that the match ``recent`` of iptables remembers (/proc/net/xt_recent): session affinity."""

from __future__ import annotations

import time
from typing import Iterable, Optional

from ...base.addresses import canonical_address
from ...base.errors import KernelError

_DIRECTORY = "/proc/thread-self/net/xt_recent"
#: CLOCK_MONOTONIC_COARSE, which advances with each tick: its resolution is the length of one.
_COARSE = 6
#: The kernel starts counting five minutes before its counter of 32 bits overflows (INITIAL_JIFFIES).
_START_SECONDS = 300


def ticks_now(tick: float, uptime: float) -> int:
    """Return the kernel's counter of ticks (``jiffies``) at a time after its start."""
    return (1 << 32) - round(_START_SECONDS / tick) + round(uptime / tick)


def parse_recent(lines: Iterable[str], client: str, now: int, tick: float) -> Optional[float]:
    """Return how many seconds ago a client was last seen, from the lines of a list; None if it is not in the list."""
    for line in lines:
        words = line.split()
        if len(words) > 4 and canonical_address(words[0].partition("=")[2]) == client:
            number = words[words.index("last_seen:") + 1] if "last_seen:" in words else ""
            return max(0.0, (now - int(number)) * tick) if number.isdecimal() else None
    return None


def last_seen(name: str, client: str) -> Optional[float]:
    """Return how many seconds ago a list last saw a client; None if never, or there is no list. Raises KernelError."""
    tick = time.clock_getres(_COARSE)
    now = ticks_now(tick, time.clock_gettime(time.CLOCK_MONOTONIC))
    try:
        with open(f"{_DIRECTORY}/{name}", encoding="ascii") as lines:
            return parse_recent(lines, client, now, tick)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KernelError(f"{_DIRECTORY}/{name}: {error.strerror}") from error
