# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the scheduled runs of the role schedule keep the node converged, from the metrics that they write."""

from __future__ import annotations

import os
import re
from typing import Dict

from ..base.regular_files import SMALL, read_regular
from ..base.timestamps import timestamp

# The role agent disables the timer when it takes over.
_ENABLED = "/etc/systemd/system/timers.target.wants/kubenode-proxy-schedule.timer"
_METRICS = "/var/lib/kubenode-proxy/schedule/kubenode_proxy_schedule.prom"
_SAMPLE = re.compile(r"^kubenode_proxy_schedule_(\w+) ([0-9]{1,11})(?:\.|$)", re.M | re.A)


def schedule_failure() -> str:
    """Return that the last scheduled run has failed, and since when; empty if it succeeded or nothing is scheduled."""
    if not os.path.lexists(_ENABLED):
        return ""
    try:
        found = _SAMPLE.findall(read_regular(_METRICS, SMALL).decode("ascii"))
    except (OSError, ValueError):
        return ""
    samples: Dict[str, int] = {name: int(value) for name, value in found}
    if samples.get("success") != 0:
        return ""
    succeeded = samples.get("last_success_timestamp_seconds")
    since = "none has succeeded yet" if succeeded is None else f"none has succeeded since {timestamp(succeeded)}"
    return f"scheduled runs fail, {since}: see journalctl -u kubenode-proxy-schedule"
