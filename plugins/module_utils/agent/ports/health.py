# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Health of the proxy: the answers of /healthz, /livez and /readyz, and the Services' health check node ports.

A health check node port has one socket for each address. It stays open as long as both are wanted, whatever else
changes, because its Service is looked up with each request. The other sockets are in ``http.server``. Semantics, header
and body formats are those of kube-proxy 1.36 (KEP-3836 for the node's eligibility): a family is unhealthy if a change
has been pending for longer than the timeout; an idle agent is healthy. In addition, an agent with a stuck thread is
unhealthy; and a drained node is not eligible, as in kube-proxy one that the autoscaler is about to delete.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
import time
from typing import Callable, Mapping, NamedTuple, Optional, Sequence

from ...base.errors import KernelError
from ...cluster.model import NamespacedName, Node
from ..http.message import HttpRequest, Response
from ..http.server import HttpServer, OpenPort

DELETION_TAINT = "ToBeDeletedByClusterAutoscaler"
JSON_HEADERS = (("Content-Type", "application/json"), ("X-Content-Type-Options", "nosniff"))


def json_time(seconds: Optional[float]) -> str:
    """Format seconds since the epoch as Go does in JSON: RFC 3339 in UTC with fractions; None as its zero time."""
    if seconds is None:
        return "0001-01-01T00:00:00Z"
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat().replace("+00:00", "Z")


class ProxyHealth:
    """Health per family and the eligibility of the node; safe to use from several threads.

    ``timeout`` is in seconds (kube-proxy: twice the syncPeriod). ``clock`` returns seconds since the epoch, for the
    answers; ``monotonic`` is the clock by which a change is pending for too long.
    """

    def __init__(
        self, timeout: float, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout = timeout
        #: Returns whether load balancers shall leave this node; the agent replaces it.
        self.drained: Callable[[], bool] = bool
        #: Returns whether nothing is in sync yet, or only part of the Services; the agent replaces it.
        self.preliminary: Callable[[], bool] = bool
        #: Returns which other service proxy is noticed, in one line; the agent replaces it.
        self.other_proxy: Callable[[], str] = str
        #: Returns whether each of what pods need is in force on this node; the agent replaces it.
        self.stages: Callable[[], dict[str, bool]] = dict
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._updated: dict[str, float] = {}
        self._oldest_pending: dict[str, float] = {}
        self._node_eligible = False
        self._stuck: tuple[str, ...] = ()

    def threads_stuck(self, names: tuple[str, ...]) -> None:
        """Record the agent's stuck threads; with any of them the agent is unhealthy."""
        with self._lock:
            self._stuck = names

    def updated(self, family: str) -> None:
        """Record that the loop of the family has started, or that a sync of it has succeeded."""
        with self._lock:
            self._updated[family] = self._clock()
            self._oldest_pending.pop(family, None)

    def queued(self, family: str) -> None:
        """Record that a sync of the family was requested."""
        with self._lock:
            self._oldest_pending.setdefault(family, self._monotonic())

    def forget(self, family: str) -> None:
        """Forget a family that is not served any more."""
        with self._lock:
            self._updated.pop(family, None)
            self._oldest_pending.pop(family, None)

    def node_seen(self, node: Node) -> None:
        """Record the current Node object. Do not call this for a deleted Node, whose last state remains in effect."""
        with self._lock:
            self._node_eligible = not node.deleting and DELETION_TAINT not in node.taint_keys

    def _families(self) -> dict[str, bool]:
        now = self._monotonic()
        return {
            family: family not in self._oldest_pending or now - self._oldest_pending[family] < self.timeout
            for family in sorted(self._updated)
        }

    @property
    def healthy(self) -> bool:
        """Return whether nothing is stuck or pending for longer than the timeout, and no other proxy is noticed."""
        with self._lock:
            return not self._stuck and not self.other_proxy() and all(self._families().values())

    def answer(self, with_eligibility: bool) -> Response:
        """Return the answer of /healthz (with the node's eligibility) or /livez (without)."""
        with self._lock:
            now = self._clock()
            families = self._families()
            updated = dict(self._updated)
            eligible = self._node_eligible and not self.drained() and not self.preliminary()
            # Load balancers, which look at the eligibility, need not leave: Services are served, if by two proxies.
            healthy = not self._stuck and all(families.values()) and (with_eligibility or not self.other_proxy())
        good = healthy and (eligible or not with_eligibility)
        last = now if good else max(updated.values(), default=None)
        body: dict[str, object] = {"lastUpdated": json_time(last), "currentTime": json_time(now)}
        if with_eligibility:
            body["nodeEligible"] = eligible
        body["healthy"] = healthy
        if families:
            body["status"] = {
                family: {"lastUpdated": json_time(updated[family]), "healthy": state}
                for family, state in families.items()
            }
        return _compact(good, body)

    @property
    def ready(self) -> bool:
        """Whether pods may start: what they need is in force, and kept so."""
        return self.healthy and all(self.stages().values())

    def readiness_answer(self) -> Response:
        """Return the answer of /readyz: whether pods may start, and what of that they need is in force.

        The node's eligibility does not matter. Equal states have equal bodies, since node-readiness-controller's
        reporter copies the body of a 503 into the Node at every check.
        """
        healthy, stages = self.healthy, self.stages()
        ready = healthy and all(stages.values())
        return _compact(ready, {"ready": ready, "healthy": healthy, "inForce": stages})


def _compact(good: bool, body: Mapping[str, object]) -> Response:
    return Response(200 if good else 503, JSON_HEADERS, json.dumps(body, separators=(",", ":")).encode())


def service_health_answer(
    service: NamespacedName, local_endpoints: int, proxy_healthy: bool, drained: bool = False
) -> Response:
    """Return the answer of a Service's health check node port, on any path, with KEP-1860's endpoint weight header.

    A drain changes the status only: the endpoints exist, and the proxy is healthy.
    """
    body = {
        "service": {"namespace": service.namespace, "name": service.name},
        "localEndpoints": local_endpoints,
        "serviceProxyHealthy": proxy_healthy,
    }
    headers = (*JSON_HEADERS, ("X-Load-Balancing-Endpoint-Weight", str(local_endpoints)))
    good = local_endpoints > 0 and proxy_healthy and not drained
    return Response(200 if good else 503, headers, json.dumps(body, indent="\t").encode())


class FailedPort(NamedTuple):
    """A Service whose health check node port cannot be served everywhere, and why."""

    service: NamespacedName
    reason: str


class ServiceHealthPorts:
    """The health check node ports of one family. A failure concerns one address of one Service and is retried."""

    def __init__(self, server: HttpServer, health: ProxyHealth) -> None:
        self._server = server
        self._health = health
        self._addresses: tuple[str, ...] = ()
        self._ports: dict[NamespacedName, int] = {}
        self._counts: dict[NamespacedName, int] = {}
        self._service_of: dict[int, NamespacedName] = {}
        self._open: dict[tuple[str, int], OpenPort] = {}
        self._failed: dict[NamespacedName, str] = {}

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
    ) -> list[FailedPort]:
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

    def retry(self) -> list[FailedPort]:
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
