# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""IP addresses and CIDRs as text: parsed as kube-proxy parses them, and always written in canonical form.

Addresses travel through the engine as canonical strings: dotted quads for IPv4 and RFC 5952 text for IPv6. A colon in a
canonical string means IPv6. Parsing is permissive in the two ways in which kube-proxy 1.36 is: leading zeros are
decimal (``172.30.0.041`` is ``172.30.0.41``) and an IPv4-mapped IPv6 address is IPv4.
"""

from __future__ import annotations

import functools
import socket
from typing import Iterable, NamedTuple, Optional

IPV4 = "IPv4"
IPV6 = "IPv6"
FAMILIES: tuple[str, str] = (IPV4, IPV6)
#: The address of each family that means no address, or all addresses of the node.
UNSPECIFIED: dict[str, str] = {IPV4: "0.0.0.0", IPV6: "::"}
#: The address of each family at which only the node reaches itself.
LOOPBACK: dict[str, str] = {IPV4: "127.0.0.1", IPV6: "::1"}

_MAPPED = b"\x00" * 10 + b"\xff\xff"


def family_of(address: str) -> str:
    """Return the family, ``IPv4`` or ``IPv6``, of a canonical address or CIDR."""
    return IPV6 if ":" in address else IPV4


def is_link_local(address: str) -> bool:
    """Return whether a canonical address is an IPv6 link-local one; 169.254.0.0/16 is treated as any other."""
    return ":" in address and address.startswith(("fe8", "fe9", "fea", "feb"))


def is_loopback(address: str) -> bool:
    """Return whether a canonical address is ::1 or in 127.0.0.0/8."""
    return address == "::1" or address.startswith("127.")


def address_bits(family: str) -> int:
    """Return the number of bits in an address of the family: 32 or 128."""
    return 128 if family == IPV6 else 32


def _without_leading_zeros(text: str) -> str:
    def decimal(part: str) -> str:
        return str(int(part)) if part.isdecimal() and part.isascii() and len(part) <= 16 else part

    return ".".join(decimal(part) for part in text.split("."))


def packed(text: str) -> Optional[bytes]:
    """Return the 4 or 16 bytes of an address in network order, or None if the text is not an address.

    Leading zeros are accepted in dotted quads; an IPv4-mapped IPv6 address gives 4 bytes.
    """
    try:
        if ":" not in text:
            try:
                return socket.inet_pton(socket.AF_INET, text)
            except OSError:
                return socket.inet_pton(socket.AF_INET, _without_leading_zeros(text))
        address = socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        return None
    return address[12:] if address.startswith(_MAPPED) else address


def unpacked(address: bytes) -> str:
    """Return the canonical text of 4 or 16 bytes in network order."""
    return socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)


def family_of_packed(address: bytes) -> str:
    """Return the family of an address of 4 or 16 bytes."""
    return IPV4 if len(address) == 4 else IPV6


def canonical_address(text: str) -> Optional[str]:
    """Return the canonical text of an address, or None if ``text`` is not one (see :func:`packed`)."""
    if ":" not in text:
        try:
            # inet_pton rejects leading zeros, so accepted text is already canonical.
            socket.inet_pton(socket.AF_INET, text)
            return text
        except (OSError, ValueError):
            pass
    address = packed(text)
    return None if address is None else unpacked(address)


class Network(NamedTuple):
    """An address range: its first address as an integer, prefix length in bits, and family."""

    first: int
    prefix_length: int
    family: str

    def __str__(self) -> str:
        size = address_bits(self.family) // 8
        return f"{unpacked(self.first.to_bytes(size, 'big'))}/{self.prefix_length}"

    def contains(self, address: str) -> bool:
        """Return whether the range contains a canonical address; False for the other family and for invalid text."""
        raw = packed(address)
        if raw is None or len(raw) * 8 != address_bits(self.family):
            return False
        shift = address_bits(self.family) - self.prefix_length
        return int.from_bytes(raw, "big") >> shift == self.first >> shift


def parse_network(text: str) -> Optional[Network]:
    """Parse a CIDR such as ``10.0.0.0/8`` and clear its host bits; return None if ``text`` is not a CIDR."""
    base, slash, length_text = text.partition("/")
    if not slash or not (length_text.isdecimal() and length_text.isascii()) or len(length_text) > 16:
        return None
    raw = packed(base)
    if raw is None:
        return None
    length = int(length_text)
    if len(raw) == 4 and ":" in base:
        length -= 96
    bits = len(raw) * 8
    if not 0 <= length <= bits:
        return None
    shift = bits - length
    return Network(int.from_bytes(raw, "big") >> shift << shift, length, IPV4 if bits == 32 else IPV6)


@functools.lru_cache(maxsize=4096)
def _prefixes(cidrs: tuple[str, ...]) -> dict[str, dict[int, set[int]]]:
    """Return the prefixes of the ranges, by family and by the number of bits after the prefix."""
    found: dict[str, dict[int, set[int]]] = {IPV4: {}, IPV6: {}}
    for network in networks_of(cidrs):
        shift = address_bits(network.family) - network.prefix_length
        found[network.family].setdefault(shift, set()).add(network.first >> shift)
    return found


def is_admitted(address: str, cidrs: tuple[str, ...]) -> bool:
    """Return whether ranges admit a canonical address: one of them contains it, or there are none.

    The cost does not depend on the number of ranges, of which the owner of a Service may give tens of thousands: each
    datagram of userspace mode is checked here, too.
    """
    if not cidrs:
        return True
    raw = packed(address)
    if raw is None:
        return False
    number = int.from_bytes(raw, "big")
    by_shift = _prefixes(cidrs)[family_of_packed(raw)]
    return any(number >> shift in prefixes for shift, prefixes in by_shift.items())


def networks_of(cidrs: Iterable[str]) -> list[Network]:
    """Return the ranges of CIDRs; a text that is not a CIDR is omitted."""
    return [network for network in map(parse_network, cidrs) if network is not None]


def canonical_network(text: str) -> Optional[str]:
    """Return the canonical text of a CIDR, host bits cleared, or None if ``text`` is not one."""
    network = parse_network(text)
    return None if network is None else str(network)


def packed_place(address: str, port: int) -> bytes:
    """Return an address and a port in network order, the address empty if it is not valid."""
    return (packed(address) or b"") + port.to_bytes(2, "big")


def unpacked_place(place: bytes) -> tuple[str, int]:
    """Return the address and the port of :func:`packed_place`."""
    return unpacked(place[:-2]), int.from_bytes(place[-2:], "big")


def address_and_port(address: str, port: int) -> str:
    """Return ``1.2.3.4:80`` or ``[fd00::1]:80`` for a canonical address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def without_brackets(text: str) -> str:
    """Return an address without the brackets that IPv6 addresses have before a port."""
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def port_number(text: str) -> Optional[int]:
    """Return the port that at most five ASCII digits give, or None unless it is between 1 and 65535."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else 0
    return number if 1 <= number <= 65535 else None


def split_port(text: str, default: int) -> Optional[tuple[str, int]]:
    """Split ``HOST``, ``HOST:PORT`` or ``[HOST]:PORT``; return None if the port is not a valid number.

    The host is not validated. An IPv6 address without brackets is a host without a port.
    """
    host, port = text, str(default)
    if ":" in text and canonical_address(text) is None:
        host, _colon, port = text.rpartition(":")
        host = without_brackets(host)
    number = port_number(port)
    return None if number is None else (host, number)
