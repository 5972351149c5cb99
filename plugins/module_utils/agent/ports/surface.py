# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent serves over HTTP: health, metrics, configuration, mode, z-pages, and health check node ports."""

from __future__ import annotations

import errno
import json
import time
from typing import Callable, Iterable, Mapping, NamedTuple, Optional, Sequence

from ...base.addresses import IPV6, is_link_local
from ...base.errors import KernelError
from ...base.timestamps import wall_time
from ...clients import ClientRule
from ...cluster.model import NamespacedName
from ...configuration.documents import to_mapping
from ...configuration.feature_gates import COMPONENT_FLAGZ, COMPONENT_STATUSZ
from ...configuration.model import KubeProxyConfiguration
from ...event_reasons import Reason
from ...kernel.listening import listening_user
from ...packaging.identity import identity
from ...rendering.settings import DataplaneSettings
from ..api.events import WARNING, Post, service_reference
from ..http.connections import DEFAULT_LIMITS, Limits
from ..http.message import HttpRequest, Responder, Response
from ..http.server import HttpServer, OpenPort
from ..other_proxy import OtherProxy
from ..telemetry.log import INFO, LimitedLog
from ..telemetry.metric_tables import HTTP
from ..telemetry.metrics import Metrics
from ..threads.failures import Fatal
from ..threads.supervision import Supervisor
from ..threads.timers import RETRY_SECONDS, Timers
from . import zpages
from .health import FailedPort, ProxyHealth, ServiceHealthPorts

_TEXT = (("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff"))
_METRICS = (("Content-Type", "text/plain; version=0.0.4; charset=utf-8"),)
_JSON = (("Content-Type", "application/json"),)
#: The feature gates of pages that have one.
_GATES = {"/flagz": COMPONENT_FLAGZ, "/statusz": COMPONENT_STATUSZ}
_NOT_RESETTABLE = Response(405, _TEXT, b"only GET and HEAD are served here\n")


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int


def parse_address(text: str) -> Optional[Address]:
    """Parse ``1.2.3.4:80``, ``[::1]:80`` or ``:80``; return None for empty text or port 0, which mean no server."""
    host, _colon, port = text.rpartition(":")
    if not port.isdecimal() or not int(port):
        return None
    return Address(host.strip("[]") or "::", int(port))


class Listener:
    """One of the agent's own ports, which is opened as soon as its address is free.

    ``failure``: why it is not open; ``in_use_by_root``: because a program of root listens there, as kube-proxy does.
    """

    def __init__(self, name: str, server: HttpServer, address: Optional[Address], respond: Responder) -> None:
        self.name = name
        self.address = address
        self.failure = ""
        self.in_use_by_root = False
        self._server = server
        self._respond = respond
        self._open: Optional[OpenPort] = None

    @property
    def pending(self) -> bool:
        """Whether the port should be open and is not."""
        return self.address is not None and self._open is None

    @property
    def port(self) -> int:
        """The port on which it is open; 0 if it is not."""
        return 0 if self._open is None else self._open.port

    def move(self, address: Optional[Address]) -> None:
        """Change the address; the port is not closed if it already listens there."""
        if address != self.address:
            self.close()
            self.address = address
            self.failure = ""

    def open(self) -> bool:
        """Try to open the port; return whether it is open or not wanted. ``failure`` is the reason of a failure."""
        if self._open is None and self.address is not None:
            try:
                self._open = self._server.open(*self.address, self._respond, both_families=True)
                self.failure, self.in_use_by_root = "", False
            except KernelError as error:
                self.failure = str(error)
                cause = error.__cause__
                in_use = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
                self.in_use_by_root = in_use and listening_user(*self.address) == 0
        return not self.pending

    def close(self) -> None:
        """Stop listening."""
        if self._open is not None:
            self._open.close()
            self._open = None


class Surface:
    """Everything that one agent serves over HTTP, by one thread of the supervisor.

    ``log`` is for lines that clients cause. ``clients``: who is one client. ``flags``: the command line
    options, for /flagz. ``started``: when the agent was started, by the monotonic clock.
    """

    def __init__(
        self,
        configuration: KubeProxyConfiguration,
        health: ProxyHealth,
        metrics: Metrics,
        log: LimitedLog,
        supervisor: Supervisor,
        *,
        clients: ClientRule,
        limits: Limits = DEFAULT_LIMITS,
        flags: Optional[Mapping[str, str]] = None,
        started: float,
    ) -> None:
        self.health = health
        metrics.build_info.labels(identity().text, identity().engine).set(1)
        metrics.show_gates(configuration)
        self.server = HttpServer(supervisor, log, clients, limits)
        self._configuration = configuration
        self._metrics = metrics
        metrics.on_scrape(
            HTTP,
            lambda: {
                "open": self.server.connections,
                "closed": {(reason,): count for reason, count in self.server.closed.items()},
            },
        )
        self._flags = dict(flags or {})
        self._started = started
        healthz, metrics_address = _own_addresses(configuration)
        self.listeners = [
            Listener("healthz", self.server, healthz, self._health_answer),
            Listener("metrics", self.server, metrics_address, self._metrics_answer),
        ]
        self._pages: dict[str, Callable[[HttpRequest], Response]] = {
            "/metrics": lambda _request: Response(200, _METRICS, self._metrics.text()),
            "/metrics/slis": self._service_levels,
            "/healthz": lambda _request: Response(200, _TEXT, b"ok"),
            "/healthz/ping": lambda _request: Response(200, _TEXT, b"ok"),
            "/proxyMode": lambda _request: Response(200, _TEXT, self._configuration.mode.encode()),
            "/configz": self._configz,
            "/version": lambda _request: zpages.version_response(identity()),
            "/flagz": lambda request: zpages.flagz(request.accept, self._flags),
            "/statusz": self._statusz,
        }
        self._service_health: dict[str, ServiceHealthPorts] = {}

    def configure(self, configuration: KubeProxyConfiguration) -> None:
        """Apply the configuration in effect; a port whose address does not change is not closed."""
        self._configuration = configuration
        self._metrics.show_gates(configuration)
        for listener, address in zip(self.listeners, _own_addresses(configuration)):
            listener.move(address)

    def _health_answer(self, request: HttpRequest) -> Optional[Response]:
        path = request.path
        if path == "/readyz":
            return self.health.readiness_answer()
        if path not in ("/healthz", "/livez"):
            return None
        answer = self.health.answer(with_eligibility=path == "/healthz")
        counter = self._metrics.healthz if path == "/healthz" else self._metrics.livez
        counter.labels(str(answer.code)).inc()
        self._metrics.observe_health(path[1:], answer.code == 200)
        return answer

    def _metrics_answer(self, request: HttpRequest) -> Optional[Response]:
        page = self._pages.get(request.path)
        if page is None or not self._is_on(request.path):
            return None
        if request.method == "DELETE" and request.path != "/metrics/slis":
            return _NOT_RESETTABLE
        return page(request)

    def _is_on(self, path: str) -> bool:
        return path not in _GATES or self._configuration.gate(_GATES[path])

    def _service_levels(self, request: HttpRequest) -> Response:
        if request.method == "DELETE":
            self._metrics.reset_slis()
            return Response(200, _TEXT, b"metrics reset\n")
        return Response(200, _METRICS, self._metrics.text(slis=True))

    def _configz(self, _request: HttpRequest) -> Response:
        document = {"kubeproxy.config.k8s.io": to_mapping(self._configuration)}
        return Response(200, _JSON, json.dumps(document).encode())

    def _statusz(self, request: HttpRequest) -> Response:
        listed = [path for path in self._pages if self._is_on(path)]
        return zpages.statusz(request.accept, identity(), wall_time(self._started), listed, time.time())

    def sync_service_health(
        self, settings: DataplaneSettings, ports: Mapping[NamespacedName, int], counts: Mapping[NamespacedName, int]
    ) -> list[FailedPort]:
        """Open, close and update the health check node ports of a family; return new failures.

        ``ports``, and ``counts`` of ready endpoints on this node: by Service.
        """
        found = self._service_health.get(settings.family)
        if found is None:
            found = self._service_health[settings.family] = ServiceHealthPorts(self.server, self.health)
        return found.sync(health_addresses(settings), ports, counts)

    def retry_service_health(self) -> list[FailedPort]:
        """Retry to open ports that could not be opened; return new failures."""
        return [failure for ports in self._service_health.values() if ports.failed for failure in ports.retry()]

    @property
    def failed_ports(self) -> list[str]:
        """Why ports of the agent itself are not open."""
        return [f"{item.name}: {item.failure}" for item in self.listeners if item.pending and item.failure]

    @property
    def failed_services(self) -> dict[NamespacedName, str]:
        """Services whose health check node port is not open on every address, and why."""
        return {service: text for ports in self._service_health.values() for service, text in ports.failed.items()}

    def serves(self, service: NamespacedName) -> bool:
        """Return whether a Service has a health check node port in any family."""
        return any(service in ports for ports in self._service_health.values())

    def keep_families(self, families: Sequence[str]) -> None:
        """Close the health check node ports of all other families."""
        for family in [name for name in self._service_health if name not in families]:
            self._service_health.pop(family).close()

    def close(self) -> None:
        """Close everything; nothing can be opened again."""
        self.server.stop()


def _own_addresses(configuration: KubeProxyConfiguration) -> tuple[Optional[Address], Optional[Address]]:
    return parse_address(configuration.healthz_bind_address), parse_address(configuration.metrics_bind_address)


def health_addresses(settings: DataplaneSettings) -> tuple[str, ...]:
    """Return where health check node ports of a family listen: everywhere, or on the addresses that serve node ports.

    Link-local IPv6 addresses are omitted, because listening on them requires an interface.
    """
    if not settings.node_port_cidrs:
        return ("::",) if settings.family == IPV6 else ("0.0.0.0",)
    return tuple(address for address in settings.node_port_addresses if not is_link_local(address))


class PortKeeper:
    """Opens the ports of a surface, and retries those that could not be opened.

    ``post`` sends an Event. ``must_bind``: whether a failure ends the agent (bindAddressHardFail).
    """

    def __init__(
        self,
        surface: Surface,
        limited: LimitedLog,
        timers: Timers,
        post: Post,
        *,
        must_bind: Callable[[], bool],
        other_proxy: OtherProxy,
    ) -> None:
        self._surface = surface
        self._limited = limited
        self._post = post
        self._must_bind = must_bind
        self._other_proxy = other_proxy
        self._failed: set[NamespacedName] = set()
        self._own_ports = timers.add("open own ports", self.open)
        self._health_ports = timers.add("open health check node ports", self._retry)

    def open(self) -> None:
        """Open the ports of healthz and metrics. Raises Fatal if the configuration requires it.

        Only a program of root may be another service proxy. One of another user, who may hold any port that is free,
        must not make the agent unhealthy.
        """
        for listener in self._surface.listeners:
            known = listener.failure
            if listener.open():
                self._other_proxy.lose(listener.name)
                if known:
                    self._limited.write(("own port", listener.name), INFO, "server started", server=listener.name)
                continue
            reason = Reason.HEALTHZ_FAILED if listener.name == "healthz" else Reason.METRICS_FAILED
            if listener.in_use_by_root and listener.address is not None:
                self._other_proxy.port_in_use(listener.name, listener.address.port)
            else:
                self._other_proxy.lose(listener.name)
            if listener.failure != known:
                what = {"server": listener.name, "error": listener.failure}
                self._limited.warning(("own port", listener.name), "server not started, retrying", **what)
                self._post(None, WARNING, reason, "StartKubeProxy", f"{listener.name}: {listener.failure}")
            if self._must_bind():
                raise Fatal(f"{listener.name}: {listener.failure}")
            self._own_ports.start(RETRY_SECONDS)

    def report(self, failures: Iterable[FailedPort]) -> None:
        """Log and post new failures of health check node ports, and log those that no longer fail.

        Ports that cannot be opened are tried again.
        """
        for service, reason in failures:
            text = "health check node port cannot be served"
            if self._limited.warning(("port", service), text, service=service, reason=reason):
                about = service_reference(service.namespace, service.name)
                self._post(about, WARNING, Reason.HEALTH_PORT_FAILED, "Listen", reason)
        before, self._failed = self._failed, set(self._surface.failed_services)
        for service in before - self._failed:
            if self._surface.serves(service):
                text = "health check node port is served now"
                self._limited.write(("port served", service), INFO, text, service=service)
        if self._failed:
            self._health_ports.start(RETRY_SECONDS)

    def _retry(self) -> None:
        self.report(self._surface.retry_service_health())
