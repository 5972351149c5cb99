# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of external changes without notifications: legacy iptables, IPVS and ipset are read and compared."""

from __future__ import annotations

import time
from typing import Callable, Optional, Sequence

from ...convergence.handles import KernelHandles
from ...kernel.xtables.chains import ChainsResource
from ...kernel.xtables.legacy_tables import LegacyTables, LockWatch
from ...rendering.ipvs.sets import known_definitions
from .notifications import XTABLES_TABLES, Watch, suspect

_SHORTEST_INTERVAL = 1.2
# Intervals if something else also detects external changes.
_NOTIFIED_INTERVAL = 10.0
# If nothing else detects external changes, reading and comparing contents may take 5 % of a CPU. Otherwise it only
# finds changes that the other means missed, and may take 0.05 %.
_WITHOUT_NOTIFICATIONS, _WITH_NOTIFICATIONS = (20.0, 15.0), (2000.0, 60.0)
# After our own changes everything is compared, which costs about ten times as much as reading the content.
_VERIFY_SECONDS, _LONGEST_VERIFY_SECONDS, _VERIFY_FACTOR = 5.0, 60.0, 1000.0


class LegacyWatch(Watch):
    """Detects changes of legacy iptables; see ``kernel.xtables.legacy_tables``."""

    interval = _SHORTEST_INTERVAL

    def __init__(self, resources: Sequence[ChainsResource]) -> None:
        self._resources = {resource.variant.family: resource for resource in resources}
        self._tables = {family: LegacyTables(family, XTABLES_TABLES) for family in self._resources}
        self._lock = LockWatch()

    def fileno(self) -> int:
        """See the base class."""
        return self._lock.fileno()

    def poll(self, found: dict[str, str]) -> None:
        """See the base class."""
        used = self._lock.used()
        for family, tables in self._tables.items():
            if tables.changed(used):
                found.setdefault(family, "contents of the iptables tables")

    def synced(self, changed: bool, observed: bool) -> None:
        """See the base class. Which tables we have changed is known from their resources."""
        written = {family: resource.pop_written() for family, resource in self._resources.items()}
        if any(tables is not None for tables in written.values()):
            self._lock.used()
        for family, tables in self._tables.items():
            tables.synced(written[family], observed)

    def close(self) -> None:
        """See the base class."""
        self._lock.close()
        for tables in self._tables.values():
            tables.close()


class PollWatch(Watch):
    """Polls some content of the kernel at an interval that keeps the cost of reading it low.

    ``outline``: reads a cheap summary that shows most changes; it is called every time. ``notified``: whether something
    else also detects external changes, so that ``read`` only finds changes that were missed. Without it, the content is
    assumed to be correct after our own changes until it is verified.
    """

    def __init__(
        self,
        what: str,
        families: Sequence[str],
        *,
        read: Callable[[], bytes],
        outline: Callable[[], bytes] = bytes,
        notified: Callable[[], bool] = bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._families = tuple(families)
        self._read = read
        self._outline = outline
        self._notified = notified
        self._clock = clock
        self._digest: Optional[bytes] = None
        self._outlined: Optional[bytes] = None
        self._cost = 0.0
        self._read_at = float("-inf")
        self._verify_at = float("inf")

    @property
    def interval(self) -> float:  # type: ignore[override]
        """See the base class."""
        return _NOTIFIED_INTERVAL if self._notified() else _SHORTEST_INTERVAL

    def poll(self, found: dict[str, str]) -> None:
        """See the base class."""
        now, outline = self._clock(), self._outline()
        if self._outlined is None:
            self._outlined = outline
        elif outline != self._outlined:
            self._suspect(found, f"numbers of entries of {self._what}")
        if now >= self._read_at + self._pause():
            self._compare(now, found)
        if now >= self._verify_at:
            self._verify_at = float("inf")
            self._suspect(found, f"check of {self._what} after changes")

    def _pause(self) -> float:
        """Return the seconds between two reads."""
        factor, longest = _WITH_NOTIFICATIONS if self._notified() else _WITHOUT_NOTIFICATIONS
        return min(factor * self._cost, longest)

    def _compare(self, now: float, found: dict[str, str]) -> None:
        digest = self._measured()
        if self._digest is None:
            self._digest = digest
            if not self._notified():
                pause = min(max(_VERIFY_SECONDS, _VERIFY_FACTOR * self._cost), _LONGEST_VERIFY_SECONDS)
                self._verify_at = min(self._verify_at, now + pause)
        elif digest != self._digest:
            self._suspect(found, f"contents of {self._what}")

    def _measured(self) -> bytes:
        started = self._clock()
        digest = self._read()
        self._read_at = started
        self._cost = self._clock() - started
        return digest

    def _suspect(self, found: dict[str, str], reason: str) -> None:
        self._digest = self._outlined = None
        suspect(found, self._families, reason)

    def synced(self, changed: bool, observed: bool) -> None:
        """See the base class."""
        if observed:
            self._digest, self._outlined = self._measured(), self._outline()
            self._verify_at = float("inf")
        elif changed:
            self._digest = self._outlined = None


def sets_digest(handles: KernelHandles, families: Sequence[str], header_only: bool) -> Callable[[], bytes]:
    """Return a function that computes a digest of all our ipsets and their elements.

    With ``header_only`` the digest covers definitions, numbers of elements and memory sizes.
    """
    names = frozenset(name for family in families for name in known_definitions(family))
    return lambda: handles.ipset.content_digest(names, header_only)
