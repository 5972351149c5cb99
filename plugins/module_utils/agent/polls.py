# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Noticing foreign changes where the kernel notifies nothing: legacy iptables, IPVS and ipset are looked at."""

from __future__ import annotations

import hashlib
import re
import socket
import sys
import time
from typing import Callable, Dict, Optional, Sequence

from ..convergence.handles import KernelHandles
from ..dataplane.ipvs.sets import definitions
from ..kernel.ipvs import PROC_TABLE
from .legacy_tables import LegacyTables, LockWatch
from .notifications import XTABLES_TABLES, Watch

_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 1.2, 15.0
# Reading and comparing takes at most about one percent of a processor.
_COST_FACTOR = 100.0
# After changes of our own everything is compared; that costs about ten times as much as reading the content.
_VERIFY_SECONDS, _LONGEST_VERIFY_SECONDS, _VERIFY_FACTOR = 5.0, 60.0, 1000.0

#: IP_VS_SO_GET_INFO of linux/ip_vs.h; struct ip_vs_getinfo: version, size of the table, number of virtual servers.
_GET_INFO = 64 + 1024 + 64 + 1
_INFO_BYTES = 12


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


class ServerCount:
    """The number of virtual servers, which the kernel tells at next to no cost; -1 if it does not."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)

    def __call__(self) -> int:
        """The number now."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_IP, _GET_INFO, _INFO_BYTES)
        except OSError:
            return -1
        return int.from_bytes(info[8:12], sys.byteorder)


class PollWatch(Watch):
    """A content that is read again and again, as often as reading it costs little.

    ``count``: something that tells of large changes and costs nothing, asked for every time. After changes of
    our own the content counts as right until it is verified.
    """

    interval = _SHORTEST_INTERVAL

    def __init__(
        self,
        what: str,
        families: Sequence[str],
        read: Callable[[], bytes],
        count: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._families = tuple(families)
        self._read = read
        self._count = count
        self._clock = clock
        self._digest: Optional[bytes] = None
        self._counted: Optional[int] = None
        self._cost = 0.0
        self._due = 0.0
        self._verify_at = float("inf")

    def look(self, found: Dict[str, str]) -> None:
        """See the base class."""
        now, count = self._clock(), self._count()
        if self._counted is None:
            self._counted = count
        elif count != self._counted:
            self._suspect(found, f"number of entries of {self._what}")
        if now >= self._due:
            self._compare(now, found)
        if now >= self._verify_at:
            self._verify_at = float("inf")
            self._suspect(found, f"check of {self._what} after changes")

    def _compare(self, now: float, found: Dict[str, str]) -> None:
        digest = self._measured()
        if self._digest is None:
            self._digest = digest
            pause = min(max(_VERIFY_SECONDS, _VERIFY_FACTOR * self._cost), _LONGEST_VERIFY_SECONDS)
            self._verify_at = min(self._verify_at, now + pause)
        elif digest != self._digest:
            self._suspect(found, f"contents of {self._what}")
        self._due = now + min(_COST_FACTOR * self._cost, _LONGEST_INTERVAL)

    def _measured(self) -> bytes:
        started = self._clock()
        digest = self._read()
        self._cost = self._clock() - started
        return digest

    def _suspect(self, found: Dict[str, str], reason: str) -> None:
        self._digest = self._counted = None
        for family in self._families:
            found.setdefault(family, reason)

    def settled(self, changed: bool, observed: bool) -> None:
        """See the base class."""
        if observed:
            self._digest, self._counted = self._measured(), self._count()
            self._verify_at = float("inf")
        elif changed:
            self._digest = self._counted = None


def sets_content(handles: KernelHandles, families: Sequence[str]) -> Callable[[], bytes]:
    """A function that gives a digest of all our ipsets and their elements."""
    names = frozenset(name for family in families for name in definitions(family))
    return lambda: handles.ipset.content_digest(names)
