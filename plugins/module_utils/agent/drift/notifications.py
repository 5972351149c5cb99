# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Noticing foreign changes by what the kernel notifies: nf_tables and routing netlink."""

from __future__ import annotations

import errno
import socket
import struct
from typing import Dict, Iterable, List, Sequence, Set, Tuple

from ...addresses import IPV4, IPV6, unpacked
from ...errors import KernelError
from ...kernel.netlink import HEADER, NETLINK_NETFILTER, NETLINK_ROUTE, SOL_NETLINK, attribute_text, parse_attributes
from ...kernel.nftables.monitor import TableMonitor, author
from ...kernel.nftables.resource import NftablesResource
from ...kernel.xtables.chains import ChainsResource
from ...rendering.ipvs import model as ipvs
from ...rendering.ipvs.entries import is_link_local
from ..sync.proxier import Proxier

XTABLES_TABLES = ("mangle", "filter", "nat")
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


def suspect(found: Dict[str, str], families: Iterable[str], reason: str) -> None:
    """Add families that need to be observed, unless there is a reason already."""
    for family in families:
        found.setdefault(family, reason)


def _by(reason: str, program: str) -> str:
    return f"{reason} ({program})" if program else reason


class NftablesWatch(Watch):
    """nftables mode: notifications about our tables that do not come from our sockets."""

    def __init__(self, families: Sequence[Proxier]) -> None:
        resources = [stage.resource for family in families for stage in family.stages]
        self._ports = [item for item in resources if isinstance(item, NftablesResource)]
        self._monitor = TableMonitor(item.port for item in self._ports)

    def fileno(self) -> int:
        """See the base class."""
        return self._monitor.fileno()

    def look(self, found: Dict[str, str]) -> None:
        """See the base class."""
        changed = self._monitor.changes()
        suspect(found, changed, _by("notification of nf_tables", self._monitor.author))

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
                    suspect(found, self._touched, _by("notification of nf_tables", author(attributes)))
                self._touched.clear()
            elif self._concerns_us(number, payload):
                self._touched.add(_FAMILIES[payload[0]])
        if self._events.lost:
            self._events.lost = False
            suspect(found, self._families, "lost notifications of nf_tables")

    def _concerns_us(self, number: int, payload: memoryview) -> bool:
        if _FAMILIES.get(payload[0]) not in self._families:
            return False
        if number in (_NEW_TABLE, _DELETE_TABLE):
            attributes = parse_attributes(payload, 4, len(payload))
            return number == _DELETE_TABLE and attribute_text(attributes[_TABLE_NAME]) in XTABLES_TABLES
        # Names of our chains, and jumps to them from chains of others, all have this in them.
        return b"KUBE-" in bytes(payload)

    def close(self) -> None:
        """See the base class."""
        self._events.close()


class AddressWatch(Watch):
    """Routing netlink: addresses of the node, and in ipvs mode the dummy device and its addresses."""

    def __init__(self, families: Sequence[Proxier], with_device: bool) -> None:
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
                    suspect(found, self._families, "notification of routing netlink")
            elif kind in (_RTM_NEWADDR, _RTM_DELADDR):
                self._address(kind, payload, device, found)
        if self._events.lost:
            self._events.lost = False
            self.changed = True
            suspect(found, self._families, "lost notifications of routing netlink")

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
