# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The agent's HTTP endpoints: health, metrics, configuration, mode; and the Services' health check node ports."""

from __future__ import annotations

import json
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ...addresses import IPV6
from ...cluster.model import NamespacedName
from ...configuration.document import to_mapping
from ...configuration.model import KubeProxyConfiguration
from ...errors import KernelError
from ..sync.proxier import Proxier
from .health import Answer, ProxyHealth
from .metrics import Metrics
from .servers import HttpServer, Responder, ServiceHealthServers

RETRY_SECONDS = 5.0

_TEXT = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
_METRICS = (("Content-Type", "text/plain; version=0.0.4; charset=utf-8"),)
_JSON = (("Content-Type", "application/json"),)


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int


def parse_address(text: str) -> Optional[Address]:
    """``1.2.3.4:80``, ``[::1]:80`` or ``:80`` taken apart; None for an empty text or port 0, which mean no server."""
    host, _colon, port = text.rpartition(":")
    if not port.isdecimal() or not int(port):
        return None
    return Address(host.strip("[]") or "::", int(port))


class Listener:
    """One server that is opened as soon as its address is free."""

    def __init__(
        self, name: str, address: Optional[Address], respond: Responder, delete: Responder = lambda _path: None
    ) -> None:
        self.name = name
        self.address = address
        self.failure = ""
        self._respond = respond
        self._delete = delete
        self._server: Optional[HttpServer] = None

    @property
    def pending(self) -> bool:
        """Whether it should be open and is not."""
        return self.address is not None and self._server is None

    @property
    def port(self) -> int:
        """The port on which it is open; 0 if it is not."""
        return 0 if self._server is None else self._server.port

    def open(self) -> bool:
        """Try to open it; returns whether it is open or not wanted. ``failure`` says why not."""
        if self.pending and self.address is not None:
            try:
                self._server = HttpServer(self.address.host, self.address.port, self._respond, delete=self._delete)
                self.failure = ""
            except KernelError as error:
                self.failure = str(error)
        return not self.pending

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None


class Surface:
    """The servers of one agent. ``configuration`` is the one in effect and may be replaced."""

    def __init__(self, configuration: KubeProxyConfiguration, health: ProxyHealth, metrics: Metrics) -> None:
        self.configuration = configuration
        self.health = health
        self._metrics = metrics
        self.listeners = [
            Listener("healthz", parse_address(configuration.healthz_bind_address), self._health_answer),
            Listener("metrics", parse_address(configuration.metrics_bind_address), self._metrics_answer, self._reset),
        ]
        self._service_health: Dict[str, ServiceHealthServers] = {}

    def _health_answer(self, path: str) -> Optional[Answer]:
        if path not in ("/healthz", "/livez"):
            return None
        answer = self.health.answer(with_eligibility=path == "/healthz")
        counter = self._metrics.healthz if path == "/healthz" else self._metrics.livez
        counter.labels(str(answer.code)).inc()
        self._metrics.observe_health(path[1:], answer.code == 200)
        return answer

    def _reset(self, path: str) -> Optional[Answer]:
        if path != "/metrics/slis":
            return None
        self._metrics.reset_slis()
        return Answer(200, _TEXT, b"metrics reset\n")

    def _metrics_answer(self, path: str) -> Optional[Answer]:
        if path == "/metrics":
            return Answer(200, _METRICS, self._metrics.text())
        if path == "/metrics/slis":
            return Answer(200, _METRICS, self._metrics.text(slis=True))
        if path in ("/healthz", "/healthz/ping"):
            return Answer(200, _TEXT, b"ok")
        if path == "/proxyMode":
            return Answer(200, _TEXT, self.configuration.mode.encode())
        if path == "/configz":
            document = {"kubeproxy.config.k8s.io": to_mapping(self.configuration)}
            return Answer(200, _JSON, json.dumps(document).encode())
        return None

    def sync_service_health(self, family: Proxier) -> List[Tuple[NamespacedName, str]]:
        """Open, close and update the health check node ports of a family; returns (Service, reason) of failures."""
        servers = self._service_health.get(family.family)
        if servers is None:
            servers = ServiceHealthServers(health_addresses(family), self.health)
            self._service_health[family.family] = servers
        ports = family.summaries.health_ports
        return servers.sync(dict(ports), {service: family.summaries.local_ready(service) for service in ports})

    def close_service_health(self, families: Sequence[str] = ()) -> None:
        """Close the health check node ports, of some families or of all."""
        for family in families or list(self._service_health):
            servers = self._service_health.pop(family, None)
            if servers is not None:
                servers.close()

    def close(self) -> None:
        """Close everything."""
        for listener in self.listeners:
            listener.close()
        self.close_service_health()


def health_addresses(family: Proxier) -> Tuple[str, ...]:
    """Where health check node ports of a family listen: everywhere, or on the addresses that serve node ports."""
    if not family.settings.node_port_cidrs:
        return ("::",) if family.family == IPV6 else ("0.0.0.0",)
    return family.settings.node_port_addresses
