# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's access to the API servers: clients, the choice of the server, the node's token, and Events.

The cluster's objects are followed by ``source``, through the same clients.
"""

from __future__ import annotations

import os
from typing import Callable

from ...cluster.api.access.abortable import Expect
from ...cluster.api.access.servers import ANSWER_SECONDS
from ...cluster.api.client import ApiClient
from ...configuration.sections.api_servers import ApiServerSettings
from ..telemetry.log import LimitedLog, Log
from ..telemetry.metrics import Metrics
from ..threads.supervision import Supervisor
from .clients import ApiClients
from .events import EventPoster
from .server_check import ServerCheck
from .server_names import ServerNames
from .servers import ApiServers
from .token import TokenKeeper


class ApiAccess:
    """Creates the clients of all threads, and runs the threads that keep the access working and post Events.

    ``kubeconfig`` returns the path of the file that is valid now. ``token``: the file with the node's own token, empty
    if there is none. Called from other threads: ``of_node``, whether the account is that of a Node; ``leave`` with the
    URL of a server that no longer answers, ``renamed`` when a server that is known by name has a new address.
    """

    def __init__(
        self,
        kubeconfig: Callable[[], str],
        token: str,
        *,
        of_node: Callable[[], bool],
        leave: Callable[[str], None],
        renamed: Callable[[], None],
        metrics: Metrics,
        log: Log,
        limited: LimitedLog,
    ) -> None:
        self.servers = ApiServers(log)
        self._clients = ApiClients(self.servers, kubeconfig, metrics, log)
        self.events = EventPoster(
            self.connect, os.uname().nodename, log=log, limited=limited, metrics=metrics, may_count=of_node
        )
        self._has_token = bool(token)
        self._token = TokenKeeper(token, self.connect, log)
        self._check = ServerCheck(
            lambda expect: self.connect(expect, ANSWER_SECONDS), lambda: self.servers.several, leave
        )
        self._names = ServerNames(self.servers, renamed)
        metrics.api_servers.set_function(lambda: float(self.servers.count()))
        metrics.api_server_changes = lambda: self.servers.changes

    def connect(self, expect: Expect, timeout: float = 30.0) -> ApiClient:
        """Return a client of the server in use; see :meth:`ApiClients.connect`."""
        client = self._clients.connect(expect, timeout)
        self._names.follow()
        return client

    def configure(self, settings: ApiServerSettings) -> None:
        """Use the servers of this configuration."""
        self.servers.configure(settings.alternatives, settings.discover)
        self._names.follow()

    def start(self, supervisor: Supervisor) -> None:
        """Start the threads."""
        supervisor.start("events", self.events.run, self.events.interrupt)
        if self._has_token:
            supervisor.start("token", self._token.run, self._token.interrupt)
        supervisor.start("api-server-check", self._check.run, self._check.interrupt)
        supervisor.start("api-server-names", self._names.run)

    def stop(self) -> None:
        """Ask the threads to end; the Event thread ends after the queued Events."""
        self._token.stop()
        self._check.stop()
        self._names.stop()
        self.events.close()
