# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's access to the API servers: clients, the choice of the server, the node's token, and Events.

The cluster's objects are followed by ``source``, through the same clients.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Callable, Optional

from ...cluster.api.access.abortable import Connect, Expect
from ...cluster.api.access.servers import ANSWER_SECONDS, CONNECT_SECONDS, Candidate
from ...cluster.api.access.token_renewal import CHECK_SECONDS, TokenRenewal
from ...cluster.api.client import ApiClient
from ...configuration.node_proxy import ApiServerSettings
from ..telemetry.log import LimitedLog, Log
from ..telemetry.metric_tables import API_SERVERS
from ..telemetry.metrics import Metrics
from ..threads.supervision import Supervisor, Task
from .events import EventPoster
from .servers import ApiServers, ServerCheck, ServerNames


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
        metrics.on_scrape(API_SERVERS, lambda: {"known": self.servers.count(), "changes": self.servers.changes})

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


class ApiClients:
    """Makes clients. ``kubeconfig`` returns the path of the file that is valid now, empty for the default.

    Each warning about the credentials is logged once, and each API server is asked only once for selectors that it
    does not support, however many clients are made.
    """

    def __init__(self, servers: ApiServers, kubeconfig: Callable[[], str], metrics: Metrics, log: Log) -> None:
        self._servers = servers
        self._kubeconfig = kubeconfig
        self._metrics = metrics
        self._log = log
        self._unsupported: set[str] = set()
        self._warnings: set[str] = set()

    def connect(self, expect: Expect, timeout: float = 30.0) -> ApiClient:
        """Return a client, for use by one thread; it calls ``expect`` with the seconds that each request may take.

        Raises ConfigurationError or ApiError if the kubeconfig cannot be used.
        """
        server = self._servers.current()
        client = ApiClient(
            server.connection(self._kubeconfig() or None),
            timeout,
            unsupported=self._unsupported,
            expect=expect,
            observe=functools.partial(self._observe_request, server),
            failed=functools.partial(self._servers.failed, server),
            connect_timeout=min(timeout, CONNECT_SECONDS) if self._servers.several else None,
        )
        self._servers.opened(server, client.host)
        for warning in client.warnings:
            if warning not in self._warnings:
                self._warnings.add(warning)
                self._log.warning(warning)
        return client

    def _observe_request(self, server: Candidate, method: str, host: str, code: str, seconds: Optional[float]) -> None:
        self._metrics.observe_request(method, host, code, seconds)
        if code.isdecimal() and int(code) < 500:
            self._servers.answered(server)


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
