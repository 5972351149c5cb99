# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients of the API server in use: one for each thread, all with the same credentials, metrics and warnings."""

from __future__ import annotations

import functools
from typing import Callable, Optional, Set

from ...cluster.api.access.abortable import Expect
from ...cluster.api.access.servers import CONNECT_SECONDS, Candidate
from ...cluster.api.client import ApiClient
from ..telemetry.log import Log
from ..telemetry.metrics import Metrics
from .servers import ApiServers


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
        self._unsupported: Set[str] = set()
        self._warnings: Set[str] = set()

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
