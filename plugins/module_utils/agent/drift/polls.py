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

from ...convergence.handles import KernelHandles
from ...kernel.ipvs import PROC_TABLE
from ...kernel.xtables.legacy_tables import LegacyTables, LockWatch, kernel_copy
from ...rendering.ipvs.sets import definitions
from .notifications import XTABLES_TABLES, Watch, suspect

_SHORTEST_INTERVAL = 1.2
# Where something else tells of foreign changes.
_NOTIFIED_INTERVAL = 10.0
# Where nothing tells of foreign changes, reading and comparing contents may take a twentieth of a processor; where
# something does, it only finds what that has missed, and may take a two-thousandth.
_ALONE, _BESIDE = (20.0, 15.0), (2000.0, 60.0)
# After changes of our own everything is compared; that costs about ten times as much as reading the content.
_VERIFY_SECONDS, _LONGEST_VERIFY_SECONDS, _VERIFY_FACTOR = 5.0, 60.0, 1000.0

#: IP_VS_SO_GET_INFO of linux/ip_vs.h; struct ip_vs_getinfo: version, size of the table, number of virtual servers.
_GET_INFO = 64 + 1024 + 64 + 1
_INFO_BYTES = 12
#: IP_VS_SO_GET_SERVICES: struct ip_vs_get_services, a number followed by an entry for each virtual server of IPv4.
_GET_SERVICES = _GET_INFO + 1
_SERVICES_HEAD = 8
#: struct ip_vs_service_entry in words of 8 bytes: what is configured, and after it the counters of traffic.
_ENTRY_WORDS, _CONFIGURED_WORDS = 13, 6
#: The connections of a real server, at the end of its line in /proc.
_COUNTS = re.compile(rb" +\d+ +\d+ *$", re.MULTILINE)


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


class ServersOutline:
    """A digest of all virtual servers of IPv4 with the number of their real servers, and the number of all others.

    It costs a hundredth of what reading all real servers does. Empty if the kernel does not tell.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)

    def __call__(self) -> bytes:
        """The digest now."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_IP, _GET_INFO, _INFO_BYTES)
        except OSError:
            return b""
        number = info[8:12]
        count = int.from_bytes(number, sys.byteorder)
        size = _SERVICES_HEAD + 8 * _ENTRY_WORDS * count
        entries = kernel_copy(self._socket, socket.IPPROTO_IP, _GET_SERVICES, number, size)
        found = hashlib.blake2b(number, digest_size=16)
        # No entries: their number has changed since it was asked for, or this kernel packs them otherwise.
        if entries is not None and count:
            words = memoryview(entries)[_SERVICES_HEAD:].cast("Q")
            for word in range(_CONFIGURED_WORDS):
                found.update(words[word::_ENTRY_WORDS].tobytes())
        return found.digest()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class PollWatch(Watch):
    """A content that is read again and again, as often as reading it costs little.

    ``outline``: something that tells of most changes and costs next to nothing, asked for every time. ``notified``:
    whether something else tells of foreign changes; then ``read`` only finds what that has missed. Without it, after
    changes of our own the content counts as right until it is verified.
    """

    def __init__(
        self,
        what: str,
        families: Sequence[str],
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

    def look(self, found: Dict[str, str]) -> None:
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
        """Seconds from one reading to the next."""
        factor, longest = _BESIDE if self._notified() else _ALONE
        return min(factor * self._cost, longest)

    def _compare(self, now: float, found: Dict[str, str]) -> None:
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

    def _suspect(self, found: Dict[str, str], reason: str) -> None:
        self._digest = self._outlined = None
        suspect(found, self._families, reason)

    def settled(self, changed: bool, observed: bool) -> None:
        """See the base class."""
        if observed:
            self._digest, self._outlined = self._measured(), self._outline()
            self._verify_at = float("inf")
        elif changed:
            self._digest = self._outlined = None


def sets_digest(handles: KernelHandles, families: Sequence[str], header_only: bool) -> Callable[[], bytes]:
    """A function that gives a digest of all our ipsets and their elements.

    With ``header_only`` it is of definitions, numbers of elements and memory sizes.
    """
    names = frozenset(name for family in families for name in definitions(family))
    return lambda: handles.ipset.content_digest(names, header_only)
