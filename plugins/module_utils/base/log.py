# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log lines for the journal: one event a line, as key=value pairs or as JSON."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Callable, Mapping, TextIO

from .errors import one_line

DEBUG, INFO, WARNING, ERROR = "debug", "info", "warning", "error"

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
            record: dict[str, Any] = {"ts": round(self._clock(), 3), "level": level, "msg": message, **fields}
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
