# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's log: what every program of the engine logs with, and a limit for lines that other programs cause."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Hashable, Mapping

from ...base.log import DEBUG, ERROR, INFO, WARNING, Log

__all__ = ["DEBUG", "ERROR", "INFO", "WARNING", "LimitedLog", "Log"]

_MOST_KEYS = 1000
#: Lines of one kind about the objects of one namespace. Its users choose how many objects there are, and change them.
MOST_OF_NAMESPACE = 25


class LimitedLog:
    """Writes lines that other programs can cause without limit: a few for each key, then only their number.

    Of the lines with one key, the first ``burst`` within ``seconds`` are written; the others are counted, and
    :meth:`report` writes one line that says how many there were. Safe to use from several threads.
    """

    def __init__(
        self, log: Log, burst: int = 5, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = seconds
        self._log = log
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: dict[Hashable, _Limited] = {}

    def write(self, key: Hashable, level: str, message: str, **fields: Any) -> bool:
        """Write one line, or count it; returns whether it was written."""
        return self._write(self._burst, key, level, message, fields)

    def once(self, key: Hashable, message: str, level: str = WARNING, **fields: Any) -> bool:
        """Write a long line if it is the first one with its key; else count it."""
        return self._write(1, key, level, message, fields)

    def about(self, kind: str, namespace: str, message: str, level: str = WARNING, **fields: Any) -> bool:
        """Write a line about an object of a namespace, or count it; returns whether it was written.

        Lines about the objects of one namespace take no lines from those of another one.
        """
        return self._write(MOST_OF_NAMESPACE, (kind, namespace), level, message, fields)

    def _write(self, burst: int, key: Hashable, level: str, message: str, fields: Mapping[str, Any]) -> bool:
        with self._lock:
            now = self._clock()
            known = self._keys.get(key)
            if known is None or (now >= known.until and not known.suppressed):
                if len(self._keys) >= _MOST_KEYS:
                    self._forget(now)
                known = self._keys[key] = _Limited(level, message, now + self.seconds)
            known.lines += 1
            if known.lines > burst:
                known.suppressed += 1
                return False
        self._log.write(level, message, **fields)
        return True

    def warning(self, key: Hashable, message: str, **fields: Any) -> bool:
        """See :meth:`write`."""
        return self.write(key, WARNING, message, **fields)

    def error(self, key: Hashable, message: str, **fields: Any) -> bool:
        """See :meth:`write`."""
        return self.write(key, ERROR, message, **fields)

    def _forget(self, now: float) -> None:
        """Make room: remove the keys without suppressed lines, or else the oldest key."""
        for key in [key for key, item in self._keys.items() if now >= item.until and not item.suppressed]:
            del self._keys[key]
        if len(self._keys) >= _MOST_KEYS:
            del self._keys[next(iter(self._keys))]

    @property
    def pending(self) -> bool:
        """Whether lines were suppressed that :meth:`report` has not counted yet."""
        with self._lock:
            return any(item.suppressed for item in self._keys.values())

    def report(self, everything: bool = False) -> None:
        """Write how many lines of each key were suppressed where its time is up, or of every key."""
        with self._lock:
            now = self._clock()
            due = [key for key, item in self._keys.items() if item.suppressed and (everything or now >= item.until)]
            found = [self._keys.pop(key) for key in due]
        for item in found:
            self._log.write(item.level, item.message, suppressed=item.suppressed, seconds=self.seconds)


class _Limited:
    def __init__(self, level: str, message: str, until: float) -> None:
        self.level = level
        self.message = message
        self.until = until
        self.lines = 0
        self.suppressed = 0
