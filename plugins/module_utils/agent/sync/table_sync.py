# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one way in which tables of the kernel are brought up to date, compared in steps, and repaired."""

from __future__ import annotations

from typing import Callable, Collection, Iterable, NamedTuple, Optional, Sequence

from ...base.errors import KernelError, ProxyError
from ...cluster.model import NamespacedName
from ...resources import PlannedChange
from ..drift.repairs import Repairs
from ..threads.timers import monotonic
from .tables import FULL, NOTHING, PARTIAL, SyncedTables, SyncResult

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
        self._running: dict[str, Comparison] = {}
        # The families that have been compared since all comparisons had ended, with the seconds that each comparison
        # had taken before the sync with which it ended.
        self._ended: dict[str, float] = {}
        # Families whose last comparison in steps has failed.
        self._indivisible: set[str] = set()

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
        return not self._running and bool(families) and all(tables.family in self._ended for tables in families)

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


class Synced(NamedTuple):
    """A sync of tables that succeeded.

    ``result``: what it changed. ``repaired``: the entries that it has repaired besides. ``compared``: whether it ended
    a comparison with the kernel, which had taken ``earlier`` seconds before.
    """

    kind: str
    result: SyncResult
    repaired: int = 0
    compared: bool = False
    earlier: float = 0.0


class TableSync:
    """Syncs tables, and reports what was repaired. A failure concerns the tables that it is about.

    ``suspects``: families whose tables another program may have changed, with the reason. ``applied`` is called with a
    family and the changes that were made to its tables; the agent replaces it.
    """

    def __init__(self, repairs: Repairs) -> None:
        self.repairs = repairs
        self.suspects: dict[str, str] = {}
        self.applied: Applied = lambda _family, _changes: None
        self.comparisons = Comparisons(self._tell_applied, self.suspect)

    def _tell_applied(self, family: str, changes: Sequence[PlannedChange]) -> None:
        self.applied(family, changes)

    def suspect(self, family: str, reason: str) -> None:
        """Have a later sync compare the tables of a family; the first reason counts."""
        self.suspects.setdefault(family, reason)

    def pop_suspects(self) -> dict[str, str]:
        """Return the suspects and forget them."""
        suspects = dict(self.suspects)
        self.suspects.clear()
        return suspects

    def apply(self, tables: SyncedTables, full: bool) -> SyncResult:
        """Make a full or a partial sync. Raises KernelError; the next sync is then full."""
        result = tables.full() if full else tables.partial()
        self.applied(tables.family, result.changes)
        return result

    def sync(
        self,
        tables: SyncedTables,
        suspicion: str,
        *,
        at_once: bool,
        continued: bool = True,
        later: Callable[[], Collection[NamespacedName]] = tuple,
    ) -> Synced:
        """Apply the changes of tables, and compare with the kernel those that need it or are suspect.

        ``at_once``: a comparison that is needed must not be divided. ``continued``, ``later``: as for
        :meth:`.Comparisons.run`. Raises KernelError; the caller then calls :meth:`failed`.
        """
        began = monotonic()
        if tables.needs_full and (at_once or self.comparisons.is_whole(tables)):
            result = self.apply(tables, full=True)
            self.comparisons.compared_at_once(tables)
            self._report(tables, self.repairs.pop_unrepaired(tables.family), result, monotonic() - began)
            return Synced(FULL, result)
        result = NOTHING if tables.needs_full else self._partial(tables, suspicion)
        compared = self.comparisons.run(tables, suspicion, continued, later)
        if compared is None:
            return Synced(PARTIAL, result)
        reason = self.repairs.pop_unrepaired(tables.family) or compared.reason
        repaired = self._report(tables, reason, compared.result, compared.seconds)
        if compared.full:
            return Synced(FULL, compared.result, compared=True, earlier=compared.earlier)
        return Synced(PARTIAL, result, repaired, compared=True, earlier=compared.earlier)

    def _partial(self, tables: SyncedTables, suspicion: str) -> SyncResult:
        try:
            return self.apply(tables, full=False)
        except KernelError:
            if not suspicion:
                raise
            # Another program has changed the objects of this sync, or deleted the table. The comparison that begins now
            # repairs these early. A later attempt would let the changes wait for it.
            return NOTHING

    def _report(self, tables: SyncedTables, reason: str, result: SyncResult, seconds: float) -> int:
        """Report a repair, unless the tables were compared because a sync had failed; return the entries of it."""
        return self.repairs.succeeded(tables.family, reason, result.changes, seconds) if reason else 0

    def failed(self, tables: SyncedTables, suspicion: str, error: ProxyError) -> None:
        """Record that a sync has failed; the next one compares tables that were suspect, or were being compared."""
        suspicion = self.comparisons.sync_failed(tables) or suspicion
        if suspicion:
            tables.needs_full = True
            self.repairs.failed(tables.family, suspicion, error)
