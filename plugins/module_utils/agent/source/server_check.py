# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks that the API server in use still answers, so that one that hangs is left although its connections are open.

A server whose process is stopped, or that nothing reaches any more, leaves watches silent for minutes: the kernel of
the server keeps the connection alive, and a watch without changes is silent as well.
"""

from __future__ import annotations

import random
import threading
from typing import Callable, Optional

from ...cluster.api import ApiClient
from ...errors import ProxyError
from ..supervision import Task

#: As often as kubelet renews its Lease by default (nodeLeaseDurationSeconds / 4), each time up to a quarter later.
INTERVAL_SECONDS = 10.0
_JITTER = 0.25
ANSWER_SECONDS = 5.0

#: Creates a client; it calls its first argument with the seconds that each request may take.
Connect = Callable[[Callable[[float], None], float], ApiClient]


class ServerCheck:
    """Sends a small request at intervals while there are ``several`` servers; the body of a supervised thread.

    ``leave`` is called with the URL of a server that does not answer, after the client has reported it.
    """

    def __init__(self, connect: Connect, several: Callable[[], bool], leave: Callable[[str], None]) -> None:
        self._connect = connect
        self._several = several
        self._leave = leave
        self._stop = threading.Event()
        self._client: Optional[ApiClient] = None

    def run(self, task: Task) -> None:
        """Check until :meth:`stop`."""
        while not self._stop.wait(INTERVAL_SECONDS * (1.0 + random.random() * _JITTER)):
            if self._several():
                self.check(task.busy)
            task.idle()

    def check(self, expect: Callable[[float], None]) -> None:
        """Check once, over a new connection, since an open one may lead through what has failed."""
        try:
            client = self._connect(expect, ANSWER_SECONDS)
        except ProxyError:
            # The kubeconfig cannot be used; the reflectors report it.
            return
        self._client = client
        try:
            client.ready()
        except ProxyError as error:
            if not self._stop.is_set() and client.report(error):
                self._leave(client.host)
        finally:
            self._client = None
            client.close()

    def interrupt(self) -> None:
        """Abort a request that hangs; called from another thread."""
        client = self._client
        if client is not None:
            client.interrupt()

    def stop(self) -> None:
        """End the thread soon."""
        self._stop.set()
