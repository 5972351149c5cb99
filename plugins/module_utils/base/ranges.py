# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ranges of numbers and forms of texts that operators set: options of modules and commands, variables of roles."""

from __future__ import annotations

import re
from typing import Union

_PERCENT = (0.0, 100.0)
_PORT = (1.0, 65535.0)
_MOST = 2.0**31 - 1
#: By the name of an option, or of a variable without the prefix of its role; others are from 0 to ``_MOST``.
_RANGES: dict[str, tuple[float, float]] = {
    "api_port": _PORT,
    "api_timeout": (0.001, _MOST),
    "confirm_timeout": (0.0, 86400.0),
    "firewall_mark": (1.0, 2.0**32 - 1),
    "kubelet_delay": (0.0, 10.0),
    "lifetime_seconds": (600.0, 2.0**32),
    "max_fail_percentage": _PERCENT,
    "max_unserved_percent": _PERCENT,
    "port": _PORT,
    "probe_timeout": (0.001, _MOST),
    "token_seconds": (600.0, 2.0**32),
    "traffic_timeout": (0.001, _MOST),
    "watchdog_seconds": (1.0, _MOST),
}

# Of systemd.time(7); systemd only warns of what it cannot read, and continues without it.
# A number ends at its unit or at a space, so that no text is read in more ways than one.
_UNIT = r"([mu]?s(ec)?|seconds?|m(in)?|minutes?|h(r|ours?)?|d(ays?)?|w(eeks?)?)"
_TIME = rf"(\d+(\.\d+)?(\s*{_UNIT}\s*|\s+))*\d+(\.\d+)?(\s*{_UNIT})?"
_SOME_TIME = (re.compile(rf"(?=.*[1-9]){_TIME}"), "a time above 0 in systemd's notation, such as 10min")
#: By the same names: the form of a text that becomes part of a unit, and its name.
_FORMS = {
    "interval": _SOME_TIME,
    "jitter": (re.compile(_TIME), "a time in systemd's notation, such as 30s"),
    "memory_max": (re.compile(r"[1-9]\d*(\.\d+)?[MGT]|\d{8,}|[1-9]\d?%|infinity|"), "a size from 1M, such as 512M"),
    "timeout": _SOME_TIME,
}


def unacceptable(name: str, value: Union[float, str]) -> str:
    """Return why an option, or a variable without prefix, must not have a value; empty if it may.

    The value is a number out of its range, or a text of another form.
    """
    if isinstance(value, str):
        form, meaning = _FORMS.get(name, (None, ""))
        return f"{value!r} is not {meaning}" if form and not form.fullmatch(value.strip()) else ""
    lowest, highest = _RANGES.get(name, (0.0, _MOST))
    # Not a number that is none, such as nan, either.
    return "" if lowest <= value <= highest else f"{value:.12g} is not between {lowest:.12g} and {highest:.12g}"
