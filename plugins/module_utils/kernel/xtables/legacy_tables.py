# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detect changes of legacy iptables tables: by counters of the kernel, and by uses of the lock file.

The kernel sends no notifications about these tables. The number of entries and the size of a table cost almost nothing
to query, and reveal every deletion and most modifications; the others are found by comparing contents whenever a
program has used the lock that all iptables programs take, and at longer intervals without that. Reading the contents
takes two thirds of the time of a restore, so they are not read after each of our own changes (see LegacyTables).

Source: linux/netfilter_ipv4/ip_tables.h, inotify(7).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import struct
import time
from array import array
from typing import Callable, Iterator, Mapping, Optional, Sequence

from ...base.addresses import IPV6
from ..raw_sockets import kernel_copy, raw_socket
from .lock import lock_file

_GET_INFO, _GET_ENTRIES = 64, 65
_NAME_BYTES = 32
_INFO_BYTES = 84
_ENTRIES_HEAD = 40
# The end of struct ipt_getinfo: number of entries, size of all entries.
_NUMBER_AND_SIZE = struct.Struct("=II")
_SIZE = struct.Struct("=I")
_OFFSETS = struct.Struct("=HH")
_IN_CLOSE, _IN_OVERFLOW = 0x8 | 0x10, 0x4000
# The start of struct inotify_event: watch, mask, cookie, bytes of the name that follows.
_EVENT = struct.Struct("=iIII")
# Comparing contents without a reason takes at most a thousandth of a processor.
_COST_FACTOR, _LONGEST_PAUSE = 1000.0, 120.0
# The pause between two comparisons because of the lock, in multiples of the time that reading takes.
_USE_FACTOR = 5.0
# Quiet time after our changes before contents are read, in multiples of the read time. Where that is not noticeable,
# they are read at once.
_QUIET_FACTOR, _AT_ONCE_SECONDS = 20.0, 0.2
# Seconds after our own changes until everything is observed.
_VERIFY_SECONDS = 120.0

_libc = ctypes.CDLL(None, use_errno=True)


class TableReader:
    """Reads the kernel's copy of the tables of one family, through a raw socket.

    Raises KernelError if the system gives none.
    """

    def __init__(self, family: str) -> None:
        ipv6 = family == IPV6
        self._level = socket.IPPROTO_IPV6 if ipv6 else socket.IPPROTO_IP
        # The positions of the offsets, and then of the counters, in an entry: struct ipt_entry and struct ip6t_entry.
        self._offsets_at, self._volatile_at, self._matches_at = (140, 144, 168) if ipv6 else (88, 92, 112)
        kind = socket.AF_INET6 if ipv6 else socket.AF_INET
        self._socket = raw_socket(kind)
        # Per table, the positions of volatile data in the entries; valid as long as no entry moves.
        self._volatile: dict[str, array[int]] = {}

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def info(self, table: str) -> bytes:
        """Return hooks, number of entries and size of a table, as the kernel packs them; empty if it cannot be read."""
        request = table.encode().ljust(_NAME_BYTES, b"\0")
        return bytes(kernel_copy(self._socket, self._level, _GET_INFO, request, _INFO_BYTES) or b"")

    def digest(self, table: str) -> bytes:
        """Return a digest of a table's rules without their counters; empty if it cannot be read."""
        blob = self._entries(table)
        return b"" if blob is None else self._digest_of(table, blob)

    def mentions(self, table: str, chain: str) -> bool:
        """Return whether the table has a chain of that name; False if it cannot be read."""
        return b"\0" + chain.encode() + b"\0" in (self._entries(table) or b"")

    def chain_beginning(self, table: str, prefix: str) -> str:
        """Return the name of a chain of the table that begins so; empty if there is none or it cannot be read."""
        entries = self._entries(table) or b""
        start = entries.find(b"\0" + prefix.encode()) + 1
        return entries[start : entries.index(b"\0", start)].decode("ascii", "replace") if start else ""

    def _entries(self, table: str) -> Optional[bytearray]:
        info = self.info(table)
        if not info:
            return None
        _number, size = _NUMBER_AND_SIZE.unpack_from(info, _INFO_BYTES - _NUMBER_AND_SIZE.size)
        head = table.encode().ljust(_NAME_BYTES, b"\0") + _SIZE.pack(size)
        return kernel_copy(self._socket, self._level, _GET_ENTRIES, head, _ENTRIES_HEAD + size)

    def forget(self) -> None:
        """Forget the positions of entries, which may have moved; they are computed again."""
        self._volatile.clear()

    def _digest_of(self, table: str, blob: bytearray) -> bytes:
        """Return the digest; entries that have not moved are blanked without parsing, in a fraction of the time."""
        places = self._volatile.get(table)
        if places is None:
            places = self._volatile[table] = self._find_volatile(blob)
        size = self._matches_at - self._volatile_at
        blank = bytes(size)
        for start in places:
            blob[start : start + size] = blank
        return hashlib.blake2b(memoryview(blob)[_ENTRIES_HEAD:], digest_size=16).digest()

    def _find_volatile(self, blob: bytearray) -> array[int]:
        found = array("I")
        start, unpack = _ENTRIES_HEAD, _OFFSETS.unpack_from
        while start + self._matches_at <= len(blob):
            _target, length = unpack(blob, start + self._offsets_at)
            if not length:
                break
            found.append(start + self._volatile_at)
            start += length
        return found


class LockWatch:
    """Reports by inotify when a program has released the xtables lock file.

    The file may be created only later, or replaced: what matters is the one that the path names. One that it no longer
    names remains watched until it is deleted and its last user has closed it.
    """

    def __init__(self, path: Optional[str] = None) -> None:
        self._path = path or lock_file()
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        #: The number of the watch on the file, -1 if there is none. The kernel does not soon use a number again.
        self._watch = -1
        self._follow()

    def fileno(self) -> int:
        """Return the descriptor to wait for; -1 without inotify."""
        return int(self._descriptor)

    def used(self) -> bool:
        """Return whether the lock was used since the last call, without waiting."""
        if self._descriptor < 0:
            return False
        # A file may have been used before it was watched, most likely by the program that created it.
        is_new = self._follow()
        return self._read_uses() or is_new

    def _follow(self) -> bool:
        """Watch the file that the path names now; return whether that is another one than before."""
        before, path = self._watch, os.fsencode(self._path)
        # The answer for a file that is watched already is the number of its watch.
        self._watch = int(_libc.inotify_add_watch(self._descriptor, path, ctypes.c_uint32(_IN_CLOSE)))
        return self._watch not in (-1, before)

    def _read_uses(self) -> bool:
        """Read all events; return whether one is a use of the lock, or may have been lost."""
        found = False
        while True:
            try:
                events = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return found
            found = any(mask & (_IN_CLOSE | _IN_OVERFLOW) for mask in _masks(events)) or found

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _masks(events: bytes) -> Iterator[int]:
    """Yield the mask of each inotify event."""
    start = 0
    while start < len(events):
        _watch, mask, _cookie, name = _EVENT.unpack_from(events, start)
        yield mask
        start += _EVENT.size + name


def number_of_entries(info: bytes) -> int:
    """Return the number of entries in the answer of :meth:`TableReader.info`; 0 if it is empty.

    Each rule is one entry, and each chain of its own has two more.
    """
    return int(_NUMBER_AND_SIZE.unpack_from(info, _INFO_BYTES - _NUMBER_AND_SIZE.size)[0]) if info else 0


class LegacyTables:
    """The tables of one family, and whether another program may have changed them.

    Contents are compared when the lock was used, and also at intervals: a program in a container may have a lock of
    its own. After our own changes of large tables only the numbers of entries are checked, which follow from the
    change; the contents are read when these changes pause. Until then, any use of the lock makes the tables suspect. A
    change that another program made without the lock before the contents were read is found by observing everything:
    two minutes after the first own change, the tables are suspect in any case.
    """

    def __init__(self, family: str, tables: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = TableReader(family)
        self._tables = tuple(tables)
        self._clock = clock
        self._infos: tuple[bytes, ...] = ()
        # None: our own changes have altered the contents since they were read.
        self._digests: Optional[tuple[bytes, ...]] = None
        self._used = False
        self._surprised = False
        self._cost = 0.0
        self._read_at = self._written_at = float("-inf")
        self._verify_at = float("inf")

    def close(self) -> None:
        """Close the socket."""
        self._reader.close()

    def changed(self, lock_used: bool) -> bool:
        """Return whether the tables must be observed, because another program has changed them or may have done so.

        The caller observes them afterwards. ``lock_used``: whether another program has used the lock.
        """
        if not self._infos:
            return False
        self._used = self._used or lock_used
        now = self._clock()
        if self._surprised or now >= self._verify_at or self._read_infos() != self._infos:
            self._read()
            return True
        used = self._used and now >= self._read_at + _USE_FACTOR * self._cost
        if self._digests is None:
            if used:
                self._read()
            elif not self._used and now >= self._written_at + _QUIET_FACTOR * self._cost:
                self._read_digests()
            return used
        if not used and now < self._read_at + min(_COST_FACTOR * self._cost, _LONGEST_PAUSE):
            return False
        before, self._used = self._digests, False
        # A change of other programs' own rules needs no repair and is reported only once.
        return self._read_digests() != before

    def synced(self, written: Optional[Mapping[str, int]], observed: bool) -> None:
        """Handle the end of a sync.

        ``written``: for each table that we have changed, how many entries it must have more than before; None if we
        have changed none. ``observed``: everything has been observed.
        """
        if observed:
            self._verify_at = float("inf")
        if not self._infos:
            self._read()
        elif written is not None:
            infos = self._read_infos()
            grown = [number_of_entries(now) - number_of_entries(was) for now, was in zip(infos, self._infos)]
            self._surprised |= grown != [written.get(table, 0) for table in self._tables]
            self._infos, self._digests = infos, None
            self._reader.forget()
            if not self._used and _QUIET_FACTOR * self._cost <= _AT_ONCE_SECONDS:
                self._read_digests()
        elif observed and self._digests is None:
            self._read()
        if written is not None:
            self._written_at = self._clock()
            self._verify_at = min(self._verify_at, self._written_at + _VERIFY_SECONDS)

    def _read_infos(self) -> tuple[bytes, ...]:
        return tuple(self._reader.info(table) for table in self._tables)

    def _read(self) -> None:
        """Read everything, before the tables are observed or just after it."""
        self._reader.forget()
        self._infos = self._read_infos()
        self._read_digests()
        self._used = self._surprised = False
        self._verify_at = float("inf")

    def _read_digests(self) -> tuple[bytes, ...]:
        started = self._clock()
        self._digests = tuple(self._reader.digest(table) for table in self._tables)
        self._read_at = self._clock()
        self._cost = self._read_at - started
        return self._digests
