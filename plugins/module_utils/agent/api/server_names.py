# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Follow the addresses of API servers that the agent was given by name, so that no Service can replace them.

A name is resolved in a separate thread, since a resolver that does not answer blocks its caller for seconds.
"""

from __future__ import annotations

import threading
from typing import Callable, Sequence

from ...cluster.api.access.names import addresses_of_name
from ..threads.supervision import Task
from .servers import ApiServers

#: The lifetime of many records of load balancers in the DNS.
INTERVAL_SECONDS = 60.0


class ServerNames:
    """Resolves the names of ``servers`` at intervals, and a new one at once; the body of a supervised thread.

    ``changed`` is called, from this thread, when a name has a new address. ``resolve`` replaces the node's resolver.
    """

    def __init__(
        self,
        servers: ApiServers,
        changed: Callable[[], None],
        resolve: Callable[[str], Sequence[str]] = addresses_of_name,
    ) -> None:
        self._servers = servers
        self._changed = changed
        self._resolve = resolve
        self._due = threading.Event()
        self._stopped = False

    def run(self, task: Task) -> None:
        """Resolve until :meth:`stop`."""
        # The resolver limits its time itself, and there is no way to interrupt it.
        task.idle()
        while True:
            self._due.clear()
            if self._stopped:
                return
            self.resolve()
            self._due.wait(INTERVAL_SECONDS)

    def resolve(self) -> None:
        """Resolve each name once. A name that has no address now keeps those that it had."""
        found = [self._servers.named(name, self._resolve(name)) for name in self._servers.names()]
        if any(found):
            self._changed()

    def follow(self) -> None:
        """Resolve at once if there is a name without an address; may be called from any thread."""
        if self._servers.unresolved:
            self._due.set()

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped = True
        self._due.set()
