# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slow start: the share of an endpoint rises from an eighth over the time that its Service's annotation gives.

The age of an endpoint is counted from when this agent saw it become ready. Endpoints that are ready when the agent
starts, or when their Service is first seen, have their whole share at once: if all rose together, nothing would be
gained.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

from ...cluster.account import EIGHTHS
from ...cluster.model import NamespacedName
from ...cluster.state import ClusterState
from ...configuration.node_proxy import ServicePolicySettings
from ...serviceports.policy import policy_of
from ..source.view import ClusterView

Place = tuple[str, int]
#: Added to the delay so that rounding never wakes the loop before a step.
_LATE_SECONDS = 0.01


class _Known(NamedTuple):
    """The places that are ready, since when; and those among them that rise, over ``seconds``."""

    seconds: float
    since: dict[Place, float]


class SlowStart:
    """Follows when endpoints of Services with slow start become ready. ``clock``: in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._services: dict[NamespacedName, _Known] = {}
        self._rising: set[NamespacedName] = set()

    def update(self, view: ClusterView, settings: ServicePolicySettings) -> None:
        """Note what changed in the view, and mark as dirty the Services in which a share rises by a step."""
        now = self._clock()
        for service in tuple(view.dirty):
            self._note(view.state, service, settings, now)
        for service in tuple(self._rising):
            known = self._services.get(service)
            rising = {} if known is None else _eighths(known, now)
            view.dirty |= view.state.set_rising(service, rising)
            if not rising:
                self._rising.discard(service)

    def _note(self, state: ClusterState, service: NamespacedName, settings: ServicePolicySettings, now: float) -> None:
        found = state.services.get(service)
        seconds = policy_of(found, settings).slow_start if found is not None else 0.0
        known = self._services.get(service)
        if not seconds:
            if known is not None:
                del self._services[service]
                self._rising.add(service)
            return
        ready = {
            (endpoint.address, port.port)
            for item in state.slices_of(service).values()
            for endpoint in item.endpoints
            if endpoint.ready
            for port in item.ports
        }
        begin = now - seconds if known is None else now
        before = known.since if known is not None else {}
        self._services[service] = _Known(seconds, {place: before.get(place, begin) for place in ready})
        self._rising.add(service)

    def delay(self) -> float:
        """Return the seconds until the next share rises by a step; 0 if none rises."""
        now = self._clock()
        steps = []
        for service in self._rising:
            known = self._services[service]
            step = known.seconds / EIGHTHS
            for place, reached in _eighths(known, now).items():
                steps.append(known.since[place] + (reached + 1) * step - now + _LATE_SECONDS)
        return max(_LATE_SECONDS, min(steps)) if steps else 0.0


def _eighths(known: _Known, now: float) -> dict[Place, int]:
    """Return how many eighths of its share each place has reached; places with the whole share are omitted."""
    reached = {place: max(1, int((now - since) * EIGHTHS / known.seconds)) for place, since in known.since.items()}
    return {place: count for place, count in reached.items() if count < EIGHTHS}
