# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check that the API server in use still answers, so that the agent leaves one that hangs with open connections.

A server whose process is stopped, or that can no longer be reached, leaves watches silent for minutes: the kernel of
the server keeps the connection alive, and a watch without changes is silent as well.
"""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Callable

from ...base.errors import ProxyError
from ...cluster.api.access.abortable import AbortableClient, Connect, Expect
from ..threads.supervision import Task

#: As often as kubelet renews its Lease by default (nodeLeaseDurationSeconds / 4), each time up to a quarter later.
INTERVAL_SECONDS = 10.0
_JITTER = 0.25


class ServerCheck:
    """Sends a small request at intervals while there are ``several`` servers; the body of a supervised thread.

    The clients that ``connect`` creates should wait ANSWER_SECONDS of :mod:`cluster.access.servers`. ``leave`` is
    called with the URL of a server that does not answer, after the client has reported it.
    """

    def __init__(self, connect: Connect, several: Callable[[], bool], leave: Callable[[str], None]) -> None:
        self._client = AbortableClient(connect)
        self._several = several
        self._leave = leave
        self._stop = threading.Event()

    def run(self, task: Task) -> None:
        """Check until :meth:`stop`."""
        while not self._stop.wait(INTERVAL_SECONDS * (1.0 + random.random() * _JITTER)):
            if self._several():
                self.check(task.busy)
            task.idle()

    def check(self, expect: Expect) -> None:
        """Check once, over a new connection, since an open one may use a path that has failed."""
        with contextlib.suppress(ProxyError), self._client.opened(expect) as client:
            # A kubeconfig that cannot be used is suppressed: the reflectors report it.
            try:
                client.ready()
            except ProxyError as error:
                if not self._stop.is_set() and client.report(error):
                    self._leave(client.host)

    def interrupt(self) -> None:
        """Abort a request that hangs; called from another thread."""
        self._client.interrupt()

    def stop(self) -> None:
        """End the thread soon."""
        self._stop.set()
