# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What parts of an agent report, kept for a test."""

from __future__ import annotations

import io
from typing import Any, Callable, Optional

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.reports import Reports
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.log import LimitedLog, Log
from ansible_collections.kubenode.proxy.plugins.module_utils.agent.telemetry.metrics import Metrics


def reports_to(stream: Optional[io.StringIO] = None, post: Callable[..., Any] = lambda *event: None) -> Reports:
    """Return where to report: a log that is written to ``stream``, new metrics, and ``post`` for Events."""
    log = Log(stream or io.StringIO())
    return Reports(log, LimitedLog(log), Metrics(), post)
