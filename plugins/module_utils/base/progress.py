# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Progress callbacks for long-running work."""

from __future__ import annotations

from typing import Callable

#: Called between the steps of long work, so that a supervisor (systemd's watchdog) sees that it is still running.
Progress = Callable[[], None]


def unheeded() -> None:
    """Ignore the progress of long work; the default where nothing supervises it."""
