# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The drift watch of a node: opened after its first sync, and opened again after a failure."""

from __future__ import annotations

from typing import Callable, Optional

from ...convergence.handles import KernelHandles
from ..drift.watch import DriftReport, DriftWatch
from ..ports.surface import RETRY_SECONDS
from ..telemetry.log import LimitedLog, Log
from ..threads.failures import error_text
from ..threads.timers import Timers
from .setup import Proxiers

NOTHING = DriftReport({}, False)


class Watching:
    """Keeps a drift watch open. ``reopen`` is called some time after it could not be opened, or has failed."""

    def __init__(
        self, handles: KernelHandles, timers: Timers, reopen: Callable[[], None], *, log: Log, limited: LimitedLog
    ) -> None:
        self.drift: Optional[DriftWatch] = None
        self._handles = handles
        self._clock = timers.clock
        self._log = log
        self._limited = limited
        self._retry = timers.add("watch for changes by other programs", reopen)

    def open(self, proxiers: Proxiers) -> None:
        """Watch for changes by other programs; if that is not possible now, try again later."""
        try:
            self.drift = DriftWatch(proxiers.mode.subsystems, proxiers.families, self._handles, self._log)
        except MemoryError:
            raise
        except Exception as error:
            self._failed(error)

    def close(self) -> None:
        """Close the watch."""
        if self.drift is not None:
            self.drift.close()
            self.drift = None

    def look(self) -> DriftReport:
        """Return the detected changes."""
        if self.drift is None:
            return NOTHING
        try:
            return self.drift.look(self._clock())
        except MemoryError:
            raise
        except Exception as error:
            # Its descriptors may be readable forever.
            self.close()
            self._failed(error)
            return NOTHING

    def synced(self, changed: bool, observed: bool) -> None:
        """Handle the end of a good sync. ``changed``: it changed something; ``observed``: it observed everything."""
        if self.drift is not None:
            self.drift.synced(changed, observed)

    def _failed(self, error: Exception) -> None:
        text = "changes by other programs cannot be watched, retrying"
        self._limited.warning("watch", text, error=error_text(error))
        self._retry.start(RETRY_SECONDS)
