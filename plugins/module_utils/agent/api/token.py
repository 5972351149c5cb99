# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The thread that renews the node's own token for the API server at half its lifetime."""

from __future__ import annotations

import threading
import time
from typing import Callable

from ...cluster.api.access.abortable import Connect
from ...cluster.api.access.token_renewal import CHECK_SECONDS, TokenRenewal
from ..telemetry.log import Log
from ..threads.supervision import Task


class TokenKeeper(TokenRenewal):
    """Renews the token whenever it is due; see the base class."""

    def __init__(self, path: str, connect: Connect, log: Log, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path, connect, log, clock)
        self._stop = threading.Event()

    def run(self, task: Task) -> None:
        """Renew the token until :meth:`stop`; the body of a supervised thread."""
        while not self._stop.is_set():
            task.busy(CHECK_SECONDS)
            pause = self.step(task.busy)
            task.idle()
            self._stop.wait(pause)

    def stop(self) -> None:
        """End the thread soon, without waiting for a request in progress."""
        self._stop.set()
