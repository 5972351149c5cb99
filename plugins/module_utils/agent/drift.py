# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Noticing that somebody else changed what the agent programmed, in whatever way the mode's subsystems allow.

nf_tables (nftables mode, and iptables-nft) and routing netlink send notifications. IPVS and ipset have none: their
contents are read and compared every second, at longer intervals where reading takes long. For legacy iptables see
``legacy_tables``. Noticing only makes a family suspect: the agent then observes it and repairs what differs.
"""

from __future__ import annotations

import errno
import hashlib
import re
import socket
import struct
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..addresses import IPV4, IPV6, unpacked
from ..configuration.model import IPVS, NFTABLES
from ..convergence.handles import KernelHandles
from ..dataplane.ipvs import model as ipvs
from ..dataplane.ipvs.entries import is_link_local
from ..dataplane.ipvs.sets import definitions
from ..errors import KernelError
from ..kernel.ipvs import PROC_TABLE
from ..kernel.netlink import HEADER, NETLINK_NETFILTER, NETLINK_ROUTE, SOL_NETLINK, attribute_text, parse_attributes
from ..kernel.nftables.monitor import TableMonitor
from ..kernel.nftables.resource import NftablesResource
from ..kernel.xtables.chains import ChainsResource
from ..kernel.xtables.variant import LEGACY
from .family import FamilyProxy
from .legacy_tables import LegacyTables, LockWatch
from .log import Log

_XTABLES_TABLES = ("mangle", "filter", "nat")
_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 1.0, 1.7
# Reading and comparing takes at most about one percent of a processor, as long as the longest interval allows.
_COST_FACTOR = 100.0
_VERIFY_SECONDS = 5.0
# A burst of changes (iptables -F, ipvsadm -C) is waited for, and then repaired at once.
_SETTLE_SECONDS = 0.1

_BUFFER_BYTES = 1 << 20
_RECEIVE_BUFFER_BYTES = 8 << 20
_SO_RCVBUFFORCE = 33
_ADD_MEMBERSHIP = 1
_GROUP_NFTABLES = 7
_NFTABLES_SUBSYSTEM = 10
_NEW_TABLE, _DELETE_TABLE, _NEW_GENERATION = 0, 2, 15
_GENERATION_PROCESS = 2
_TABLE_NAME = 1
_FAMILIES: Dict[int, str] = {socket.AF_INET: IPV4, socket.AF_INET6: IPV6}

_RTM_DELLINK, _RTM_NEWADDR, _RTM_DELADDR = 17, 20, 21
_ROUTE_GROUPS = 1 << 0 | 1 << 4 | 1 << 8  # RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR
_ADDRESS = struct.Struct("=BBBBI")
_LINK_BYTES = 16
_IFLA_IFNAME, _IFA_ADDRESS, _IFA_LOCAL = 3, 1, 2


class Found(NamedTuple):
    """Families that need to be observed, each with the reason; whether addresses of the node changed."""

    suspects: Dict[str, str]
    addresses: bool


class Events:
    """A netlink socket that only listens; ``lost`` tells that the kernel could not keep up with us."""

    def __init__(self, protocol: int, groups: int = 0, membership: int = 0) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._socket.bind((0, groups))
        if membership:
            self._socket.setsockopt(SOL_NETLINK, _ADD_MEMBERSHIP, membership)
        self._buffer = bytearray(_BUFFER_BYTES)
        self.lost = False

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def read(self) -> List[Tuple[int, memoryview]]:
        """The messages that came in: type and payload, each to be kept as long as one likes."""
        found: List[Tuple[int, memoryview]] = []
        while True:
            try:
                size = self._socket.recv_into(self._buffer)
            except (BlockingIOError, InterruptedError):
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise KernelError(f"notifications of the kernel: {error.strerror}") from error
                self.lost = True
                continue
            data = memoryview(bytes(self._buffer[:size]))
            offset = 0
            while offset + HEADER.size <= size:
                length, kind, _flags, _sequence, _port = HEADER.unpack_from(data, offset)
                if length < HEADER.size:
                    break
                found.append((kind, data[offset + HEADER.size : offset + length]))
                offset += (length + 3) & ~3


class Watch:
    """One way of noticing. ``interval``: seconds between calls of :meth:`look`, 0 if its descriptor tells."""

    interval = 0.0

    def fileno(self) -> int:
        """A descriptor that becomes readable when there is something to look at; -1 if there is none."""
        return -1

    def look(self, found: Dict[str, str]) -> None:
        """Add families that need to be observed. Raises KernelError."""

    def settled(self, changed: bool, observed: bool) -> None:
        """A sync has ended: did we change something (``changed``), has everything been observed (``observed``)."""

    def close(self) -> None:
        """Stop."""


class NftablesWatch(Watch):
    """nftables mode: notifications about our tables that do not come from our sockets."""

    def __init__(self, families: Sequence[FamilyProxy]) -> None:
        resources = [stage.resource for family in families for stage in family.stages]
        self._ports = [item for item in resources if isinstance(item, NftablesResource)]
        self._monitor = TableMonitor(item.port for item in self._ports)

    def fileno(self) -> int:
        """See the base class."""
        return self._monitor.fileno()

    def look(self, found: Dict[str, str]) -> None:
        """See the base class."""
        for family in self._monitor.changes():
            found.setdefault(family, "notification of nf_tables")

    def close(self) -> None:
        """See the base class."""
        self._monitor.close()


class XtablesNftWatch(Watch):
    """iptables-nft: transactions of other processes than our restore programs that have to do with chains of ours."""

    def __init__(self, resources: Sequence[ChainsResource]) -> None:
        self._resources = list(resources)
        self._families = {resource.variant.family for resource in resources}
        self._events = Events(NETLINK_NETFILTER, membership=_GROUP_NFTABLES)
        self._touched: Set[str] = set()

    def fileno(self) -> int:
        """See the base class."""
        return self._events.fileno()

    def look(self, found: Dict[str, str]) -> None:
        """See the base class. What a transaction changed comes first, then the process that made it."""
        for kind, payload in self._events.read():
            if kind >> 8 != _NFTABLES_SUBSYSTEM:
                continue
            number = kind & 0xFF
            if number == _NEW_GENERATION:
                attributes = parse_attributes(payload, 4, len(payload))
                process = int.from_bytes(attributes.get(_GENERATION_PROCESS, b""), "big")
                if not any(process in resource.processes for resource in self._resources):
                    for family in self._touched:
                        found.setdefault(family, "notification of nf_tables")
                self._touched.clear()
            elif self._concerns_us(number, payload):
                self._touched.add(_FAMILIES[payload[0]])
        if self._events.lost:
            self._events.lost = False
            for family in self._families:
                found.setdefault(family, "lost notifications of nf_tables")

    def _concerns_us(self, number: int, payload: memoryview) -> bool:
        if _FAMILIES.get(payload[0]) not in self._families:
            return False
        if number in (_NEW_TABLE, _DELETE_TABLE):
            attributes = parse_attributes(payload, 4, len(payload))
            return number == _DELETE_TABLE and attribute_text(attributes[_TABLE_NAME]) in _XTABLES_TABLES
        # Names of our chains, and jumps to them from chains of others, all have this in them.
        return b"KUBE-" in bytes(payload)

    def close(self) -> None:
        """See the base class."""
        self._events.close()


class LegacyWatch(Watch):
    """Legacy iptables: see ``legacy_tables``."""

    interval = _SHORTEST_INTERVAL

    def __init__(self, families: Sequence[str]) -> None:
        self._tables = {family: LegacyTables(family, _XTABLES_TABLES) for family in families}
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


class AddressWatch(Watch):
    """Routing netlink: addresses of the node, and in ipvs mode the dummy device and its addresses."""

    def __init__(self, families: Sequence[FamilyProxy], with_device: bool) -> None:
        self._families = {family.family: family for family in families} if with_device else {}
        self._events = Events(NETLINK_ROUTE, groups=_ROUTE_GROUPS)
        self.changed = False

    def fileno(self) -> int:
        """See the base class."""
        return self._events.fileno()

    def look(self, found: Dict[str, str]) -> None:
        """See the base class. ``changed`` tells afterwards whether other addresses of the node changed."""
        messages = self._events.read()
        device = _index_of(ipvs.DEVICE) if messages and self._families else 0
        for kind, payload in messages:
            if kind == _RTM_DELLINK and self._families:
                attributes = parse_attributes(payload, _LINK_BYTES, len(payload))
                if _IFLA_IFNAME in attributes and attribute_text(attributes[_IFLA_IFNAME]) == ipvs.DEVICE:
                    for name in self._families:
                        found.setdefault(name, "notification of routing netlink")
            elif kind in (_RTM_NEWADDR, _RTM_DELADDR):
                self._address(kind, payload, device, found)
        if self._events.lost:
            self._events.lost = False
            self.changed = True
            for name in self._families:
                found.setdefault(name, "lost notifications of routing netlink")

    def _address(self, kind: int, payload: memoryview, device: int, found: Dict[str, str]) -> None:
        number, _length, _flags, _scope, index = _ADDRESS.unpack_from(payload)
        family = self._families.get(_FAMILIES.get(number, ""))
        if index != device or not device:
            self.changed = True
            return
        attributes = parse_attributes(payload, _ADDRESS.size, len(payload))
        raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
        if family is None or raw is None:
            return
        address = unpacked(bytes(raw))
        wanted = address in family.tables.desired[ipvs.ADDRESSES]
        if not is_link_local(address) and wanted != (kind == _RTM_NEWADDR):
            found.setdefault(family.family, "notification of routing netlink")

    def close(self) -> None:
        """See the base class."""
        self._events.close()


def _index_of(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def _sets_content(handles: KernelHandles, families: Sequence[str]) -> Callable[[], bytes]:
    names = [name for family in families for name in definitions(family)]

    def read() -> bytes:
        found = hashlib.blake2b(digest_size=16)
        for name in names:
            found.update(handles.ipset.content_digest(name))
        return found.digest()

    return read


class DriftWatch:
    """Everything that is watched in one mode. Wait for :meth:`filenos` and :meth:`delay`, then :meth:`look`."""

    def __init__(self, mode: str, families: Sequence[FamilyProxy], handles: KernelHandles, log: Log) -> None:
        self._log = log
        self._addresses = AddressWatch(families, mode == IPVS)
        self._watches: List[Watch] = [self._addresses]
        self._due: Dict[Watch, float] = {}
        self._suspects: Dict[str, str] = {}
        self._ripe = 0.0
        names = [family.family for family in families]
        if mode == NFTABLES:
            self._watches.append(NftablesWatch(families))
        else:
            self._watch_chains(families)
        if mode == IPVS:
            self._watches.append(PollWatch("IPVS", names, ServersContent()))
            self._watches.append(PollWatch("ipsets", names, _sets_content(handles, names)))

    def _watch_chains(self, families: Sequence[FamilyProxy]) -> None:
        resources = [stage.resource for family in families for stage in family.stages]
        chains = [item for item in resources if isinstance(item, ChainsResource)]
        legacy = [item for item in chains if item.variant.name == LEGACY]
        others = [item for item in chains if item.variant.name != LEGACY]
        if others:
            self._watches.append(XtablesNftWatch(others))
        if legacy:
            self._watches.append(LegacyWatch([item.variant.family for item in legacy]))

    def filenos(self) -> List[int]:
        """Descriptors to wait for."""
        return [number for number in (watch.fileno() for watch in self._watches) if number >= 0]

    def delay(self, now: float) -> float:
        """Seconds until :meth:`look` should be called even if nothing becomes readable."""
        times = list(self._due.values())
        if self._suspects:
            times.append(self._ripe)
        times += [now for watch in self._watches if watch.interval and watch not in self._due]
        return max(0.0, min(times) - now) if times else float("inf")

    def look(self, now: float) -> Found:
        """What has been noticed; suspicions are given out when the burst that raised them is over."""
        fresh: Dict[str, str] = {}
        for watch in self._watches:
            if watch.interval and now < self._due.get(watch, 0.0) and watch.fileno() < 0:
                continue
            try:
                watch.look(fresh)
            except KernelError as error:
                self._log.warning("the kernel cannot be watched", error=error)
            if watch.interval:
                self._due[watch] = now + watch.interval
        if fresh and not self._suspects:
            self._ripe = now + _SETTLE_SECONDS
        for family, reason in fresh.items():
            self._suspects.setdefault(family, reason)
        addresses, self._addresses.changed = self._addresses.changed, False
        if not self._suspects or now < self._ripe:
            return Found({}, addresses)
        ripe, self._suspects = self._suspects, {}
        return Found(ripe, addresses)

    def settled(self, changed: bool, observed: bool) -> None:
        """A sync has ended well. ``changed``: we changed something; ``observed``: the whole kernel was looked at."""
        for watch in self._watches:
            try:
                watch.settled(changed, observed)
            except KernelError as error:
                self._log.warning("the kernel cannot be watched", error=error)

    def close(self) -> None:
        """Stop watching."""
        for watch in self._watches:
            watch.close()
