# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Encode and decode ipset's netlink messages (linux/netfilter/ipset/ip_set.h).

Elements are handled as text, as ``ipset save`` prints them; many of them go into one message (IPSET_ATTR_ADT), each
with a number (IPSET_ATTR_LINENO) by which the kernel identifies the one it refused.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Iterable, Iterator, NamedTuple, Optional, Sequence

from ...base.addresses import IPV4, IPV6, packed, unpacked
from ...base.errors import KernelError
from ..netlink.attributes import (
    NLA_F_NET_BYTEORDER,
    attribute,
    attribute_text,
    each_attribute,
    nested,
    nested_in,
    parse_attributes,
    text_attribute,
)
from ..netlink.outcomes import MessageError, errno_text
from ..netlink.protocol import NLM_F_CREATE, Message

if TYPE_CHECKING:
    from ...rendering.ipvs.model import SetDefinition

_SUBSYSTEM = 6 << 8
PROTOCOL, CREATE, DESTROY, SWAP, LIST, ADD, DELETE, TYPE = (
    _SUBSYSTEM | number for number in (1, 2, 3, 6, 7, 9, 10, 13)
)

_PROTOCOL, _SETNAME, _TYPENAME, _REVISION, _FAMILY, _FLAGS, _DATA, _ADT, _LINENO = 1, 2, 3, 4, 5, 6, 7, 8, 9
_SETNAME2 = 3
_IP, _PORT, _PORT_TO, _PROTO = 1, 4, 5, 7
_HASHSIZE, _MAXELEM = 18, 19
_IP2, _CIDR2 = 20, 21
_IPADDR_IPV4, _IPADDR_IPV6 = 1, 2
_FLAG_LIST_HEADER = 1 << 2

_HASH_SIZE = 1024
# An attribute's length is 16 bits wide; this leaves room for the rest of the message.
_ELEMENT_BYTES_PER_MESSAGE = 60_000
OLDEST_PROTOCOL, NEWEST_PROTOCOL = 6, 7

ERROR_FULL = 4352
_ERRORS = {
    4097: "the kernel does not understand the message",
    4098: "the kernel has no such set type",
    4099: "there are too many sets",
    4100: "it is in use, by a rule or another set",
    4101: "a set of the new name exists",
    4102: "the two sets are of different types",
    4103: "the element exists already, or does not exist",
    4104: "the prefix length is not valid",
    4106: "the address is of another family than the set",
    4109: "the IPv4 address is missing or not valid",
    4110: "the IPv6 address is missing or not valid",
    4353: "the element cannot be stored",
    4354: "the protocol is not valid",
    4355: "the protocol is missing",
}

_PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132, "udplite": 136, "icmp": 1, "icmpv6": 58}
_PROTOCOL_NAMES = {number: name for name, number in _PROTOCOLS.items()}
_FAMILY_NAMES: dict[int, str] = {socket.AF_INET: IPV4, socket.AF_INET6: IPV6}
_U16 = struct.Struct("!H")
_U32 = struct.Struct("=I")


def refusal_text(error: MessageError, limit: int = 65536, bitmap: bool = False) -> str:
    """Return the kernel's error in words; ``limit`` is the maximum number of elements of the set."""
    if error.errno == ERROR_FULL:
        return "the port is out of the set's range" if bitmap else f"the set is full ({limit} elements at most)"
    return _ERRORS.get(error.errno) or str(error if error.errno < 4096 else errno_text(error.errno))


def base(protocol: int, name: str = "") -> bytes:
    """Return the start of every message: ``struct nfgenmsg``, protocol version, and the set's name if there is one."""
    head = struct.pack("=BBH", socket.AF_INET, 0, 0) + attribute(_PROTOCOL, bytes((protocol,)))
    return head + text_attribute(_SETNAME, name) if name else head


def family_number(family: str) -> int:
    """Return the number of a set's family; bitmaps have none."""
    return {IPV4: socket.AF_INET, IPV6: socket.AF_INET6}.get(family, socket.AF_UNSPEC)


def type_query(protocol: int, definition: SetDefinition) -> bytes:
    """Return a TYPE request; it also makes the kernel load the module of the type."""
    family = bytes((family_number(definition.family),))
    return base(protocol) + text_attribute(_TYPENAME, definition.type) + attribute(_FAMILY, family)


def decode_revision(payload: bytes) -> int:
    """Return the newest revision of a set type, from the answer to a TYPE request."""
    found = parse_attributes(memoryview(payload), 4, len(payload))
    return found[_REVISION][0] if _REVISION in found else 0


def decode_protocol(payload: bytes) -> int:
    """Return the newest protocol version that the kernel supports, from the answer to a PROTOCOL request."""
    found = parse_attributes(memoryview(payload), 4, len(payload))
    return found[_PROTOCOL][0] if _PROTOCOL in found else 6


def create(protocol: int, name: str, definition: SetDefinition, revision: int) -> Message:
    """Return a message that creates a set; the kernel accepts it if an equal set exists."""
    if definition.type.startswith("bitmap:"):
        data = _ports(0, _PORT) + _ports(65535, _PORT_TO)
    else:
        data = _network_order(_HASHSIZE, _HASH_SIZE) + _network_order(_MAXELEM, definition.limit)
    payload = (
        base(protocol, name)
        + text_attribute(_TYPENAME, definition.type)
        + attribute(_REVISION, bytes((revision,)))
        + attribute(_FAMILY, bytes((family_number(definition.family),)))
        + nested(_DATA, data)
    )
    return (CREATE, NLM_F_CREATE, payload)


def destroy(protocol: int, name: str) -> Message:
    """Return a message that removes a set."""
    return (DESTROY, 0, base(protocol, name))


def swap(protocol: int, name: str, other: str) -> Message:
    """Return a message that exchanges the contents of two sets; rules refer to the name."""
    return (SWAP, 0, base(protocol, name) + text_attribute(_SETNAME2, other))


def list_request(protocol: int, name: str = "", header_only: bool = False) -> bytes:
    """Return a LIST request for one set or all of them."""
    flags = _network_order(_FLAGS, _FLAG_LIST_HEADER) if header_only else b""
    return base(protocol, name) + flags


def _network_order(kind: int, number: int) -> bytes:
    return attribute(kind | NLA_F_NET_BYTEORDER, struct.pack("!I", number))


def _ports(number: int, kind: int) -> bytes:
    return attribute(kind | NLA_F_NET_BYTEORDER, _U16.pack(number))


class ElementEncoder:
    """Encodes elements in ipset's text as attributes; use one per set type, so that encoded addresses are reused."""

    def __init__(self, set_type: str) -> None:
        self._bitmap = set_type.startswith("bitmap:")
        self._addresses: dict[str, bytes] = {}

    def encode(self, element: str) -> bytes:
        """Encode an element such as ``10.0.0.1,tcp:80,10.1.0.0/16``. Raises ValueError for invalid text."""
        if self._bitmap:
            return _ports(_port(element), _PORT)
        parts = element.split(",")
        data = _nested_address(_IP, self._address(parts[0]))
        if len(parts) > 1:
            protocol, _colon, port = parts[1].partition(":")
            data += _ports(_port(port), _PORT) + attribute(_PROTO, bytes((_PROTOCOLS[protocol],)))
        if len(parts) > 2:
            address, slash, length = parts[2].partition("/")
            data += _nested_address(_IP2, self._address(address))
            if slash:
                data += attribute(_CIDR2, bytes((int(length),)))
        return data

    def _address(self, text: str) -> bytes:
        known = self._addresses.get(text)
        if known is None:
            raw = packed(text)
            if raw is None:
                raise ValueError(text)
            kind = _IPADDR_IPV4 if len(raw) == 4 else _IPADDR_IPV6
            known = self._addresses[text] = attribute(kind | NLA_F_NET_BYTEORDER, raw)
        return known


def _nested_address(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", len(payload) + 4, kind | 0x8000) + payload


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise ValueError(text)
    return number


class ElementBatch(NamedTuple):
    """One message and the elements in it, in order."""

    message: Message
    set: str
    elements: list[str]


def element_batches(
    protocol: int, command: int, name: str, set_type: str, elements: Iterable[str]
) -> Iterator[ElementBatch]:
    """Yield messages that add or remove (``command``: ADD or DELETE) elements of one set.

    Adding an existing element or removing a missing one is not an error. Raises KernelError for an invalid element.
    """
    encoder = ElementEncoder(set_type)
    data: list[bytes] = []
    texts: list[str] = []
    size = 0
    for element in elements:
        try:
            content = encoder.encode(element)
        except (ValueError, KeyError) as error:
            raise KernelError(f"set {name}: {element!r} is not an element of a set of type {set_type}") from error
        content = nested(_DATA, content + attribute(_LINENO, _U32.pack(len(texts))))
        if size + len(content) > _ELEMENT_BYTES_PER_MESSAGE:
            yield ElementBatch(_element_message(protocol, command, name, data), name, texts)
            data, texts, size = [], [], 0
            content = nested(_DATA, encoder.encode(element) + attribute(_LINENO, _U32.pack(0)))
        data.append(content)
        texts.append(element)
        size += len(content)
    if texts:
        yield ElementBatch(_element_message(protocol, command, name, data), name, texts)


def _element_message(protocol: int, command: int, name: str, data: Sequence[bytes]) -> Message:
    # The kernel writes the number of the refused element into the one at the level of the message.
    payload = base(protocol, name) + attribute(_LINENO, _U32.pack(0)) + nested(_ADT, *data)
    return (command, 0, payload)


def refused_element(error: MessageError, batch: ElementBatch) -> Optional[str]:
    """Return the element of the batch that the kernel refused; None if the kernel does not name it."""
    if len(error.payload) < 20:
        return None
    found = parse_attributes(memoryview(error.payload), 20, len(error.payload)).get(_LINENO)
    number = None if found is None or len(found) < 4 else int(_U32.unpack_from(found)[0])
    return batch.elements[number] if number is not None and number < len(batch.elements) else None


def listed_name(view: memoryview, start: int, end: int) -> str:
    """Return the name of the set in a list message; empty if it has no name."""
    found = parse_attributes(view, start + 4, end)
    return attribute_text(found[_SETNAME]) if _SETNAME in found else ""


def decode_header(view: memoryview, start: int, end: int) -> Optional[tuple[str, SetDefinition]]:
    """Return name and definition from a LIST answer; None if this part of the answer has none."""
    # Imported late: who lists only the names of sets needs no model of IPVS.
    from ...rendering.ipvs.model import SetDefinition

    found = parse_attributes(view, start + 4, end)
    if _TYPENAME not in found or _SETNAME not in found:
        return None
    options = nested_in(found, _DATA)
    kind = attribute_text(found[_TYPENAME])
    number = found[_FAMILY][0] if _FAMILY in found else socket.AF_UNSPEC
    family = _FAMILY_NAMES.get(number, "")
    limit = struct.unpack("!I", options[_MAXELEM])[0] if _MAXELEM in options else SetDefinition("", "").limit
    return attribute_text(found[_SETNAME]), SetDefinition(kind, family, limit)


def decode_elements(view: memoryview, start: int, end: int) -> list[str]:
    """Return the elements in a LIST answer, as ``ipset save`` prints them."""
    adt = parse_attributes(view, start + 4, end).get(_ADT)
    if adt is None:
        return []
    return [_decode_element(data) for _kind, data in each_attribute(adt, 0, len(adt))]


def _decode_element(data: memoryview) -> str:
    found = parse_attributes(data, 0, len(data))
    port = found.get(_PORT)
    address = found.get(_IP)
    if address is None:
        return str(_U16.unpack(port)[0]) if port is not None else ""
    text = unpacked(bytes(address[4:]))
    if port is not None:
        number = found[_PROTO][0] if _PROTO in found else 0
        text += f",{_PROTOCOL_NAMES.get(number, number)}:{_U16.unpack(port)[0]}"
    second = found.get(_IP2)
    if second is not None:
        text += f",{unpacked(bytes(second[4:]))}"
        length = found.get(_CIDR2)
        if length is not None and length[0] != (len(second) - 4) * 8:
            text += f"/{length[0]}"
    return text
