# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Comparisons of families with the kernel, in steps between which changes are synced."""

from __future__ import annotations

from typing import Callable, Dict, Iterable, Optional, Sequence, Set

from ...base.errors import KernelError
from ...cluster.model import NamespacedName
from ...resources import PlannedChange
from ..threads.timers import monotonic
from .tables import NOTHING, SyncedTables

Applied = Callable[[str, Sequence[PlannedChange]], None]
#: The time for the steps of one family before changes may be synced; a single step may take longer.
STEP_SECONDS = 0.2


class Comparison:
    """A comparison of one family with the kernel, and the repair of what differs.

    ``reason``: why the kernel may differ, empty if a sync has failed. ``again``: why the family must be compared once
    more when this comparison is complete, if so. ``full``: it also applies what a sync could not. ``later`` returns the
    Services that are programmed later if the kernel has lost everything. ``result``: what was repaired so far.
    ``seconds``: how long that took, ``earlier`` of them before the last call of :meth:`run`.
    """

    def __init__(self, tables: SyncedTables, reason: str, later: Callable[[], Iterable[NamespacedName]]) -> None:
        self.tables = tables
        self.reason = reason
        self.again = ""
        self.full = tables.needs_full
        self.failed = False
        self.result = NOTHING
        self.seconds = self.earlier = 0.0
        self._steps = tables.compare(later)

    def run(self, applied: Applied) -> bool:
        """Make the next steps, calling ``applied`` with the changes of each; return whether the comparison is complete.

        Raises KernelError.
        """
        began, self.earlier = monotonic(), self.seconds
        try:
            for result in self._steps:
                self.result = self.result.followed_by(result)
                applied(self.tables.family, result.changes)
                if self.tables.is_divisible and monotonic() - began >= STEP_SECONDS:
                    return False
            return True
        except KernelError:
            self.failed = True
            raise
        finally:
            self.seconds += monotonic() - began


class Comparisons:
    """The comparisons of all families.

    ``applied`` is called with the changes of each step, and ``suspect`` with a family that must be compared at a later
    sync, and the reason.
    """

    def __init__(self, applied: Applied, suspect: Callable[[str, str], object]) -> None:
        self._applied = applied
        self._suspect = suspect
        self._running: Dict[str, Comparison] = {}
        # The families that have been compared since all comparisons had ended, with the seconds that each comparison
        # had taken before the sync with which it ended.
        self._ended: Dict[str, float] = {}
        # Families whose last comparison in steps has failed.
        self._indivisible: Set[str] = set()

    def __bool__(self) -> bool:
        """Return whether any is running."""
        return bool(self._running)

    def clear(self) -> None:
        """Forget all: everything is compared at once."""
        self._running.clear()

    def forget_ended(self) -> None:
        """Forget the comparisons that have ended, unless others are still running."""
        if not self._running:
            self._ended.clear()

    def all_ended(self, families: Sequence[SyncedTables]) -> bool:
        """Return whether all families have been compared, and none is being compared."""
        return not self._running and bool(families) and all(family.family in self._ended for family in families)

    @property
    def earlier(self) -> float:
        """The seconds that the comparisons that have ended had taken before the syncs with which they ended."""
        return sum(self._ended.values())

    def is_whole(self, tables: SyncedTables) -> bool:
        """Return whether a family must be compared at once, because it has not been yet or steps have failed."""
        return not tables.has_observed or (tables.family in self._indivisible and not tables.is_cold())

    def compared_at_once(self, tables: SyncedTables) -> None:
        """Record that a family was compared at once."""
        self._running.pop(tables.family, None)
        self._indivisible.discard(tables.family)
        self._ended[tables.family] = 0.0

    def run(
        self, tables: SyncedTables, suspicion: str, continued: bool, later: Callable[[], Iterable[NamespacedName]]
    ) -> Optional[Comparison]:
        """Begin a comparison of a family if it is due, or take the next steps of one; return it when it is complete.

        ``continued``: steps are taken of the first that has begun before. Raises KernelError.
        """
        name, running = tables.family, self._running.get(tables.family)
        begins = tables.needs_full
        if suspicion and not begins:
            if running is not None:
                running.again = suspicion
            elif tables.awaits_portions():
                self._suspect(name, suspicion)
            else:
                begins = True
        if begins:
            running = self._running[name] = Comparison(tables, suspicion, later)
        # One family after the other, so that changes wait for the steps of one.
        continued = continued and name == next(iter(self._running), "")
        if running is None or not (begins or continued) or not running.run(self._applied):
            return None
        del self._running[name]
        self._ended[name] = running.earlier
        if running.again:
            self._suspect(name, running.again)
        return running

    def sync_failed(self, tables: SyncedTables) -> str:
        """Forget the comparison of a family; return the reason for it."""
        comparison = self._running.pop(tables.family, None)
        if comparison is not None and comparison.failed:
            self._indivisible.add(tables.family)
        return comparison.reason if comparison is not None else ""
