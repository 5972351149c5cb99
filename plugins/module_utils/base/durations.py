# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Durations in Go's format, such as ``1m30s``, ``500ms``, ``24h0m0s``. Inside the engine they are seconds."""

from __future__ import annotations

import re
from typing import Optional

_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_TERM = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_LIMIT = 2**63
_LONGEST = 64


def parse_duration(text: str) -> Optional[float]:
    """Parse a Go duration, which may be negative, and return seconds; None if ``text`` is not a duration."""
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text[1:] if text.startswith("+") else text)
    if rest == "0":
        return 0.0
    if not rest or len(rest) > _LONGEST:
        return None
    nanoseconds, position = 0, 0
    while position < len(rest):
        match = _TERM.match(rest, position)
        if match is None or not (match.group(1) or match.group(2)):
            return None
        unit = _UNITS[match.group(3)]
        fraction = match.group(2) or ""
        nanoseconds += int(match.group(1) or 0) * unit
        nanoseconds += int(fraction or 0) * unit // 10 ** len(fraction)
        position = match.end()
    return sign * nanoseconds / 10**9 if nanoseconds < _LIMIT else None


def format_duration(seconds: float) -> str:
    """Format ``seconds`` as Go prints a duration."""
    nanoseconds = round(abs(seconds) * 10**9)
    sign = "-" if seconds < 0 and nanoseconds else ""
    if nanoseconds == 0:
        return "0s"
    if nanoseconds < 10**9:
        unit = next(name for name in ("ms", "µs", "ns") if nanoseconds >= _UNITS[name])
        return f"{sign}{_decimal(nanoseconds, _UNITS[unit])}{unit}"
    minutes, below = divmod(nanoseconds, _UNITS["m"])
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(below, 10**9)}s"
    if hours:
        return f"{sign}{hours}h{minutes}m{text}"
    return f"{sign}{minutes}m{text}" if minutes else f"{sign}{text}"


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    digits = f"{rest:0{len(str(unit)) - 1}d}".rstrip("0") if rest else ""
    return f"{whole}.{digits}" if digits else str(whole)
