# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The endpoints of a family to which TCP connections are to be ended, and when.

An endpoint is removed when it no longer serves, as for entries of UDP: its EndpointSlices do not have it, or have it as
neither ready nor serving. Endpoints of a lost machine are unready for minutes before they leave their slices.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple, Optional, Sequence

from ...cluster.model import NamespacedName
from ...configuration.node_proxy import ServicePolicySettings
from ...serviceports.info import Endpoint, ServicePortInfo, ServicePortName
from ...serviceports.policy import reset_after

Place = tuple[str, int]


class Leaving(NamedTuple):
    """Connections of a ServicePort to end at the time ``due``: those to ``endpoint``.

    ``kept``: if it is None, those to any place but these.
    """

    due: float
    port: ServicePortInfo
    endpoint: Optional[Endpoint]
    kept: tuple[Place, ...] = ()

    def __str__(self) -> str:
        """Return the ServicePort, and the endpoint."""
        return f"{self.port.key} {self.endpoint.text}" if self.endpoint is not None else str(self.port.key)


def _serving(port: Optional[ServicePortInfo]) -> dict[Place, Endpoint]:
    return {} if port is None else {(item.ip, item.port): item for item in port.endpoints if item.serving}


class RemovedEndpoints:
    """Records which endpoints are removed. ``clock``: in seconds, monotonic.

    What was removed before the first :meth:`pop` is not known. So for Services of that time all connections that lead
    to no serving endpoint are ended, as late as if it had been removed when the Service was first seen.
    """

    def __init__(self, settings: ServicePolicySettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._is_first = True
        self._known: dict[NamespacedName, dict[ServicePortName, ServicePortInfo]] = {}
        self._leaving: dict[tuple[ServicePortName, Optional[Place]], Leaving] = {}

    def note(self, service: NamespacedName, ports: Sequence[ServicePortInfo]) -> None:
        """Record the ServicePorts that a Service has from now on, none if it was deleted."""
        before = self._known.pop(service, {})
        current = {info.key: info for info in ports if info.key.protocol == "TCP"}
        now = {key: info for key, info in current.items() if self._wait(info) < math.inf}
        if not before and not now:
            return
        for key in {**before, **now}:
            self._compare(before.get(key), now.get(key), is_kept=key in current and key not in now)
        if now:
            self._known[service] = now

    def _wait(self, port: ServicePortInfo) -> float:
        return reset_after(port.policy, self._settings)

    def _compare(self, before: Optional[ServicePortInfo], now: Optional[ServicePortInfo], is_kept: bool) -> None:
        """Record the difference of a ServicePort. ``is_kept``: its connections are now kept."""
        port = now or before
        if port is None:
            return
        due = self._clock() + self._wait(port)
        serving = _serving(now)
        if is_kept:
            for place in [None, *(place for key, place in self._leaving if key == port.key)]:
                self._leaving.pop((port.key, place), None)
            return
        for place in serving:
            self._leaving.pop((port.key, place), None)
        if before is None and self._is_first:
            self._leaving[port.key, None] = Leaving(due, port, None)
        for place, endpoint in _serving(before).items():
            if place not in serving and before is not None:
                self._leaving[port.key, place] = Leaving(due, before, endpoint)

    def end(self, port: ServicePortInfo, endpoint: Endpoint) -> None:
        """Have the connections of a ServicePort to an endpoint ended at once."""
        self._leaving[port.key, (endpoint.ip, endpoint.port)] = Leaving(self._clock(), port, endpoint)

    def delay(self) -> float:
        """Return the seconds until something is due, infinite if nothing will be."""
        return max(0.0, min(item.due for item in self._leaving.values()) - self._clock()) if self._leaving else math.inf

    def pop(self) -> list[Leaving]:
        """Return what is due, and forget it."""
        self._is_first = False
        now = self._clock()
        due = {key: item for key, item in self._leaving.items() if item.due <= now}
        for key in due:
            del self._leaving[key]
        return [self._completed(item) if item.endpoint is None else item for item in due.values()]

    def _completed(self, item: Leaving) -> Leaving:
        """Return an item with the places that are kept: those that serve, and those that are not due yet."""
        port = self._known.get(item.port.key.service, {}).get(item.port.key, item.port)
        waiting = [place for key, place in self._leaving if key == port.key and place is not None]
        return item._replace(port=port, kept=(*_serving(port), *waiting))
