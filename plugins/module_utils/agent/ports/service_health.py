# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The health check node ports of Services: their sockets and answers.

There is one socket for each address and port number. It stays open as long as both are wanted, whatever else changes,
because its Service is looked up with each request.
"""

from __future__ import annotations

import functools
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from ...base.errors import KernelError
from ...cluster.model import NamespacedName
from ..http.message import HttpRequest, Response
from ..http.server import HttpServer, OpenPort
from .health import ProxyHealth, service_health_answer


class FailedPort(NamedTuple):
    """A Service whose health check node port cannot be served everywhere, and why."""

    service: NamespacedName
    reason: str


class ServiceHealthPorts:
    """The health check node ports of one family. A failure concerns one address of one Service and is retried."""

    def __init__(self, server: HttpServer, health: ProxyHealth) -> None:
        self._server = server
        self._health = health
        self._addresses: Tuple[str, ...] = ()
        self._ports: Dict[NamespacedName, int] = {}
        self._counts: Dict[NamespacedName, int] = {}
        self._service_of: Dict[int, NamespacedName] = {}
        self._open: Dict[Tuple[str, int], OpenPort] = {}
        self._failed: Dict[NamespacedName, str] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, service: object) -> bool:
        return service in self._ports

    @property
    def failed(self) -> Mapping[NamespacedName, str]:
        """Services whose port is not open on every address, and why."""
        return self._failed

    def sync(
        self, addresses: Sequence[str], ports: Mapping[NamespacedName, int], counts: Mapping[NamespacedName, int]
    ) -> List[FailedPort]:
        """Serve these ports on these addresses with these counts of ready local endpoints.

        Return the failures that are new, or have another reason than before.
        """
        self._counts = dict(counts)
        wanted = tuple(dict.fromkeys(addresses))
        if (wanted, ports) != (self._addresses, self._ports):
            self._addresses, self._ports = wanted, dict(ports)
            self._service_of = {port: service for service, port in sorted(ports.items(), reverse=True)}
            places = {(address, port) for address in wanted for port in self._service_of}
            for place in [place for place in self._open if place not in places]:
                self._open.pop(place).close()
        elif not self._failed:
            return []
        return self.retry()

    def retry(self) -> List[FailedPort]:
        """Open the wanted ports that are not open; return failures as :meth:`sync` does."""
        before = self._failed
        self._failed = {
            service: f"port {port} is the health check node port of {self._service_of[port]}"
            for service, port in self._ports.items()
            if self._service_of[port] != service
        }
        for port, service in self._service_of.items():
            for address in self._addresses:
                if (address, port) not in self._open:
                    self._open_one(address, port, service)
        return [FailedPort(*item) for item in self._failed.items() if before.get(item[0]) != item[1]]

    def _open_one(self, address: str, port: int, service: NamespacedName) -> None:
        respond = functools.partial(self._respond, port)
        try:
            self._open[address, port] = self._server.open(address, port, respond)
        except KernelError as error:
            self._failed[service] = str(error)

    def _respond(self, port: int, _request: HttpRequest) -> Response:
        # Called by the server's thread: both mappings are replaced as a whole, never changed.
        service = self._service_of.get(port, NamespacedName("", ""))
        count = self._counts.get(service, 0)
        return service_health_answer(service, count, self._health.healthy, self._health.drained())

    def close(self) -> None:
        """Close every port."""
        for port in self._open.values():
            port.close()
        self._open.clear()
        self._addresses, self._ports, self._failed = (), {}, {}
