# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Encode and decode IPVS generic netlink messages, and parse /proc/net/ip_vs.

Payloads start with ``struct genlmsghdr``; the attributes are those of linux/ip_vs.h. Constant parts of a message are
packed once, so that a message costs little more than joining a few byte strings.
"""

from __future__ import annotations

import socket
import struct
from typing import Iterable, Iterator, NamedTuple, Optional

from ...base.addresses import IPV4, IPV6, UNSPECIFIED, packed, unpacked
from ...base.errors import KernelError
from ...rendering.ipvs.model import FIREWALL_MARK, HASHED, RealServer, RealServerKey, VirtualServer, VirtualServerKey
from ..netlink.attributes import attribute, attribute_text, nested, nested_in, parse_attributes, text_attribute
from ..netlink.protocol import NLM_F_REQUEST

NEW_SERVICE, SET_SERVICE, DELETE_SERVICE, GET_SERVICE = 1, 2, 3, 4
NEW_DEST, SET_DEST, DELETE_DEST, GET_DEST = 5, 6, 7, 8
SET_CONFIG, GET_CONFIG = 12, 13

_VERSION = 1
# The names of linux/ip_vs.h.
IPVS_CMD_ATTR_SERVICE = 1
IPVS_CMD_ATTR_DEST = 2
IPVS_CMD_ATTR_TIMEOUT_TCP = 4
IPVS_CMD_ATTR_TIMEOUT_TCP_FIN = 5
IPVS_CMD_ATTR_TIMEOUT_UDP = 6

IPVS_SVC_ATTR_AF = 1
IPVS_SVC_ATTR_PROTOCOL = 2
IPVS_SVC_ATTR_ADDR = 3
IPVS_SVC_ATTR_PORT = 4
IPVS_SVC_ATTR_FWMARK = 5
IPVS_SVC_ATTR_SCHED_NAME = 6
IPVS_SVC_ATTR_FLAGS = 7
IPVS_SVC_ATTR_TIMEOUT = 8
IPVS_SVC_ATTR_NETMASK = 9

IPVS_DEST_ATTR_ADDR = 1
IPVS_DEST_ATTR_PORT = 2
IPVS_DEST_ATTR_FWD_METHOD = 3
IPVS_DEST_ATTR_WEIGHT = 4
IPVS_DEST_ATTR_U_THRESH = 5
IPVS_DEST_ATTR_L_THRESH = 6
IPVS_DEST_ATTR_ACTIVE_CONNS = 7
IPVS_DEST_ATTR_INACT_CONNS = 8
IPVS_DEST_ATTR_ADDR_FAMILY = 11

PROTOCOLS: dict[str, int] = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP, "sctp": socket.IPPROTO_SCTP}
_PROTOCOL_NAMES = {number: name for name, number in PROTOCOLS.items()}
FORWARDING: dict[str, int] = {"masquerade": 0, "local": 1, "tunnel": 2, "route": 3, "bypass": 4}
_FORWARDING_NAMES = {number: name for name, number in FORWARDING.items()}
_FORWARDING_IN_PROC = {"Masq": "masquerade", "Local": "local", "Tunnel": "tunnel", "Route": "route", "Bypass": "bypass"}
TIMEOUTS: dict[str, int] = {
    "tcp": IPVS_CMD_ATTR_TIMEOUT_TCP,
    "tcp_fin": IPVS_CMD_ATTR_TIMEOUT_TCP_FIN,
    "udp": IPVS_CMD_ATTR_TIMEOUT_UDP,
}

_U16 = struct.Struct("=H")
_U32 = struct.Struct("=I")
_PORT = struct.Struct("!H")
_NO_REST = bytes(12)


def header(command: int) -> bytes:
    """Return ``struct genlmsghdr`` of an IPVS command."""
    return struct.pack("=BBH", command, _VERSION, 0)


def _u16(kind: int, value: int) -> bytes:
    return attribute(kind, _U16.pack(value))


def _u32(kind: int, value: int) -> bytes:
    return attribute(kind, _U32.pack(value))


def _address(text: str) -> tuple[int, bytes]:
    """Return address family and the 16 bytes of ``union nf_inet_addr``. Raises KernelError for invalid text."""
    raw = packed(text)
    if raw is None:
        raise KernelError(f"{text!r} is not an IP address")
    return (socket.AF_INET, raw + _NO_REST) if len(raw) == 4 else (socket.AF_INET6, raw)


_PROTOCOL_ERROR = "protocol must be tcp, udp or sctp"
_NESTED = 0x8000
# Netlink and generic netlink headers, then the attribute that names the virtual server, nested to its end.
_SERVICE = struct.Struct("=IHHIIBBHHHHHH2xHHH2xHH16sHH2s2x")
_SERVICE_IDENTITY_SIZE = 48
# The same for a message about a real server, up to the header of its address.
_DEST = struct.Struct("=IHHIIBBHHHHHH2xHHH2xHH16sHH2s2xHHHH")
_SERVICE_OFFSET = 20
# Both headers alone, and the beginning of the attribute of a real server, for virtual servers that a mark names.
_HEADERS = struct.Struct("=IHHIIBBH")
_DEST_HEAD = struct.Struct("=HHHH")


def _identity(key: VirtualServerKey) -> tuple[int, int, bytes, bytes]:
    family, address = _address(key.address)
    protocol = PROTOCOLS.get(key.protocol)
    if protocol is None:
        raise KernelError(f"virtual server {key}: {_PROTOCOL_ERROR}")
    return family, protocol, address, _PORT.pack(key.port)


def _marked_service(key: VirtualServerKey, settings: bytes = b"") -> bytes:
    """Return the attribute of a virtual server that is named by a firewall mark."""
    family = socket.AF_INET6 if ":" in key.address else socket.AF_INET
    mark = _u32(IPVS_SVC_ATTR_FWMARK, key.port)
    return nested(IPVS_CMD_ATTR_SERVICE, _u16(IPVS_SVC_ATTR_AF, family), mark, settings)


class ServiceEncoder:
    """Encodes whole messages about virtual servers; ``family_id`` is the number of the generic family IPVS."""

    def __init__(self, family_id: int) -> None:
        self._family_id = family_id
        self._settings: dict[tuple[VirtualServer, bool], bytes] = {}

    def message(self, command: int, key: VirtualServerKey, value: Optional[VirtualServer] = None) -> bytes:
        """Return a message that names a virtual server and, with ``value``, has its settings. Raises KernelError."""
        settings = b"" if value is None else self._settings_of(value, ":" in key.address)
        if key.protocol == FIREWALL_MARK:
            service = _marked_service(key, settings)
            size = _SERVICE_OFFSET + len(service)
            return _HEADERS.pack(size, self._family_id, NLM_F_REQUEST, 0, 0, command, _VERSION, 0) + service
        family, protocol, address, port = _identity(key)
        size = _SERVICE_IDENTITY_SIZE + len(settings)
        return (
            _SERVICE.pack(
                _SERVICE_OFFSET + size, self._family_id, NLM_F_REQUEST, 0, 0, command, _VERSION, 0,
                size, IPVS_CMD_ATTR_SERVICE | _NESTED, 6, IPVS_SVC_ATTR_AF, family, 6, IPVS_SVC_ATTR_PROTOCOL, protocol,
                20, IPVS_SVC_ATTR_ADDR, address, 6, IPVS_SVC_ATTR_PORT, port,
            )
            + settings
        )  # fmt: skip

    def _settings_of(self, value: VirtualServer, ipv6: bool) -> bytes:
        settings = self._settings.get((value, ipv6))
        if settings is None:
            if ipv6:
                netmask = _U32.pack(value.netmask)
            else:
                netmask = struct.pack("!I", (0xFFFFFFFF << (32 - value.netmask)) & 0xFFFFFFFF)
            settings = self._settings[(value, ipv6)] = (
                text_attribute(IPVS_SVC_ATTR_SCHED_NAME, value.scheduler)
                + attribute(IPVS_SVC_ATTR_FLAGS, struct.pack("=II", value.flags, 0xFFFFFFFF))
                + _u32(IPVS_SVC_ATTR_TIMEOUT, value.timeout)
                + attribute(IPVS_SVC_ATTR_NETMASK, netmask)
            )
        return settings


def service_identity(key: VirtualServerKey) -> bytes:
    """Return the attribute that names a virtual server, for a dump of its real servers. Raises KernelError."""
    return ServiceEncoder(0).message(GET_SERVICE, key)[_SERVICE_OFFSET:]


class RealServerEncoder:
    """Encodes whole messages about real servers; ``family_id`` is the number of the generic family IPVS.

    Repeated parts are packed once: the virtual server for all its real servers, port and settings for all that share
    them.
    """

    def __init__(self, family_id: int) -> None:
        self._family_id = family_id
        self._tails: dict[tuple[int, Optional[RealServer]], tuple[bytes, bytes]] = {}

    def messages(self, command: int, entries: Iterable[tuple[RealServerKey, Optional[RealServer]]]) -> Iterator[bytes]:
        """Yield a message for each entry; without a value it only names the real server.

        Either all entries have a value or none has. Raises KernelError for an invalid entry.
        """
        to_bytes = socket.inet_pton
        ipv4, ipv6 = socket.AF_INET, socket.AF_INET6
        server: Optional[VirtualServerKey] = None
        port, value = -1, None
        head = tail_v4 = tail_v6 = b""
        for key, its_value in entries:
            its_server, ip, its_port = key
            if its_port != port or its_value is not value:
                port, value = its_port, its_value
                tail_v4, tail_v6 = self._tail(key, value)
            if its_server is not server:
                server = its_server
                head = self._head(command, server, len(tail_v6))
            try:
                address = to_bytes(ipv6 if ":" in ip else ipv4, ip)
            except OSError as error:
                raise KernelError(f"real server {key}: {ip!r} is not an IP address") from error
            yield head + address + (tail_v6 if ":" in ip else tail_v4)

    def _head(self, command: int, server: VirtualServerKey, tail: int) -> bytes:
        size = 4 + 4 + 16 + tail
        if server.protocol == FIREWALL_MARK:
            service = _marked_service(server)
            whole = _SERVICE_OFFSET + len(service) + size
            return (
                _HEADERS.pack(whole, self._family_id, NLM_F_REQUEST, 0, 0, command, _VERSION, 0)
                + service
                + _DEST_HEAD.pack(size, IPVS_CMD_ATTR_DEST | _NESTED, 20, IPVS_DEST_ATTR_ADDR)
            )
        family, protocol, address, port = _identity(server)
        return _DEST.pack(
            _SERVICE_OFFSET + _SERVICE_IDENTITY_SIZE + size, self._family_id, NLM_F_REQUEST, 0, 0, command, _VERSION, 0,
            _SERVICE_IDENTITY_SIZE, IPVS_CMD_ATTR_SERVICE | _NESTED,
            6, IPVS_SVC_ATTR_AF, family, 6, IPVS_SVC_ATTR_PROTOCOL, protocol,
            20, IPVS_SVC_ATTR_ADDR, address, 6, IPVS_SVC_ATTR_PORT, port,
            size, IPVS_CMD_ATTR_DEST | _NESTED, 20, IPVS_DEST_ATTR_ADDR,
        )  # fmt: skip

    def _tail(self, key: RealServerKey, value: Optional[RealServer]) -> tuple[bytes, bytes]:
        """Return the part after the address, for IPv4 and for IPv6."""
        tails = self._tails.get((key.port, value))
        if tails is None:
            port = attribute(IPVS_DEST_ATTR_PORT, _PORT.pack(key.port))
            settings = b"" if value is None else self._settings_of(key, value)
            tails = self._tails[(key.port, value)] = (
                _NO_REST + port + _u16(IPVS_DEST_ATTR_ADDR_FAMILY, socket.AF_INET) + settings,
                port + _u16(IPVS_DEST_ATTR_ADDR_FAMILY, socket.AF_INET6) + settings,
            )
        return tails

    @staticmethod
    def _settings_of(key: RealServerKey, value: RealServer) -> bytes:
        method = FORWARDING.get(value.forwarding)
        if method is None:
            raise KernelError(f"real server {key}: forwarding must be one of {', '.join(FORWARDING)}")
        thresholds = _u32(IPVS_DEST_ATTR_U_THRESH, 0) + _u32(IPVS_DEST_ATTR_L_THRESH, 0)
        return _u32(IPVS_DEST_ATTR_FWD_METHOD, method) + _u32(IPVS_DEST_ATTR_WEIGHT, value.weight) + thresholds


def service_attributes(payload: memoryview, start: int, end: int) -> dict[int, memoryview]:
    """Return the attributes of the virtual server in a GET_SERVICE answer; none if it has no virtual server."""
    return nested_in(parse_attributes(payload, start + 4, end), IPVS_CMD_ATTR_SERVICE)


def decode_service(
    found: dict[int, memoryview], marks: bool = False
) -> Optional[tuple[VirtualServerKey, VirtualServer]]:
    """Return a virtual server from its attributes.

    None without attributes, for unsupported protocols, and unless ``marks`` is set for virtual servers that are named
    by a firewall mark.
    """
    if not found:
        return None
    ipv6 = _U16.unpack(found[IPVS_SVC_ATTR_AF])[0] == socket.AF_INET6
    if IPVS_SVC_ATTR_FWMARK in found:
        if not marks:
            return None
        mark = _U32.unpack(found[IPVS_SVC_ATTR_FWMARK])[0]
        key = VirtualServerKey(FIREWALL_MARK, UNSPECIFIED[IPV6 if ipv6 else IPV4], mark)
    else:
        protocol = _PROTOCOL_NAMES.get(_U16.unpack(found[IPVS_SVC_ATTR_PROTOCOL])[0])
        if protocol is None:
            return None
        address = unpacked(bytes(found[IPVS_SVC_ATTR_ADDR][: 16 if ipv6 else 4]))
        key = VirtualServerKey(protocol, address, _PORT.unpack(found[IPVS_SVC_ATTR_PORT])[0])
    netmask = _U32.unpack(found[IPVS_SVC_ATTR_NETMASK])[0]
    value = VirtualServer(
        attribute_text(found[IPVS_SVC_ATTR_SCHED_NAME]) if IPVS_SVC_ATTR_SCHED_NAME in found else "none",
        _U32.unpack_from(found[IPVS_SVC_ATTR_FLAGS])[0] & ~HASHED,
        _U32.unpack(found[IPVS_SVC_ATTR_TIMEOUT])[0],
        netmask if ipv6 else bin(netmask).count("1"),
    )
    return key, value


def encode_timeouts(seconds: dict[str, int]) -> bytes:
    """Return a SET_CONFIG message: timeouts in seconds by name (tcp, tcp_fin, udp); 0 or absent changes nothing."""
    return header(SET_CONFIG) + b"".join(_u32(kind, seconds.get(name, 0)) for name, kind in TIMEOUTS.items())


def decode_timeouts(payload: bytes) -> dict[str, int]:
    """Return the timeouts of a GET_CONFIG answer, in seconds by name."""
    found = parse_attributes(memoryview(payload), 4, len(payload))
    return {name: _U32.unpack(found[kind])[0] for name, kind in TIMEOUTS.items() if kind in found}


class RealServerTable(NamedTuple):
    """The real servers of a family, and the connections of those that have any.

    ``connections``: active plus inactive ones. ``used``: those of TCP and SCTP that are established, and all of UDP,
    which IPVS counts as inactive. ``seen``: the virtual servers of the family that were listed, with or without real
    servers.
    """

    servers: dict[RealServerKey, RealServer]
    connections: dict[RealServerKey, int]
    used: dict[RealServerKey, int]
    seen: set[VirtualServerKey]

    def add(self, key: RealServerKey, value: RealServer, active: int, inactive: int) -> None:
        """Add one real server with its connection counts."""
        self.servers[key] = value
        if active or inactive:
            self.connections[key] = active + inactive
        if active or (inactive and key.server.protocol == "udp"):
            self.used[key] = active + inactive


def empty_table() -> RealServerTable:
    """Return an empty table."""
    return RealServerTable({}, {}, {}, set())


def dest_attributes(payload: memoryview, start: int, end: int) -> dict[int, memoryview]:
    """Return the attributes of the real server in a GET_DEST answer; none if it has no real server."""
    return nested_in(parse_attributes(payload, start + 4, end), IPVS_CMD_ATTR_DEST)


def real_server_key(found: dict[int, memoryview], server: VirtualServerKey) -> RealServerKey:
    """Return which real server of ``server`` its attributes name."""
    ipv6 = ":" in server.address
    if IPVS_DEST_ATTR_ADDR_FAMILY in found:
        ipv6 = _U16.unpack(found[IPVS_DEST_ATTR_ADDR_FAMILY])[0] == socket.AF_INET6
    address = unpacked(bytes(found[IPVS_DEST_ATTR_ADDR][: 16 if ipv6 else 4]))
    return RealServerKey(server, address, _PORT.unpack(found[IPVS_DEST_ATTR_PORT])[0])


def connection_counts(found: dict[int, memoryview]) -> tuple[int, int]:
    """Return the connections of a real server that IPVS calls active and inactive, from its attributes."""
    counts = (found.get(kind, bytes(4)) for kind in (IPVS_DEST_ATTR_ACTIVE_CONNS, IPVS_DEST_ATTR_INACT_CONNS))
    active, inactive = (_U32.unpack(count)[0] for count in counts)
    return active, inactive


def decode_dest(payload: memoryview, start: int, end: int, server: VirtualServerKey, table: RealServerTable) -> None:
    """Add the real server in a GET_DEST answer about ``server``."""
    found = dest_attributes(payload, start, end)
    if not found:
        return
    method = _U32.unpack(found[IPVS_DEST_ATTR_FWD_METHOD])[0]
    value = RealServer(_U32.unpack(found[IPVS_DEST_ATTR_WEIGHT])[0], _FORWARDING_NAMES.get(method, str(method)))
    table.add(real_server_key(found, server), value, *connection_counts(found))


class _AddressText:
    """Converts addresses and ports in the format of /proc/net/ip_vs to canonical text; repeated ones are cached."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def read(self, text: str) -> tuple[str, int]:
        """Return address and port of ``0A600001:01BB`` or ``[fd00:...:0001]:0050``."""
        address, _colon, port = text.rpartition(":")
        if address not in self._known:
            self._known[address] = self._canonical(address)
        return self._known[address], int(port, 16)

    @staticmethod
    def _canonical(text: str) -> str:
        if _is_ipv6(text):
            return unpacked(socket.inet_pton(socket.AF_INET6, text[1:-1]))
        return unpacked(bytes.fromhex(text))


def _is_ipv6(text: str) -> bool:
    return text.startswith("[")


def parse_proc(lines: Iterable[str], family: str = IPV4) -> RealServerTable:
    """Parse the real servers of the virtual servers of a family from the lines of /proc/net/ip_vs.

    A real server that is reached through a tunnel may have the other family. Raises KernelError for an invalid line.

    That file lists all real servers with weights and connections at once; netlink takes a dump for each virtual server.
    But it skips some virtual servers while other network namespaces have theirs: check ``seen``.
    """
    table = empty_table()
    addresses = _AddressText()
    server: Optional[VirtualServerKey] = None
    try:
        for line in lines:
            words = line.split()
            if not words:
                continue
            if words[0] == "->":
                if server is None or words[1].startswith("RemoteAddress"):
                    continue
                key = RealServerKey(server, *addresses.read(words[1]))
                value = RealServer(int(words[3]), _FORWARDING_IN_PROC.get(words[2], words[2]))
                table.add(key, value, int(words[4]), int(words[5]))
            elif words[0] in ("TCP", "UDP", "SCTP") and _is_ipv6(words[1]) == (family == IPV6):
                server = VirtualServerKey(words[0].lower(), *addresses.read(words[1]))
                table.seen.add(server)
            else:
                server = None
    except (ValueError, IndexError, OSError) as error:
        raise KernelError(f"/proc/net/ip_vs: cannot parse line: {line.strip()!r}") from error
    return table
