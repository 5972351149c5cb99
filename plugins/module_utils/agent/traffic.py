# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The traffic of Services in the agent: read on demand, and regularly for the metrics of the busiest ServicePorts."""

from __future__ import annotations

import time
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

from ..base.errors import ProxyError
from ..configuration.node_proxy import TrafficSettings
from ..convergence.handles import KernelHandles
from ..convergence.traffic.account import GAUGES, Numbers, TrafficAccount
from ..convergence.traffic.resets import counters_reset
from ..convergence.traffic.samples import revived
from ..resources import PlannedChange
from ..serviceports.frontends import Frontends
from ..serviceports.info import ServicePortName
from .services.node import NodeSync
from .source.view import ClusterView
from .telemetry.log import LimitedLog
from .threads.timers import Timers

METRICS_SECONDS = 15.0
#: A reading costs O(cluster). Those for metrics take at most 1 % of a processor, those on demand 10 %.
_METRICS_FACTOR, _DEMAND_FACTOR = 100.0, 10.0
#: Connections count half in the choice of the busiest ServicePorts after this time, so that the choice changes slowly.
HALF_LIFE_SECONDS = 600.0
#: The metric with each number of a ServicePort, and the label that the number adds to the port's.
_METRICS = (
    ("connections", ()),
    ("packets", ("in",)),
    ("packets", ("out",)),
    ("bytes", ("in",)),
    ("bytes", ("out",)),
    *(("open", (state,)) for state in GAUGES),
)


class MeasuredPort(NamedTuple):
    """A ServicePort with metrics: its family, and its numbers in the order of COUNTERS and GAUGES."""

    family: str
    port: ServicePortName
    counters: Numbers
    gauges: Numbers


class Measured(NamedTuple):
    """The ServicePorts with metrics, and the number of those without."""

    ports: tuple[MeasuredPort, ...] = ()
    omitted: int = 0

    def values(self) -> Mapping[str, Any]:
        """Return the values of the metrics; none while no ServicePort has metrics."""
        if not self.ports and not self.omitted:
            return {}
        values: dict[str, Any] = {"connections": {}, "packets": {}, "bytes": {}, "open": {}, "omitted": self.omitted}
        for item in self.ports:
            for (metric, label), value in zip(_METRICS, (*item.counters, *item.gauges)):
                if value is not None:
                    values[metric][(*item.port[:4], item.family, *label)] = value
        return values


class Busiest:
    """Chooses the ServicePorts of one family that had the most new connections recently."""

    def __init__(self) -> None:
        self._scores: dict[ServicePortName, tuple[float, int]] = {}
        self._chosen: set[ServicePortName] = set()

    def choose(self, connections: dict[ServicePortName, int], seconds: float, most: int) -> set[ServicePortName]:
        """Return at most ``most``; ``connections``: totals. ``seconds``: since the last call."""
        kept = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        scores = {}
        for port, total in connections.items():
            score, before = self._scores.get(port, (0.0, 0))
            scores[port] = (score * kept + total - before, total)
        self._scores = scores
        order = sorted(scores, key=lambda port: (-scores[port][0], port not in self._chosen, port))
        self._chosen = set(order[:most])
        return self._chosen


class _Family:
    """What is kept for one IP family."""

    def __init__(self) -> None:
        self.account = TrafficAccount()
        self.busiest = Busiest()


class Traffic:
    """The totals of all ServicePorts. :attr:`measured` may be read in any thread."""

    def __init__(
        self,
        sync: NodeSync,
        view: Callable[[], ClusterView],
        handles: KernelHandles,
        *,
        timers: Timers,
        limited: LimitedLog,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.measured = Measured()
        self._sync = sync
        self._view = view
        self._handles = handles
        self._clock = timers.clock
        self._limited = limited
        self._now = now
        self._settings = TrafficSettings()
        self._mode = ""
        self._families: dict[str, _Family] = {}
        self._since = self._read_at = 0.0
        # Of the last reading, by the timers' clock.
        self._began = self._ended = 0.0
        self._chosen_at: Optional[float] = None
        sync.syncer.tables.applied = self._applied
        self._timer = timers.add("read the traffic of Services", self._measure)

    def values(self) -> Mapping[str, Any]:
        """Return the values of the metrics, in any thread."""
        return self.measured.values()

    def configure(self, settings: TrafficSettings) -> None:
        """Start or stop providing metrics."""
        self._settings = settings
        if settings.metrics_ports:
            self._timer.start(0.0)
        else:
            self.measured = Measured()

    def _applied(self, family: str, changes: Sequence[PlannedChange]) -> None:
        """Note that a sync has changed the objects of a family, and with them their counters."""
        kept = self._families.get(family)
        if kept is None or not changes:
            return
        reset = counters_reset(changes)
        try:
            reset -= revived(changes, kept.account, self._handles)
        except ProxyError as error:
            self._limited.warning("traffic", "the traffic of Services cannot be read", error=error)
        kept.account.forget(reset, self._now())

    def _read(self) -> None:
        """Add up what the kernel has counted. Raises KernelError."""
        proxiers = self._sync.proxiers
        if proxiers is None:
            return
        if proxiers.mode.name != self._mode:
            self._mode, self._families, self._since = proxiers.mode.name, {}, self._now()
        self._began = self._clock()
        try:
            for proxier in proxiers.families:
                frontends = Frontends(self._view().state, proxier.context.node)
                samples = proxiers.mode.traffic(proxier.context, frontends, self._handles)
                kept = self._families.setdefault(proxier.family, _Family())
                kept.account.update(frontends.names, samples, self._now())
        finally:
            self._ended = self._clock()
        self._read_at = self._now()
        for name in self._families.keys() - {proxier.family for proxier in proxiers.families}:
            del self._families[name]

    def _seconds(self) -> float:
        """Return how long the last reading took, including the document made from it."""
        return self._ended - self._began

    def _measure(self) -> None:
        if not self._settings.metrics_ports:
            return
        try:
            self._read()
        except ProxyError as error:
            self._limited.warning("traffic", "the traffic of Services cannot be read", error=error)
        else:
            self._choose()
        self._timer.start(max(METRICS_SECONDS, _METRICS_FACTOR * self._seconds()))

    def _choose(self) -> None:
        now, most, wanted = self._clock(), self._settings.metrics_ports, self._settings.metrics_namespaces
        seconds = 0.0 if self._chosen_at is None else now - self._chosen_at
        self._chosen_at = now
        found: list[MeasuredPort] = []
        omitted = 0
        for name, family in sorted(self._families.items()):
            totals = {port: total for port, total in family.account.ports() if not wanted or port.namespace in wanted}
            connections = {port: total.counters[0] or 0 for port, total in totals.items()}
            chosen = family.busiest.choose(connections, seconds, most)
            omitted += len(totals) - len(chosen)
            for port in sorted(chosen):
                total = totals[port]
                found.append(MeasuredPort(name, port, tuple(total.counters), tuple(total.gauges)))
        self.measured = Measured(tuple(found), omitted)

    def document(self, namespace: str = "", endpoints: bool = True, known: Optional[float] = None) -> dict[str, Any]:
        """Return the totals as plain JSON values. Raises ProxyError.

        ``namespace``: return only its Services, unless it is empty. ``endpoints``: include the endpoints of each
        ServicePort. ``known``: the time of the reading that the caller has; if that is the last reading, the result has
        nothing but that time. Slow readings are reused for some time.

        In the result, ``at``: when the kernel was read, ``monotonic``: the same by a clock that is never set;
        ``since``: when it was read first. What the kernel had counted before that is included.
        """
        proxiers = self._sync.proxiers
        if proxiers is None:
            raise ProxyError("the agent does not know the cluster yet")
        recent = self._clock() - self._ended < _DEMAND_FACTOR * self._seconds()
        must_read = not recent or proxiers.mode.name != self._mode
        if must_read:
            self._read()
        at = round(self._read_at, 3)
        if known == at:
            return {"at": at}
        rows: list[dict[str, Any]] = []
        for name, family in sorted(self._families.items()):
            rows += family.account.document(name, namespace, endpoints)
        if must_read:
            # With many endpoints, this takes long as well.
            self._ended = self._clock()
        return {
            "mode": self._mode,
            "uncounted": proxiers.mode.uncounted,
            "since": round(self._since, 3),
            "at": at,
            "monotonic": round(self._began, 3),
            "ports": rows,
        }
