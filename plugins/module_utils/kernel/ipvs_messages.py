# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""IPVS generic netlink messages, written and read by us, and the text of /proc/net/ip_vs.

Payloads start with ``struct genlmsghdr``; the attributes are those of linux/ip_vs.h. What is fixed in a message is
packed once, so that a message costs little more than joining a few byte strings.
"""

from __future__ import annotations

import socket
import struct
from typing import Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ..addresses import IPV4, IPV6, packed, unpacked
from ..dataplane.ipvs.model import HASHED, RealServer, RealServerKey, VirtualServer, VirtualServerKey
from ..errors import KernelError
from .netlink import attribute, attribute_text, nested, parse_attributes, text_attribute

NEW_SERVICE, SET_SERVICE, DELETE_SERVICE, GET_SERVICE = 1, 2, 3, 4
NEW_DEST, SET_DEST, DELETE_DEST, GET_DEST = 5, 6, 7, 8
SET_CONFIG, GET_CONFIG = 12, 13

_VERSION = 1
_ATTR_SERVICE, _ATTR_DEST = 1, 2
_ATTR_TIMEOUT_TCP, _ATTR_TIMEOUT_TCP_FIN, _ATTR_TIMEOUT_UDP = 4, 5, 6

_SVC_AF, _SVC_PROTOCOL, _SVC_ADDR, _SVC_PORT, _SVC_FWMARK = 1, 2, 3, 4, 5
_SVC_SCHED_NAME, _SVC_FLAGS, _SVC_TIMEOUT, _SVC_NETMASK = 6, 7, 8, 9
_DEST_ADDR, _DEST_PORT, _DEST_FWD_METHOD, _DEST_WEIGHT, _DEST_U_THRESH, _DEST_L_THRESH = 1, 2, 3, 4, 5, 6
_DEST_ACTIVE, _DEST_INACTIVE, _DEST_ADDR_FAMILY = 7, 8, 11

PROTOCOLS: Dict[str, int] = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP, "sctp": socket.IPPROTO_SCTP}
_PROTOCOL_NAMES = {number: name for name, number in PROTOCOLS.items()}
FORWARDING: Dict[str, int] = {"masquerade": 0, "local": 1, "tunnel": 2, "route": 3, "bypass": 4}
_FORWARDING_NAMES = {number: name for name, number in FORWARDING.items()}
_FORWARDING_IN_PROC = {"Masq": "masquerade", "Local": "local", "Tunnel": "tunnel", "Route": "route", "Bypass": "bypass"}
TIMEOUTS: Dict[str, int] = {"tcp": _ATTR_TIMEOUT_TCP, "tcp_fin": _ATTR_TIMEOUT_TCP_FIN, "udp": _ATTR_TIMEOUT_UDP}

_U16 = struct.Struct("=H")
_U32 = struct.Struct("=I")
_PORT = struct.Struct("!H")
_NO_REST = bytes(12)


def header(command: int) -> bytes:
    """``struct genlmsghdr`` of an IPVS command."""
    return struct.pack("=BBH", command, _VERSION, 0)


def _u16(kind: int, value: int) -> bytes:
    return attribute(kind, _U16.pack(value))


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, _U32.pack(value))


def _address(text: str) -> Tuple[int, bytes]:
    """Address family and the 16 bytes of ``union nf_inet_addr``. Raises KernelError for bad text."""
    raw = packed(text)
    if raw is None:
        raise KernelError(f"{text!r} is not an IP address")
    return (socket.AF_INET, raw + _NO_REST) if len(raw) == 4 else (socket.AF_INET6, raw)


def _service_attributes(key: VirtualServerKey) -> bytes:
    family, address = _address(key.address)
    protocol = PROTOCOLS.get(key.protocol)
    if protocol is None:
        raise KernelError(f"virtual server {key}: protocol must be tcp, udp or sctp")
    return (
        _u16(_SVC_AF, family)
        + _u16(_SVC_PROTOCOL, protocol)
        + attribute(_SVC_ADDR, address)
        + attribute(_SVC_PORT, _PORT.pack(key.port))
    )


def service_identity(key: VirtualServerKey) -> bytes:
    """The attribute that names a virtual server. Raises KernelError if it cannot be one."""
    return nested(_ATTR_SERVICE, _service_attributes(key))


def service_settings(key: VirtualServerKey, value: VirtualServer) -> bytes:
    """The attribute that names a virtual server and gives its settings. Raises KernelError if they cannot be."""
    if ":" in key.address:
        netmask = _U32.pack(value.netmask)
    else:
        netmask = struct.pack("!I", (0xFFFFFFFF << (32 - value.netmask)) & 0xFFFFFFFF)
    return nested(
        _ATTR_SERVICE,
        _service_attributes(key),
        text_attribute(_SVC_SCHED_NAME, value.scheduler),
        attribute(_SVC_FLAGS, struct.pack("=II", value.flags, 0xFFFFFFFF)),
        _u32(_SVC_TIMEOUT, value.timeout),
        attribute(_SVC_NETMASK, netmask),
    )


_DEST_ADDRESS_HEAD = struct.pack("=HH", 20, _DEST_ADDR)
_DEST_PORT_HEAD = struct.pack("=HH", 6, _DEST_PORT)
_DEST_FAMILY = {
    length: b"\x00\x00" + _u16(_DEST_ADDR_FAMILY, family)
    for length, family in ((4, socket.AF_INET), (16, socket.AF_INET6))
}
_DEST_THRESHOLDS = _u32(_DEST_U_THRESH, 0) + _u32(_DEST_L_THRESH, 0)


class RealServerEncoder:
    """Writes messages about real servers, keeping what repeats: virtual servers, addresses and settings."""

    def __init__(self) -> None:
        self._server: Optional[VirtualServerKey] = None
        self._service = b""
        self._addresses: Dict[str, Tuple[bytes, bytes]] = {}
        self._settings: Dict[RealServer, bytes] = {}

    def identity(self, command: bytes, key: RealServerKey) -> bytes:
        """A message that names a real server; ``command`` is its ``header``. Raises KernelError for a bad key."""
        return self._encode(command, key, b"")

    def full(self, command: bytes, key: RealServerKey, value: RealServer) -> bytes:
        """A message that names a real server and gives its settings. Raises KernelError for a bad key or value."""
        settings = self._settings.get(value)
        if settings is None:
            method = FORWARDING.get(value.forwarding)
            if method is None:
                raise KernelError(f"real server {key}: forwarding must be one of {', '.join(FORWARDING)}")
            settings = _u32(_DEST_FWD_METHOD, method) + _u32(_DEST_WEIGHT, value.weight) + _DEST_THRESHOLDS
            self._settings[value] = settings
        return self._encode(command, key, settings)

    def _encode(self, command: bytes, key: RealServerKey, settings: bytes) -> bytes:
        server, ip, port = key
        if server is not self._server:
            self._service = service_identity(server)
            self._server = server
        known = self._addresses.get(ip)
        if known is None:
            raw = packed(ip)
            if raw is None:
                raise KernelError(f"real server {key}: {ip!r} is not an IP address")
            known = (_DEST_ADDRESS_HEAD + raw.ljust(16, b"\x00") + _DEST_PORT_HEAD, _DEST_FAMILY[len(raw)])
            self._addresses[ip] = known
        address, family = known
        body = address + _PORT.pack(port) + family + settings
        return b"".join((command, self._service, _U16.pack(len(body) + 4), _DEST_KIND, body))


_DEST_KIND = _U16.pack(_ATTR_DEST | 0x8000)


def decode_service(payload: memoryview, start: int, end: int) -> Optional[Tuple[VirtualServerKey, VirtualServer]]:
    """A virtual server from a GET_SERVICE answer; None if it is told by a firewall mark or is of another protocol."""
    outer = parse_attributes(payload, start + 4, end).get(_ATTR_SERVICE)
    if outer is None:
        return None
    found = parse_attributes(outer, 0, len(outer))
    if _SVC_FWMARK in found or _SVC_PROTOCOL not in found:
        return None
    protocol = _PROTOCOL_NAMES.get(_U16.unpack(found[_SVC_PROTOCOL])[0])
    if protocol is None:
        return None
    ipv6 = _U16.unpack(found[_SVC_AF])[0] == socket.AF_INET6
    address = unpacked(bytes(found[_SVC_ADDR][: 16 if ipv6 else 4]))
    netmask = _U32.unpack(found[_SVC_NETMASK])[0]
    value = VirtualServer(
        attribute_text(found[_SVC_SCHED_NAME]) if _SVC_SCHED_NAME in found else "none",
        _U32.unpack_from(found[_SVC_FLAGS])[0] & ~HASHED,
        _U32.unpack(found[_SVC_TIMEOUT])[0],
        netmask if ipv6 else bin(netmask).count("1"),
    )
    return VirtualServerKey(protocol, address, _PORT.unpack(found[_SVC_PORT])[0]), value


def encode_timeouts(seconds: Dict[str, int]) -> bytes:
    """A SET_CONFIG message: timeouts in seconds by name (tcp, tcp_fin, udp); 0 or absent leaves one as it is."""
    return header(SET_CONFIG) + b"".join(_u32(kind, seconds.get(name, 0)) for name, kind in TIMEOUTS.items())


def decode_timeouts(payload: bytes) -> Dict[str, int]:
    """The timeouts of a GET_CONFIG answer, in seconds by name."""
    found = parse_attributes(memoryview(payload), 4, len(payload))
    return {name: _U32.unpack(found[kind])[0] for name, kind in TIMEOUTS.items() if kind in found}


class RealServerTable(NamedTuple):
    """The real servers of a family, active plus inactive connections of those that have any, and whose they are.

    ``seen``: the virtual servers of the family that were listed, with or without real servers.
    """

    servers: Dict[RealServerKey, RealServer]
    connections: Dict[RealServerKey, int]
    seen: Set[VirtualServerKey]

    def add(self, key: RealServerKey, value: RealServer, connections: int) -> None:
        """Take up one real server."""
        self.servers[key] = value
        if connections:
            self.connections[key] = connections


def decode_dest(
    payload: memoryview, start: int, end: int, server: VirtualServerKey, table: RealServerTable
) -> None:
    """Take up the real server in a GET_DEST answer about ``server``."""
    outer = parse_attributes(payload, start + 4, end).get(_ATTR_DEST)
    if outer is None:
        return
    found = parse_attributes(outer, 0, len(outer))
    ipv6 = ":" in server.address
    if _DEST_ADDR_FAMILY in found:
        ipv6 = _U16.unpack(found[_DEST_ADDR_FAMILY])[0] == socket.AF_INET6
    address = unpacked(bytes(found[_DEST_ADDR][: 16 if ipv6 else 4]))
    method = _U32.unpack(found[_DEST_FWD_METHOD])[0]
    value = RealServer(_U32.unpack(found[_DEST_WEIGHT])[0], _FORWARDING_NAMES.get(method, str(method)))
    connections = sum(_U32.unpack(found[kind])[0] for kind in (_DEST_ACTIVE, _DEST_INACTIVE) if kind in found)
    table.add(RealServerKey(server, address, _PORT.unpack(found[_DEST_PORT])[0]), value, connections)


class _AddressText:
    """Addresses and ports as /proc/net/ip_vs writes them, to canonical text; the same few occur again and again."""

    def __init__(self, family: str) -> None:
        self._ipv6 = family == IPV6
        self._known: Dict[str, Optional[str]] = {}

    def read(self, text: str) -> Optional[Tuple[str, int]]:
        """``0A600001:01BB`` or ``[fd00:...:0001]:0050`` as address and port; None for the other family."""
        address, _colon, port = text.rpartition(":")
        if address not in self._known:
            self._known[address] = self._canonical(address)
        canonical = self._known[address]
        return None if canonical is None else (canonical, int(port, 16))

    def _canonical(self, text: str) -> Optional[str]:
        if text.startswith("[") != self._ipv6:
            return None
        if self._ipv6:
            return unpacked(socket.inet_pton(socket.AF_INET6, text[1:-1]))
        return unpacked(bytes.fromhex(text))


def parse_proc(lines: Iterable[str], family: str = IPV4) -> RealServerTable:
    """The real servers of a family in the lines of /proc/net/ip_vs. Raises KernelError if they are not understood.

    That file lists all real servers with weights and connections at once; netlink takes a dump for each virtual server.
    But it skips some virtual servers while other network namespaces have theirs: look at ``seen``.
    """
    table = RealServerTable({}, {}, set())
    addresses = _AddressText(family)
    server: Optional[VirtualServerKey] = None
    try:
        for line in lines:
            words = line.split()
            if not words:
                continue
            if words[0] == "->":
                if server is None or words[1].startswith("RemoteAddress"):
                    continue
                place = addresses.read(words[1])
                if place is not None:
                    key = RealServerKey(server, place[0], place[1])
                    value = RealServer(int(words[3]), _FORWARDING_IN_PROC.get(words[2], words[2]))
                    table.add(key, value, int(words[4]) + int(words[5]))
            else:
                place = addresses.read(words[1]) if words[0] in ("TCP", "UDP", "SCTP") else None
                server = None if place is None else VirtualServerKey(words[0].lower(), place[0], place[1])
                if server is not None:
                    table.seen.add(server)
    except (ValueError, IndexError, OSError) as error:
        raise KernelError(f"/proc/net/ip_vs: a line is not understood: {line.strip()!r}") from error
    return table


def service_messages(
    family_id: int, command: int, entries: Iterable[Tuple[VirtualServerKey, VirtualServer]]
) -> List[Tuple[int, int, bytes]]:
    """Netlink messages that make or change virtual servers; ``family_id`` is the generic family's number."""
    head = header(command)
    return [(family_id, 0, head + service_settings(key, value)) for key, value in entries]
