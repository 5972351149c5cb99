# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one way in which tables of the kernel are brought up to date, compared and repaired."""

from __future__ import annotations

from typing import Callable, Collection, Dict, NamedTuple

from ...base.errors import KernelError, ProxyError
from ...cluster.model import NamespacedName
from ..drift.repairs import Repairs
from ..threads.timers import monotonic
from .comparison import Applied, Comparisons
from .tables import FULL, NOTHING, PARTIAL, SyncedTables, SyncResult


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
    family and the changes that were made to its tables.
    """

    def __init__(self, repairs: Repairs, applied: Applied = lambda _family, _changes: None) -> None:
        self.repairs = repairs
        self.suspects: Dict[str, str] = {}
        self.comparisons = Comparisons(applied, self.suspect)
        self._applied = applied

    def suspect(self, family: str, reason: str) -> None:
        """Have a later sync compare the tables of a family; the first reason counts."""
        self.suspects.setdefault(family, reason)

    def pop_suspects(self) -> Dict[str, str]:
        """Return the suspects and forget them."""
        suspects = dict(self.suspects)
        self.suspects.clear()
        return suspects

    def apply(self, tables: SyncedTables, full: bool) -> SyncResult:
        """Make a full or a partial sync. Raises KernelError; the next sync is then full."""
        result = tables.full() if full else tables.partial()
        self._applied(tables.family, result.changes)
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
