# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ranges of numbers that operators set, for options of modules and commands and for variables of roles alike."""

from __future__ import annotations

from typing import Dict, Tuple

_PERCENT = (0.0, 100.0)
_PORT = (1.0, 65535.0)
_MOST = 2.0**31 - 1
#: By the name of an option, or of a variable without the prefix of its role; others are from 0 to ``_MOST``.
_RANGES: Dict[str, Tuple[float, float]] = {
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


def out_of_range(name: str, value: float) -> str:
    """Return why a number is not in the range of that option, or variable without prefix; empty if it is."""
    lowest, highest = _RANGES.get(name, (0.0, _MOST))
    # Not a number that is none, such as nan, either.
    return "" if lowest <= value <= highest else f"{value:.12g} is not between {lowest:.12g} and {highest:.12g}"
