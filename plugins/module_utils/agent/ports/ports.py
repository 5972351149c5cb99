# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep the agent's ports open, and report those that cannot be opened."""

from __future__ import annotations

from typing import Callable, Iterable, Set

from ...cluster.model import NamespacedName
from ...event_reasons import Reason
from ..api.events import WARNING, Post, service_reference
from ..other_proxy import OtherProxy
from ..telemetry.log import INFO, LimitedLog
from ..threads.failures import Fatal
from ..threads.timers import RETRY_SECONDS, Timers
from .service_health import FailedPort
from .surface import Surface


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
        self._failed: Set[NamespacedName] = set()
        self._own_ports = timers.add("open own ports", self.open)
        self._health_ports = timers.add("open health check node ports", self._retry)

    def open(self) -> None:
        """Open the ports of healthz and metrics. Raises Fatal if the configuration requires it."""
        for listener in self._surface.listeners:
            known = listener.failure
            if listener.open():
                self._other_proxy.port_open(listener.name)
                continue
            if listener.in_use and listener.address is not None:
                self._other_proxy.port_in_use(listener.name, listener.address.port)
            if listener.failure != known:
                self._limited.warning(
                    ("own port", listener.name),
                    "server not started, retrying",
                    server=listener.name,
                    error=listener.failure,
                )
            if self._must_bind():
                reason = Reason.HEALTHZ_FAILED if listener.name == "healthz" else Reason.METRICS_FAILED
                self._post(None, WARNING, reason, "StartKubeProxy", listener.failure)
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
