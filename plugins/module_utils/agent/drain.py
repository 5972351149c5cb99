# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The drain of this node in the agent: health checks fail, so that load balancers leave, while traffic is served.

The agent reads the file of root's command at its start and when the command requests it; it never writes it.
"""

from __future__ import annotations

import time
from typing import Callable, Optional

from ..base.timestamps import timestamp
from ..convergence.drain.record import DrainError, DrainRecord, read_record
from ..convergence.runtime.agent_status import DrainStatus
from ..event_reasons import Reason
from .api.events import NORMAL
from .reports import Reports
from .threads.timers import Timers

_ACTION = "Drain"


class Drain:
    """The drain that the file at ``path`` keeps, if any.

    ``owner``: the user to whom the file must belong. ``now`` returns the time in seconds since the epoch.
    :attr:`active` may be read in any thread.
    """

    def __init__(
        self, path: str, timers: Timers, reports: Reports, *, owner: int = 0, now: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._log, self._post = reports.log, reports.post
        self._owner = owner
        self._now = now
        self._clock = timers.clock
        self._record: Optional[DrainRecord] = None
        # When the drain ends, by the timers' clock, which no change of the time of day affects.
        self._deadline: Optional[float] = None
        self._problem = ""
        self._end_timer = timers.add("end the drain", lambda: self._end("it has expired"))

    @property
    def active(self) -> bool:
        """Whether the node is drained now."""
        deadline = self._deadline
        return deadline is not None and self._clock() < deadline

    def read(self) -> None:
        """Read the file, and begin, change or end the drain accordingly. A file that cannot be trusted ends it."""
        before, problem = self._record, self._problem
        record: Optional[DrainRecord] = None
        self._problem = ""
        try:
            record = read_record(self._path, self._owner)
        except DrainError as error:
            self._problem = str(error)
            if self._problem != problem:
                self._log.warning("the drain file is ignored", error=error)
        seconds = record.remaining(self._now()) if record is not None else 0.0
        if record is None or not seconds:
            if record is not None and before is None:
                self._log.info("the drain has expired", until=timestamp(record.until))
            reason = "its file is ignored" if self._problem else "it was stopped"
            self._end("it has expired" if record is not None else reason)
            return
        self._record, self._deadline = record, self._clock() + seconds
        self._end_timer.restart(seconds)
        if before != record:
            until = timestamp(record.until)
            text = "drained: health checks fail and traffic is served" if before is None else "the drain was changed"
            self._log.info(text, since=timestamp(record.since), until=until)
            self._post(None, NORMAL, Reason.DRAIN_STARTED, _ACTION, f"drained until {until}")

    def _end(self, reason: str) -> None:
        record, self._record, self._deadline = self._record, None, None
        # The timer cannot be stopped; its action does nothing without a drain.
        if record is not None:
            self._log.info("the drain has ended: health checks succeed again", reason=reason)
            self._post(None, NORMAL, Reason.DRAIN_ENDED, _ACTION, f"the drain has ended: {reason}")

    def status(self) -> DrainStatus:
        """Return the drain as plain JSON values; times are in seconds since the epoch, 0 without a drain."""
        record, deadline = (self._record, self._deadline) if self.active else (None, None)
        return {
            "drained": record is not None,
            "since": round(record.since, 3) if record is not None else 0,
            "until": round(record.until, 3) if record is not None else 0,
            "remainingSeconds": round(max(0.0, deadline - self._clock()), 1) if deadline is not None else 0,
            "problem": self._problem,
        }
