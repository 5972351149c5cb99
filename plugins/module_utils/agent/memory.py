# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep the agent below its memory limit: warn early, and refuse objects that do not fit.

The kernel kills an agent that exceeds the limit of its control group; the next one would list the same cluster and be
killed again. So the size of the cluster is known before its memory is needed: a list that is too large is given up,
and an object that would grow too much keeps its previous version. Programmed rules stay in the kernel.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Mapping, Optional

from ..cluster.account import within_share
from ..convergence.runtime.agent_status import MemoryStatus
from ..event_reasons import Reason
from ..kernel.memory_group import MemoryGroup, memory_group
from .api.events import WARNING
from .ports.health import ProxyHealth
from .reports import Reports
from .source.room import RESERVED_FOR, NoRoom, Room
from .threads.timers import Timers

POLL_SECONDS = 10.0
#: The use of the group is read at most so often. A sync may take some 100 MiB of the kernel's memory within a second.
READ_SECONDS = 0.1
#: Name of the entry in /healthz while the cluster is not followed completely.
HEALTH = "Memory"
#: Fractions of the limit: warn at WARN, re-arm below CALM, refuse above MOST.
WARN, CALM, MOST = 0.8, 0.7, 0.95
#: The memory of an agent without Services: Python, its libraries and threads.
BASE_BYTES = 50 << 20
#: Objects that were held back are listed again once the cluster is below this fraction of the capacity.
RELIST_BELOW = 0.9
#: The fraction of the capacity that is reserved for network policies, and for the pods that they isolate.
RESERVE = 0.05
_ACTION = "Follow"


class MemoryBudget(Room):
    """Compares the cluster's size with the memory limit of the agent's control group. Without a limit it does nothing.

    ``size`` and ``held_back`` return the bytes of the cluster's objects, and how many objects are held back; ``factor``
    the bytes of memory for each of these bytes, in the mode in effect at its worst moment. ``list_held_back`` lists the
    objects again that were held back and have room now; it is given whether objects may grow again. ``reserves``
    returns whether network policies are enforced, for which a part of the capacity is reserved. ``find_group`` returns
    the group with the limit.
    """

    def __init__(
        self,
        *,
        timers: Timers,
        reports: Reports,
        health: ProxyHealth,
        size: Callable[[], int],
        held_back: Callable[[], int],
        factor: Callable[[], float],
        list_held_back: Callable[[bool], None],
        reserves: Callable[[], bool] = lambda: False,
        find_group: Callable[[], Optional[MemoryGroup]] = memory_group,
    ) -> None:
        self._log, self._post = reports.log, reports.post
        self._health = health
        self._size = size
        self._held_back = held_back
        self._factor = factor
        self._list_held_back = list_held_back
        self._reserves = reserves
        self._find_group = find_group
        self._group = find_group()
        self._clock = timers.clock
        self._used = 0
        self._read_at = float("-inf")
        self._refused: set[str] = set()
        #: By kind, the bytes that a list in progress adds. All lists that are read at a time must fit together.
        self._arriving: dict[str, int] = {}
        self._lock = threading.RLock()
        #: Whether the cluster is not followed completely.
        self.exceeded = False
        self._warned = False
        self._timer = timers.add("poll the memory limit", self.poll)

    @property
    def capacity(self) -> Optional[int]:
        """The number of bytes of objects that fit into the limit; None without a limit."""
        if self._group is None:
            return None
        return max(0, int((self._group.limit * MOST - BASE_BYTES) / self._factor()))

    def carries(self, more: int, reserve: float = 0.0) -> bool:
        """Return whether ``more`` bytes fit beside known objects and lists in progress.

        ``reserve``: the share of the reserved room that they may use.
        """
        with self._lock:
            capacity = self.capacity
            if capacity is None:
                return True
            kept_free = RESERVE * (1 - reserve) * capacity if self._reserves() else 0.0
            return self._taken() + more <= capacity - kept_free

    def shares(self, excess: int, more: int = 0) -> bool:
        """See the base class."""
        with self._lock:
            capacity = self.capacity
            return capacity is None or within_share(excess, capacity - self._taken() - more)

    def admit(self, kind: str, growth: int) -> None:
        """Reserve room for a list that adds ``growth`` bytes. Raises NoRoom."""
        with self._lock:
            self._arriving.pop(kind, None)
            if self.carries(growth, RESERVED_FOR.get(kind, 0.0)):
                self._arriving[kind] = growth
                return
        self._refused.add(kind)
        raise NoRoom(
            f"list of {kind}s: the cluster does not fit into the agent's memory limit of {self._mebibytes}; "
            "programmed rules are kept but not updated: raise agent_memory_max"
        )

    def _taken(self) -> int:
        return self._size() + sum(self._arriving.values())

    def admitted(self, kind: str) -> None:
        """Record that a list of this kind is complete."""
        self._refused.discard(kind)

    def applied(self, kind: str, growth: int) -> None:
        """Move ``growth`` bytes from the reservation to the known objects."""
        with self._lock:
            if kind in self._arriving:
                self._arriving[kind] -= growth

    def release(self, kind: str) -> None:
        """Release what is left of the reservation for this kind."""
        with self._lock:
            self._arriving.pop(kind, None)

    @property
    def _mebibytes(self) -> str:
        return f"{self._group.limit >> 20} MiB" if self._group is not None else "no limit"

    def poll(self) -> None:
        """Compare the use with the limit, which may have changed, and report it."""
        self._timer.restart(POLL_SECONDS)
        self._group = self._find_group()
        if self._group is None:
            self._used = 0
            return
        self.check()
        self._report_exceeded()
        self._list_held_back(self._size() < RELIST_BELOW * (self.capacity or 0))

    def check_meanwhile(self) -> None:
        """Check within long work, for each part of which this is called: the kernel may kill the agent before its end.

        The parts may be as small as one object of the cluster, so most calls return at once.
        """
        if self._clock() - self._read_at >= READ_SECONDS:
            self.check()

    def check(self) -> None:
        """Warn if memory becomes short. The agent calls it before each sync: what a sync needs is known by then."""
        group, now = self._group, self._clock()
        if group is None:
            return
        if now - self._read_at >= READ_SECONDS:
            self._read_at = now
            try:
                self._used = group.used()
            except (OSError, ValueError) as error:
                self._log.debug("the memory in use cannot be read", error=error)
        limit, capacity = group.limit, self.capacity or 1
        share = max(self._used / limit, self._size() / capacity)
        if share >= WARN and not self._warned:
            self._warned = True
            used, most = self._used >> 20, limit >> 20
            values = {"used_mib": used, "limit_mib": most, "cluster_percent": round(self._size() * 100 / capacity)}
            self._log.warning("the agent is close to its memory limit: raise agent_memory_max", **values)
            note = f"the agent uses {used} MiB of {most} MiB: raise agent_memory_max"
            self._post(None, WARNING, Reason.MEMORY_LOW, _ACTION, note)
        elif share < CALM:
            self._warned = False

    def _report_exceeded(self) -> None:
        """Report that the cluster is not followed completely, or again; /healthz shows it like a pending sync."""
        exceeded = bool(self._refused) or self._held_back() > 0
        if exceeded and not self.exceeded:
            self._health.updated(HEALTH)
            self._health.queued(HEALTH)
            note = f"the cluster does not fit into the memory limit of {self._mebibytes}: raise agent_memory_max"
            if not self._refused:
                # The refusal of a list has its own line.
                self._log.warning(f"{note}; objects that grow keep their previous version", objects=self._held_back())
            self._post(None, WARNING, Reason.MEMORY_LIMIT, _ACTION, f"{note}; programmed rules are kept")
        elif not exceeded and self.exceeded:
            self._health.forget(HEALTH)
            self._log.info("the cluster fits into the memory limit again")
        self.exceeded = exceeded

    def status(self) -> MemoryStatus:
        """Return the use as of the last poll, as plain JSON values."""
        return {
            "limit": self._group.limit if self._group is not None else 0,
            "used": self._used,
            "cluster": self._size(),
            "capacity": self.capacity or 0,
            "heldBack": self._held_back(),
            "refusedLists": sorted(self._refused),
        }

    def values(self) -> Mapping[str, Any]:
        """Return the values of the metrics; none without a limit."""
        status = self.status()
        return {**status, "refused": len(self._refused)} if status["limit"] else {}
