# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Removal of stale connection tracking entries, over nfnetlink (ctnetlink).

A UDP flow keeps the endpoint that received its first packet for as long as packets keep coming, even after that
endpoint was removed. So after endpoints changed, entries of served addresses that lead to anything but a serving
endpoint are deleted (kube-proxy 1.36, which does so for UDP alone; see ``serviceports.flows``).

Tables with a million entries are expected: addresses remain bytes, only the fields that decide are read from each
entry, and the request selects one protocol (CTA_FILTER, kernel 5.8; older kernels return all entries).
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Collection, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Type

from ..addresses import IPV6, packed
from ..configuration.behaviour import Behaviour
from ..errors import KernelError
from ..resources import Progress, unheeded
from ..serviceports.flows import Frontend, examined_protocols, frontends_of
from ..serviceports.info import ServicePortInfo
from .netlink.attributes import attribute, each_attribute, nested, parse_attributes
from .netlink.protocol import NETLINK_NETFILTER, Message
from .netlink.socket import DumpInterrupted, NetlinkSocket
from .outcomes import MessageError, NetlinkRefusal, is_interrupted, is_missing, is_not_understood

_GET, _DELETE = 0x0101, 0x0102
_TUPLE_ORIG, _TUPLE_REPLY, _ID, _ZONE, _FILTER = 1, 2, 12, 18, 25
_TUPLE_IP, _TUPLE_PROTO, _PROTO_NUM = 1, 2, 1
_FILTER_ORIG_FLAGS, _FILTER_PROTO_NUM = 1, 1 << 3
_NFGENMSG = struct.Struct("=BBH")
_ATTEMPTS = 5
_PROTOCOLS = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP, "SCTP": socket.IPPROTO_SCTP}

# A tuple as the kernel writes it: CTA_TUPLE_IP (source, destination), CTA_TUPLE_PROTO (number, source port, destination
# port). Fields: length and type of the whole, then type and value of each part.
_TUPLE_V4 = struct.Struct("=HH4x2xH4s2xH4s4x2xHB3x2xH2s2x2xH2s2x")
_TUPLE_V6 = struct.Struct("=HH4x2xH16s2xH16s4x2xHB3x2xH2s2x2xH2s2x")
_TYPES_V4, _TYPES_V6 = (1, 2, 1, 2, 3), (3, 4, 1, 2, 3)
_TYPE_MASK = 0x3FFF


class RawEntry(NamedTuple):
    """An entry: the client's destination and the replying source, as address and port in network order.

    ``view``, ``start`` and ``end`` delimit its message in a buffer that is only valid until the next entry is read.
    """

    destination: bytes
    reply_source: bytes
    view: memoryview
    start: int
    end: int


class Frontends(NamedTuple):
    """The frontends of one protocol and their serving endpoints; addresses and ports as bytes in network order.

    ``addresses`` maps address and port to endpoints, ``node_ports`` a port on any address. A frontend without endpoints
    makes entries stale whose destination was rewritten.
    """

    addresses: Dict[bytes, Set[bytes]]
    node_ports: Dict[bytes, Set[bytes]]

    def is_stale(self, destination: bytes, reply_source: bytes) -> bool:
        """Return whether this source must not reply to a flow to this destination."""
        endpoints = self.addresses.get(destination)
        if endpoints is None:
            endpoints = self.node_ports.get(destination[-2:])
        if endpoints is None or reply_source in endpoints:
            return False
        return bool(endpoints) or reply_source != destination


def _place(address: str, port: int) -> bytes:
    return (packed(address) or b"") + port.to_bytes(2, "big")


def frontends(
    protocol: str,
    service_ports: Iterable[ServicePortInfo],
    released: Iterable[Frontend] = (),
    without_endpoints: bool = False,
) -> Frontends:
    """Return the frontends of the ServicePorts of a protocol, all of one family, and those that were ``released``.

    ServicePorts without a serving endpoint are omitted, so their entries are kept, unless ``without_endpoints``;
    readiness, policies, topology and termination do not matter.
    """
    found = Frontends({}, {})
    for info in service_ports:
        if info.key.protocol != protocol:
            continue
        serving = {_place(endpoint.ip, endpoint.port) for endpoint in info.endpoints if endpoint.serving}
        if serving or without_endpoints:
            for frontend in frontends_of(info):
                _add(found, frontend, serving)
    for frontend in released:
        if frontend.protocol == protocol:
            _add(found, frontend, set())
    return found


def _add(found: Frontends, frontend: Frontend, serving: Set[bytes]) -> None:
    if frontend.address:
        found.addresses.setdefault(_place(frontend.address, frontend.port), set()).update(serving)
    else:
        found.node_ports.setdefault(frontend.port.to_bytes(2, "big"), set()).update(serving)


def stale_entries(entries: Iterable[RawEntry], known: Frontends) -> Iterator[RawEntry]:
    """Yield the entries that lead to anything but a serving endpoint."""
    addresses, node_ports, is_stale = known.addresses, known.node_ports, known.is_stale
    for entry in entries:
        destination = entry[0]
        endpoints = addresses.get(destination)
        if endpoints is None:
            endpoints = node_ports.get(destination[-2:])
        if endpoints is not None and entry[1] not in endpoints and is_stale(destination, entry[1]):
            yield entry


def parse_tuple(view: memoryview, start: int, end: int) -> Optional[Tuple[int, bytes, bytes]]:
    """Return protocol, source and destination place from attributes in any order; None without addresses and ports."""
    parts = parse_attributes(view, start, end)
    if _TUPLE_IP not in parts or _TUPLE_PROTO not in parts:
        return None
    addresses = [bytes(value) for _kind, value in sorted(_pairs(parts[_TUPLE_IP]))]
    proto = parse_attributes(parts[_TUPLE_PROTO], 0, len(parts[_TUPLE_PROTO]))
    if len(addresses) != 2 or not {1, 2, 3} <= set(proto):
        return None
    return proto[1][0], addresses[0] + bytes(proto[2]), addresses[1] + bytes(proto[3])


def _pairs(view: memoryview) -> List[Tuple[int, bytes]]:
    return [(kind, bytes(value)) for kind, value in each_attribute(view, 0, len(view))]


def read_entry(view: memoryview, start: int, end: int, ipv6: bool, wanted: str = "UDP") -> Optional[RawEntry]:
    """Parse a ctnetlink message (from ``struct nfgenmsg`` on) as an entry of a protocol; None for other protocols."""
    number = _PROTOCOLS[wanted]
    layout, types = (_TUPLE_V6, _TYPES_V6) if ipv6 else (_TUPLE_V4, _TYPES_V4)
    size = layout.size
    offset = start + 4
    if offset + 2 * size <= end:
        length, kind, t1, _source, t2, destination, t3, protocol, t4, _port, t5, port = layout.unpack_from(view, offset)
        if (t1, t2, t3, t4, t5) == types and kind & _TYPE_MASK == _TUPLE_ORIG:
            if protocol != number:
                return None
            second = offset + ((length + 3) & ~3)
            if second + size <= end:
                _length, kind, t1, source, t2, _to, t3, _protocol, t4, source_port, t5, _to_port = layout.unpack_from(
                    view, second
                )
                if (t1, t2, t3, t4, t5) == types and kind & _TYPE_MASK == _TUPLE_REPLY:
                    return RawEntry(destination + port, source + source_port, view, start, end)
    return _read_slowly(view, start, end, number)


def _read_slowly(view: memoryview, start: int, end: int, number: int) -> Optional[RawEntry]:
    """Parse a message whose attributes come in an unexpected order."""
    found = parse_attributes(view, start + 4, end)
    if _TUPLE_ORIG not in found or _TUPLE_REPLY not in found:
        return None
    original = parse_tuple(found[_TUPLE_ORIG], 0, len(found[_TUPLE_ORIG]))
    reply = parse_tuple(found[_TUPLE_REPLY], 0, len(found[_TUPLE_REPLY]))
    if original is None or reply is None or original[0] != number:
        return None
    return RawEntry(original[2], reply[1], view, start, end)


def identity(entry: RawEntry) -> bytes:
    """Return the attributes that identify exactly this entry for deletion: original tuple, zone and the kernel's id."""
    found = parse_attributes(entry.view, entry.start + 4, entry.end)
    parts = [nested(_TUPLE_ORIG, bytes(found[_TUPLE_ORIG]))]
    parts += [attribute(kind, bytes(found[kind])) for kind in (_ZONE, _ID) if kind in found]
    return b"".join(parts)


class ConntrackSocket:
    """A connection to connection tracking in the calling thread's network namespace; a context manager.

    ``progress`` is called while a large table is read. Raises KernelError if no socket can be opened.
    """

    def __init__(self, progress: Progress = unheeded) -> None:
        self._netlink = NetlinkSocket(NETLINK_NETFILTER)
        self._netlink.progress = progress

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        self._netlink.close()

    def __enter__(self) -> ConntrackSocket:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Any) -> None:
        self.close()

    def entries(self, family: str, protocol: str) -> Iterator[RawEntry]:
        """Yield the entries of a family and protocol as they arrive; the caller must read them to the end.

        Raises DumpInterrupted at the end if the table changed meanwhile, and KernelError.
        """
        ipv6 = family == IPV6
        number = socket.AF_INET6 if ipv6 else socket.AF_INET
        head = _NFGENMSG.pack(number, 0, 0)
        only = nested(_TUPLE_ORIG, nested(_TUPLE_PROTO, attribute(_PROTO_NUM, bytes((_PROTOCOLS[protocol],)))))
        only += nested(_FILTER, attribute(_FILTER_ORIG_FLAGS, struct.pack("=I", _FILTER_PROTO_NUM)))
        for payload in (head + only, head):
            try:
                for view, _kind, start, end in self._netlink.dump_stream(_GET, payload):
                    entry = read_entry(view, start, end, ipv6, protocol)
                    if entry is not None:
                        yield entry
                return
            except NetlinkRefusal as refusal:
                if payload is head or not is_not_understood(refusal.error):
                    raise KernelError(f"connection tracking table cannot be read: {refusal.error}") from refusal

    def stale(self, family: str, protocol: str, known: Frontends) -> List[bytes]:
        """Return identities of the stale entries. A dump interrupted too often is used as it is. Raises KernelError."""
        found: List[bytes] = []
        if not known.addresses and not known.node_ports:
            return found
        for _attempt in range(_ATTEMPTS):
            found = []
            try:
                for entry in stale_entries(self.entries(family, protocol), known):
                    found.append(identity(entry))
                break
            except DumpInterrupted:
                continue
        return found

    def delete(self, family: str, identities: Sequence[bytes]) -> int:
        """Delete entries in batches and return how many of them existed. Raises KernelError."""
        head = _NFGENMSG.pack(socket.AF_INET6 if family == IPV6 else socket.AF_INET, 0, 0)
        messages: List[Message] = [(_DELETE, 0, head + wanted) for wanted in identities]
        deleted = 0
        for attempt in range(_ATTEMPTS):
            errors = self._netlink.transact(messages).errors
            deleted += len(messages) - len(errors)
            again = self._to_repeat(errors, last=attempt == _ATTEMPTS - 1)
            if not again:
                break
            messages = [messages[position] for position in again]
        return deleted

    @staticmethod
    def _to_repeat(errors: Sequence[MessageError], last: bool) -> List[int]:
        """Return positions of interrupted deletions; entries that ended meanwhile are ignored."""
        again = []
        for error in errors:
            if is_interrupted(error) and not last:
                again.append(error.position)
            elif not is_missing(error):
                raise KernelError(f"a connection tracking entry cannot be deleted: {error}")
        return again


def delete_stale(
    sock: ConntrackSocket,
    family: str,
    service_ports: Collection[ServicePortInfo],
    behaviour: Behaviour,
    released: Collection[Frontend] = (),
) -> int:
    """Delete the stale entries of ServicePorts, and of addresses that were ``released``, all of one family.

    Return their number. Raises KernelError.
    """
    deleted = 0
    examined = examined_protocols(behaviour)
    for protocol in dict.fromkeys((*examined, *(item.protocol for item in released))):
        # TCP connections through a Service that exists are kept: see ``endConnectionsOfDeletedServices``.
        ports = service_ports if protocol in examined else ()
        known = frontends(protocol, ports, released, behaviour.stale_flows_end)
        deleted += sock.delete(family, sock.stale(family, protocol, known))
    return deleted
