# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Noticing foreign changes where the kernel notifies nothing: legacy iptables, IPVS and ipset are looked at."""

from __future__ import annotations

import hashlib
import re
import time
from typing import Callable, Dict, Optional, Sequence

from ..convergence.handles import KernelHandles
from ..dataplane.ipvs.sets import definitions
from ..kernel.ipvs import PROC_TABLE
from .legacy_tables import LegacyTables, LockWatch
from .notifications import XTABLES_TABLES, Watch

_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 1.0, 1.7
# Reading and comparing takes at most about one percent of a processor, as long as the longest interval allows.
_COST_FACTOR = 100.0
_VERIFY_SECONDS = 5.0


class LegacyWatch(Watch):
    """Legacy iptables: see ``legacy_tables``."""

    interval = _SHORTEST_INTERVAL

    def __init__(self, families: Sequence[str]) -> None:
        self._tables = {family: LegacyTables(family, XTABLES_TABLES) for family in families}
        self._lock = LockWatch()

    def fileno(self) -> int:
        """See the base class."""
        return self._lock.fileno()

    def look(self, found: Dict[str, str]) -> None:
        """See the base class."""
        used = self._lock.used()
        for family, tables in self._tables.items():
            if tables.changed(used):
                found.setdefault(family, "contents of the iptables tables")

    def settled(self, changed: bool, observed: bool) -> None:
        """See the base class."""
        self._lock.used()
        for tables in self._tables.values():
            tables.settled(changed, observed)

    def close(self) -> None:
        """See the base class."""
        self._lock.close()
        for tables in self._tables.values():
            tables.close()


_COUNTS = re.compile(rb" +\d+ +\d+ *$", re.MULTILINE)


def virtual_servers_text(path: str = PROC_TABLE) -> bytes:
    """What /proc tells of all virtual and real servers; empty if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


class ServersContent:
    """A digest of all virtual and real servers, their connection counts aside."""

    def __init__(self, read: Callable[[], bytes] = virtual_servers_text) -> None:
        self._read = read
        self._raw = b""
        self._digest = b""

    def __call__(self) -> bytes:
        """The digest now."""
        text = self._read()
        raw = hashlib.blake2b(text, digest_size=16).digest()
        # The stripping costs more than the reading, so it is spared as long as the counts stand still.
        if raw != self._raw:
            self._raw = raw
            self._digest = hashlib.blake2b(_COUNTS.sub(b"", text), digest_size=16).digest()
        return self._digest


class PollWatch(Watch):
    """A content that is read again and again. After changes of our own it counts as right until it is verified."""

    def __init__(
        self, what: str, families: Sequence[str], read: Callable[[], bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval = _SHORTEST_INTERVAL
        self._what = what
        self._families = tuple(families)
        self._read = read
        self._clock = clock
        self._digest: Optional[bytes] = None
        self._verify_at = float("inf")

    def look(self, found: Dict[str, str]) -> None:
        """See the base class."""
        started = self._clock()
        digest = self._read()
        cost = self._clock() - started
        self.interval = min(max(_SHORTEST_INTERVAL, _COST_FACTOR * cost), _LONGEST_INTERVAL)
        if self._digest is None:
            self._digest = digest
            self._verify_at = min(self._verify_at, started + _VERIFY_SECONDS)
        elif digest != self._digest:
            self._suspect(found, f"contents of {self._what}")
        if started >= self._verify_at:
            self._verify_at = float("inf")
            self._suspect(found, f"check of {self._what} after changes")

    def _suspect(self, found: Dict[str, str], reason: str) -> None:
        self._digest = None
        for family in self._families:
            found.setdefault(family, reason)

    def settled(self, changed: bool, observed: bool) -> None:
        """See the base class."""
        if observed:
            self._digest = self._read()
            self._verify_at = float("inf")
        elif changed:
            self._digest = None


def sets_content(handles: KernelHandles, families: Sequence[str]) -> Callable[[], bytes]:
    """A function that gives a digest of all our ipsets and their elements."""
    names = [name for family in families for name in definitions(family)]

    def read() -> bytes:
        found = hashlib.blake2b(digest_size=16)
        for name in names:
            found.update(handles.ipset.content_digest(name))
        return found.digest()

    return read
