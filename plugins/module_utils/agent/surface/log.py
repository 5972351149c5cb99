# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log lines for the journal: one event a line, as key=value pairs or as JSON."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Callable, Dict, TextIO

from ...errors import one_line

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
    wants it. ``verbose``: write debug lines as well.
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

    def write(self, level: str, message: str, **fields: Any) -> None:
        """One line: level, message, and fields in their order."""
        if level == DEBUG and not self.verbose:
            return
        if self.as_json:
            record: Dict[str, Any] = {"ts": round(self._clock(), 3), "level": level, "msg": message, **fields}
            line = json.dumps(record, default=str)
        else:
            pairs = [f"{name}={_text(value)}" for name, value in fields.items()]
            line = " ".join([f"level={level}", f"msg={_text(message)}", *pairs])
        prefix = f"<{_PRIORITY[level]}>" if self._priorities else ""
        with self._lock:
            self._stream.write(f"{prefix}{line}\n")
            self._stream.flush()

    def info(self, message: str, **fields: Any) -> None:
        """Something ordinary that is worth a line."""
        self.write(INFO, message, **fields)

    def warning(self, message: str, **fields: Any) -> None:
        """Something that a person should look at when there is time."""
        self.write(WARNING, message, **fields)

    def error(self, message: str, **fields: Any) -> None:
        """Something that does not work."""
        self.write(ERROR, message, **fields)

    def debug(self, message: str, **fields: Any) -> None:
        """Something for finding faults."""
        self.write(DEBUG, message, **fields)
