# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The forwarder of userspace mode as part of the agent: its thread, its limits, and what it reports."""

from __future__ import annotations

from typing import Any, Optional, Sequence

from ..base.addresses import address_and_port
from ..base.errors import brief_traceback
from ..base.loop import LONGEST_WAIT_SECONDS
from ..clients import ClientRule
from ..configuration.model import KubeProxyConfiguration
from ..convergence.handles import ListenerAccess
from ..convergence.live import Flow, LiveConnection, Remembered
from ..forwarding.forwarder import RETRY_SECONDS, Forwarder
from ..forwarding.limits import Limits, within_files
from ..forwarding.opened import Client, Used
from ..forwarding.resource import ListenersResource
from ..rendering.userspace.model import Endpoint, Listener, ListenerKey
from ..resources import Change, Resource
from .http.connections import DEFAULT_LIMITS, OTHER_FILES
from .telemetry.log import INFO, LimitedLog
from .threads.supervision import Supervisor, Task
from .threads.timers import Timers

#: File descriptors that the agent uses for all else, the clients of its HTTP server included.
_OTHER_FILES = OTHER_FILES + DEFAULT_LIMITS.connections
_STOP_SECONDS = 5.0
_SOON_SECONDS = 1.0
_REPORTED = 20


def limits_of(configuration: KubeProxyConfiguration, files: int) -> Limits:
    """Return the forwarder's limits. The timeouts are the ones that other modes set for connection tracking.

    ``files``: how many files the process may open.
    """
    own, conntrack = configuration.node_proxy.userspace, configuration.conntrack
    default = Limits()
    wanted = default._replace(
        connections=own.max_connections,
        sessions=own.max_sessions,
        connect_seconds=own.connect_timeout,
        drain_seconds=own.drain_timeout,
        idle_seconds=conntrack.tcp_established_timeout or default.idle_seconds,
        half_closed_seconds=conntrack.tcp_close_wait_timeout or default.half_closed_seconds,
        udp_seconds=conntrack.udp_timeout or default.udp_seconds,
        udp_stream_seconds=conntrack.udp_stream_timeout or default.udp_stream_seconds,
    )
    return within_files(wanted, files, _OTHER_FILES)


class Forwarding(ListenerAccess):
    """The agent's forwarder, which exists once there is a listener.

    ``clients``: who is one client. ``files``: how many files the agent may open.
    """

    def __init__(
        self, supervisor: Supervisor, timers: Timers, log: LimitedLog, clients: ClientRule, files: int
    ) -> None:
        self._supervisor = supervisor
        self._log = log
        self._clients = clients
        self._files = files
        self._limits = Limits()
        self._forwarder: Optional[Forwarder] = None
        self._task: Optional[Task] = None
        self._unbound: dict[ListenerKey, str] = {}
        self._report = timers.add("report listeners", self._report_unbound)

    def configure(self, configuration: KubeProxyConfiguration) -> None:
        """Adopt the limits of a configuration; open connections are not affected."""
        self._limits = limits_of(configuration, self._files)
        if self._forwarder is not None:
            self._forwarder.limits = self._limits

    def resource(self, family: str) -> Resource[Any, Any]:
        """See the base class."""
        return ListenersResource(self, family)

    def left(self, families: Sequence[str]) -> list[Resource[Any, Any]]:
        """See the base class."""
        return [self.resource(family) for family in families] if self._forwarder else []

    def live_connections(self, flow: Flow) -> list[LiveConnection]:
        """See the base class."""
        if self._forwarder is None:
            return []
        client, key = flow.client, ListenerKey(*flow.arrival[:3])
        place = address_and_port(key.address, key.port)
        return [
            LiveConnection(
                by="agent",
                source=address_and_port(*item.source),
                destination=place,
                endpoint=address_and_port(*item.endpoint),
                seen_as=address_and_port(*item.seen_as),
                state=item.state,
                seconds=-1,
            )
            for item in self._forwarder.opened(key, (client.address, client.port))
        ]

    def remembered(self, flow: Flow, owner: str, seconds: int) -> list[Remembered]:
        """See the base class."""
        client = flow.client.address
        found = self._forwarder.remembered(owner, client, seconds) if self._forwarder is not None and seconds else None
        return [Remembered(client, address_and_port(*found[0]), int(found[1]))] if found is not None else []

    def end_connections(self, owner: str, endpoint: Endpoint) -> int:
        """See the base class."""
        return self._forwarder.end_connections(owner, endpoint) if self._forwarder is not None else 0

    def used(self) -> list[Used]:
        """See the base class."""
        return self._forwarder.used() if self._forwarder is not None else []

    def at_loopback(self, family: str) -> tuple[int, int]:
        """See the base class."""
        return self._forwarder.at_loopback(family) if self._forwarder is not None else super().at_loopback(family)

    def table(self) -> dict[ListenerKey, Listener]:
        """Return all listeners."""
        return self._forwarder.table() if self._forwarder is not None else {}

    def apply(self, change: Change[ListenerKey, Listener]) -> None:
        """Add, change and remove listeners; the first call starts the thread. Raises KernelError."""
        self._started().apply(change)

    def status(self) -> dict[str, Any]:
        """Return the state of the forwarder as plain JSON values; empty if there has been no listener."""
        return self._forwarder.status() if self._forwarder is not None else {}

    def clients(self) -> list[Client]:
        """Return the open connections and sessions. Raises KernelError."""
        return self._forwarder.clients() if self._forwarder is not None else []

    def stop(self) -> None:
        """End the thread, and all connections that do not end within their time."""
        if self._forwarder is None or self._task is None:
            return
        self._task.close()
        self._forwarder.stop()
        self._task.join(_STOP_SECONDS)
        if not self._task.alive:
            self._forwarder.close()
        self._forwarder = self._task = None

    def _started(self) -> Forwarder:
        if self._forwarder is None:
            forwarder = self._forwarder = Forwarder(self._limits, self._clients, self._failed)

            def run(task: Task) -> None:
                forwarder.run(lambda: task.busy(2 * LONGEST_WAIT_SECONDS))

            self._task = self._supervisor.start("forwarding", run)
            self._report.start(_SOON_SECONDS)
        return self._forwarder

    def _failed(self, error: Exception) -> None:
        self._log.warning(
            ("forwarding", type(error).__name__),
            "a connection failed; this is a defect of the agent",
            error=f"{type(error).__name__}: {error}",
            traceback=brief_traceback(error),
        )

    def _report_unbound(self) -> None:
        """Log listeners whose socket cannot be opened, once for each reason, and those that have recovered."""
        if self._forwarder is None:
            return
        self._report.start(RETRY_SECONDS)
        before, self._unbound = self._unbound, self._forwarder.unbound()
        for key, reason in list(self._unbound.items())[:_REPORTED]:
            if before.get(key) != reason:
                self._log.warning(("listener", key), "cannot listen, retrying", listener=key, reason=reason)
        for key in [key for key in before if key not in self._unbound][:_REPORTED]:
            self._log.write(("listener", key), INFO, "listening again, or removed", listener=key)
