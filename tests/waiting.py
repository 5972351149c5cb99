# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits for what another thread, process or machine does."""

from __future__ import annotations

import time
from typing import Any, Callable

#: Seconds that an idle machine needs a small part of.
PATIENCE = 60.0


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE, pause: float = 0.01, *, what: str = "") -> Any:
    """Poll a condition, and return its first true result. Raises AssertionError on a timeout, naming ``what``.

    ``pause``: seconds between two calls, which is at least as long as a call took. An agent, which may have the same
    processor, is not slowed down by programs that list its work.
    """
    end = time.monotonic() + seconds
    while True:
        called = time.monotonic()
        found = condition()
        if found:
            return found
        now = time.monotonic()
        if now > end:
            raise AssertionError(f"not within {seconds:g} s: {what or condition.__doc__ or condition}")
        time.sleep(max(pause, now - called))


def seconds_until(condition: Callable[[], Any], seconds: float = PATIENCE, pause: float = 0.01) -> float:
    """Return how long it took until a condition was true, as :func:`wait_for` does otherwise."""
    started = time.monotonic()
    wait_for(condition, seconds, pause)
    return time.monotonic() - started
