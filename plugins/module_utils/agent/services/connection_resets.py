# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connections to endpoints that were removed or fail their checks, ended beside the other work of the loop.

The table of connections may have a million entries, and any user of the cluster can have connections ended at any time.
So it is read for what is due only, in short steps between which the loop does other work, and with pauses.
"""

from __future__ import annotations

import time
from typing import Callable, NamedTuple, Optional, Sequence

from ...base.errors import KernelError
from ...kernel.conntrack.tcp_flows import Ended, Targets, ending_connections
from ...kernel.tcp_resets import PausingSteps
from ...serviceports.flows import frontends_of
from ..reports import Reports
from ..threads.timers import Timers
from .proxier import Proxier
from .removed_endpoints import Leaving

#: The loop does other work after this time.
STEP_SECONDS = 0.02
#: How much longer than passes work, none begins: they take a tenth of the processor's time at most.
_PAUSE_FACTOR = 9.0
#: Passes at a time: one waits for clients that do not answer, while another begins.
_MOST_PASSES = 8
_NAMED = 3


class _Running(NamedTuple):
    family: str
    named: str
    work: PausingSteps[Ended]
    at: float


class ConnectionResets:
    """Ends the connections that the proxiers have recorded, once :meth:`follow` is called after a sync."""

    def __init__(self, timers: Timers, reports: Reports, proxiers: Callable[[], Sequence[Proxier]]) -> None:
        self._clock = timers.clock
        self._log, self._limited = reports.log, reports.limited
        self._proxiers = proxiers
        self._timer = timers.add("end connections to removed endpoints", self._work)
        self._earliest = 0.0
        self._running: list[_Running] = []
        self._known_problem = ""

    def follow(self) -> None:
        """Begin what is due, and what will be due at its time."""
        delay = min((proxier.removed.delay() for proxier in self._proxiers()), default=float("inf"))
        if len(self._running) == _MOST_PASSES:
            delay = float("inf")
        delay = max(delay, self._rest())
        if self._running:
            delay = min(delay, max(0.0, min(item.at for item in self._running) - self._clock()))
        if delay < float("inf"):
            self._timer.restart(delay)

    def _rest(self) -> float:
        return max(0.0, self._earliest - self._clock())

    def _work(self) -> None:
        for proxier in self._proxiers() if not self._rest() else ():
            due = proxier.removed.pop() if len(self._running) < _MOST_PASSES else ()
            if due:
                named = ", ".join([*map(str, due[:_NAMED]), *([f"{len(due)} in all"] if len(due) > _NAMED else [])])
                self._running.append(_Running(proxier.family, named, _ending(proxier, due), 0.0))
        began, used = self._clock(), time.thread_time()
        running, self._running = self._running, []
        for item in running:
            left = item if item.at > began else self._advance(item, began + STEP_SECONDS)
            if left is not None:
                self._running.append(left)
        self._earliest = max(self._earliest, began) + _PAUSE_FACTOR * (time.thread_time() - used)
        self.follow()

    def _advance(self, item: _Running, until: float) -> Optional[_Running]:
        """Take steps of a pass until it pauses or a time; return what is left of it."""
        try:
            while True:
                pause = next(item.work)
                if pause is not None or self._clock() >= until:
                    return item._replace(at=self._clock() + (pause or 0.0))
        except StopIteration as end:
            self._report(item, end.value)
        except KernelError as error:
            text = "connections to removed or failed endpoints cannot be ended"
            self._limited.warning("end", text, family=item.family, endpoints=item.named, error=error)
        return None

    def _report(self, item: _Running, result: Ended) -> None:
        if result.problem and result.problem != self._known_problem:
            self._known_problem = result.problem
            self._log.warning("sockets of local programs cannot be closed", reason=result.problem)
        if result.connections:
            self._log.info(
                "ended connections to removed or failed endpoints",
                family=item.family,
                endpoints=item.named,
                connections=result.connections,
                local=result.sockets,
                reset=result.reset,
            )


def _ending(proxier: Proxier, due: Sequence[Leaving]) -> PausingSteps[Ended]:
    """End connections of a family. Raises KernelError."""
    targets = Targets()
    for item in due if proxier.mode.tracks_connections else ():
        frontends = frontends_of(item.port)
        if item.endpoint is not None:
            targets.add(frontends, [(item.endpoint.ip, item.endpoint.port)])
        elif item.kept:
            # Without any endpoint, what serves may not be known yet.
            targets.add(frontends, item.kept, others=True)
    closing = (proxier.drop(item.port, item.endpoint) for item in due if item.endpoint is not None)
    return ending_connections(proxier.family, targets, proxier.progress, closing)
