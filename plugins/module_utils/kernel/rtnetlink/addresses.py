# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Addresses of interfaces over route netlink: of this network namespace, and at the other ends of veth pairs.

Sources: rtnetlink(7), linux/if_addr.h. The kernel looks into other network namespaces since Linux 4.20.
"""

from __future__ import annotations

import socket
import struct
from typing import Iterator, Mapping, NamedTuple, Optional

from ...base.addresses import IPV4, IPV6
from ..netlink.attributes import attribute, parse_attributes
from ..netlink.outcomes import NetlinkRefusal
from ..netlink.socket import NetlinkSocket
from .ports import LinkKind

RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
IFA_ADDRESS, IFA_LOCAL, IFA_CACHEINFO, _IFA_TARGET_NETNSID = 1, 2, 6, 10
#: struct ifaddrmsg: family, length of the prefix, flags, scope, index of the interface.
IFADDRMSG = struct.Struct("=BBBBI")
_FAMILIES: dict[int, str] = {socket.AF_INET: IPV4, socket.AF_INET6: IPV6}
_NUMBER = struct.Struct("=i")


class AddressMessage(NamedTuple):
    """An address of an interface, which is named by its index; ``packed``: in network order.

    ``namespace``: the number of the network namespace that the kernel has looked into, empty for this one.
    """

    family: str
    prefix_length: int
    scope: int
    interface: int
    packed: bytes
    namespace: bytes


def parse_address(payload: memoryview) -> Optional[AddressMessage]:
    """Return the address in the payload of a message; None if it is neither IPv4 nor IPv6.

    On a point-to-point interface IFA_ADDRESS is the peer, and IFA_LOCAL is ours.
    """
    number, prefix_length, _flags, scope, interface = IFADDRMSG.unpack_from(payload)
    attributes = parse_attributes(payload, IFADDRMSG.size, len(payload))
    raw = bytes(attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS) or b"")
    if number not in _FAMILIES or len(raw) not in (4, 16):
        return None
    return AddressMessage(
        family=_FAMILIES[number],
        prefix_length=prefix_length,
        scope=scope,
        interface=interface,
        packed=raw,
        namespace=bytes(attributes.get(_IFA_TARGET_NETNSID, b"")),
    )


def each_address(sock: NetlinkSocket, family: int = socket.AF_UNSPEC, request: bytes = b"") -> Iterator[AddressMessage]:
    """Yield the addresses of all interfaces. Raises NetlinkRefusal, KernelError.

    ``sock``: a NETLINK_ROUTE socket. ``request``: further attributes of the request.
    """
    for view, kind, _start, _end in sock.dump(RTM_GETADDR, IFADDRMSG.pack(family, 0, 0, 0, 0) + request):
        found = parse_address(view) if kind == RTM_NEWADDR else None
        if found is not None:
            yield found


def addresses_behind(sock: NetlinkSocket, ports: Mapping[int, LinkKind]) -> dict[bytes, set[int]]:
    """Return the indexes of the ports behind whose other ends each address is. Raises KernelError.

    ``sock``: a NETLINK_ROUTE socket, whose checks of requests become strict: without, the kernel ignores the namespace.
    """
    sock.check_strictly()
    found: dict[bytes, set[int]] = {}
    for number, port in ports.items():
        if port.namespace >= 0:
            for family in (socket.AF_INET, socket.AF_INET6):
                for address in _peer_addresses(sock, family, port):
                    found.setdefault(address, set()).add(number)
    return found


def _peer_addresses(sock: NetlinkSocket, family: int, port: LinkKind) -> Iterator[bytes]:
    wanted = _NUMBER.pack(port.namespace)
    try:
        for item in each_address(sock, family, attribute(_IFA_TARGET_NETNSID, wanted)):
            # An older kernel answers with the addresses of this namespace.
            if item.namespace == wanted and item.interface == port.peer:
                yield item.packed
    except NetlinkRefusal:
        # The namespace is gone, or the kernel cannot look into others.
        return
