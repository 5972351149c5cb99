# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What follows the syncs of a node after some time: checks, later syncs, and upkeep without any change."""

from __future__ import annotations

from typing import Callable, Optional

from ..drift.repairs import PARAMETERS_SECONDS
from ..reports import Reports
from ..sync.schedule import RegularCheck
from ..threads.timers import Timers
from .connection_resets import ConnectionResets
from .other_modes import DRAIN_SECONDS
from .setup import Proxiers
from .slow_start import SlowStart
from .syncer import Syncer, SyncOutcome

GAUGES_SECONDS = 30.0


class Followups:
    """Starts the timers of what follows a sync.

    ``proxiers`` returns those of the mode in effect. ``request`` has the node synced, which finds out what is due;
    ``check`` has everything compared with the kernel. ``changed`` is called when entries of the kernel were removed.
    """

    def __init__(
        self,
        timers: Timers,
        reports: Reports,
        syncer: Syncer,
        slow_start: SlowStart,
        *,
        proxiers: Callable[[], Optional[Proxiers]],
        request: Callable[[], None],
        check: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._clock = timers.clock
        self._syncer = syncer
        self._slow_start = slow_start
        self._proxiers = proxiers
        self._changed = changed
        self._check = RegularCheck(timers, "check everything", check)
        self._held = timers.add("apply a change that was held back", request)
        self._examine = timers.add("examine connections", request)
        self._rise = timers.add("raise the share of new endpoints", request)
        self._draining = timers.add("remove drained real servers", self._drain)
        self.resets = ConnectionResets(timers, reports, lambda: getattr(proxiers(), "families", ()))
        self._gauges = timers.add("refresh gauges", self._refresh_gauges)
        self._parameters = timers.add("repair kernel parameters", self._repair_parameters)

    def synced(self, proxiers: Proxiers, outcome: SyncOutcome, started: float) -> None:
        """Start the timers after a sync that ``started`` at that time; some run until they are due."""
        now = self._clock()
        self._check.synced(proxiers.configuration.check_period, outcome.observed, now - started + outcome.earlier)
        pause = self._slow_start.delay()
        if pause:
            self._rise.restart(pause)
        if outcome.held_until:
            self._held.restart(max(0.0, outcome.held_until - now))
        for proxier in proxiers.families:
            if proxier.stale_flows.waiting_seconds:
                self._examine.start(proxier.stale_flows.waiting_seconds)
        if any(proxier.draining for proxier in proxiers.families):
            self._draining.start(DRAIN_SECONDS)
        if outcome.succeeded:
            self.resets.follow()
        self._gauges.start(GAUGES_SECONDS)
        self._parameters.start(PARAMETERS_SECONDS)

    def _drain(self) -> None:
        proxiers = self._proxiers()
        if proxiers is not None:
            gone, left = self._syncer.drain(proxiers.families)
            if gone:
                self._changed()
            if left:
                self._draining.start(DRAIN_SECONDS)

    def _refresh_gauges(self) -> None:
        proxiers = self._proxiers()
        if proxiers is not None:
            for proxier in proxiers.families:
                self._syncer.measures.count_rules(proxiers, proxier)

    def _repair_parameters(self) -> None:
        proxiers = self._proxiers()
        if proxiers is not None:
            self._syncer.repairs.repair_parameters(proxiers.sysctls)
            self._parameters.start(PARAMETERS_SECONDS)
