# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the parts of an agent report what happens."""

from __future__ import annotations

from typing import NamedTuple

from .api.events import Post
from .telemetry.log import LimitedLog, Log
from .telemetry.metrics import Metrics


class Reports(NamedTuple):
    """The log, the metrics, and Events, which ``post`` sends.

    ``limited``: the log for lines that may recur, or that users of the cluster can cause.
    """

    log: Log
    limited: LimitedLog
    metrics: Metrics
    post: Post
