# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The format of times in files and reports."""

from __future__ import annotations

import time
from typing import Optional

TIMESTAMP = "%Y-%m-%dT%H:%M:%SZ"


def timestamp(seconds: Optional[float] = None) -> str:
    """Format a time, in seconds since 1970 (None for now), as RFC 3339 text in UTC without fractions."""
    return time.strftime(TIMESTAMP, time.gmtime(seconds))


def wall_time(moment: float) -> float:
    """Return a moment of the monotonic clock in seconds since 1970, by the clock of the node as it is set now."""
    return time.time() - time.monotonic() + moment
