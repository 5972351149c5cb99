# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log lines for the journal: one event a line, as key=value pairs or as JSON."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Callable, Dict, Hashable, Mapping, TextIO

from ...errors import one_line

DEBUG, INFO, WARNING, ERROR = "debug", "info", "warning", "error"

_MOST_KEYS = 1000

#: Priorities of syslog, which the journal reads from the start of a line.
_PRIORITY = {DEBUG: 7, INFO: 6, WARNING: 4, ERROR: 3}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = one_line(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or any(mark in text for mark in ' "=') else text


class Log:
    """Writes lines to ``stream``; safe to use from several threads.

    ``as_json``: JSON objects instead of key=value pairs. ``priorities``: begin each line with ``<N>`` as the journal
    wants it. ``verbose``: write debug lines, too.
    """

    def __init__(
        self,
        stream: TextIO,
        as_json: bool = False,
        priorities: bool = False,
        verbose: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.as_json = as_json
        self.verbose = verbose
        self._stream = stream
        self._priorities = priorities
        self._clock = clock
        self._lock = threading.Lock()
        self._lost = 0

    def write(self, level: str, message: str, **fields: Any) -> None:
        """Write one line: level, message, and fields in their order.

        A line that cannot be written, because the reader of the log is gone or its disk is full, is lost: the agent
        keeps serving, and the next line that can be written is preceded by the number of those that were lost.
        """
        if level == DEBUG and not self.verbose:
            return
        with self._lock:
            lines = self._line(level, message, fields)
            if self._lost:
                lines = self._line(WARNING, "lines of the log were lost", {"lines": self._lost}) + lines
            try:
                self._stream.write(lines)
                self._stream.flush()
            except (OSError, ValueError):
                self._lost += 1
            else:
                self._lost = 0

    def _line(self, level: str, message: str, fields: Mapping[str, Any]) -> str:
        if self.as_json:
            record: Dict[str, Any] = {"ts": round(self._clock(), 3), "level": level, "msg": message, **fields}
            line = json.dumps(record, default=str)
        else:
            pairs = [f"{name}={_text(value)}" for name, value in fields.items()]
            line = " ".join([f"level={level}", f"msg={_text(message)}", *pairs])
        prefix = f"<{_PRIORITY[level]}>" if self._priorities else ""
        return f"{prefix}{line}\n"

    def info(self, message: str, **fields: Any) -> None:
        """Log a normal event."""
        self.write(INFO, message, **fields)

    def warning(self, message: str, **fields: Any) -> None:
        """Log a condition that an operator should check, though not at once."""
        self.write(WARNING, message, **fields)

    def error(self, message: str, **fields: Any) -> None:
        """Log a failure."""
        self.write(ERROR, message, **fields)

    def debug(self, message: str, **fields: Any) -> None:
        """Log details for troubleshooting."""
        self.write(DEBUG, message, **fields)


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
        self._keys: Dict[Hashable, _Limited] = {}

    def write(self, key: Hashable, level: str, message: str, **fields: Any) -> bool:
        """Write one line, or count it; returns whether it was written."""
        return self._write(self._burst, key, level, message, fields)

    def once(self, key: Hashable, level: str, message: str, **fields: Any) -> bool:
        """Write a long line if it is the first one with its key; else count it."""
        return self._write(1, key, level, message, fields)

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
