# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way from the node to an address, over route netlink: whether it is local, or else through which interface."""

from __future__ import annotations

import errno
import socket
import struct
from typing import Iterator, NamedTuple, Optional

from ...base.addresses import IPV6, address_bits, family_of, packed
from ..netlink.attributes import attribute, parse_attributes
from ..netlink.outcomes import refusals_as
from ..netlink.socket import NetlinkSocket

_RTM_NEWROUTE, _RTM_GETROUTE = 24, 26
# struct rtmsg: family, lengths of destination and source, type of service, table, protocol, scope, type, flags.
_ROUTE = struct.Struct("=BBBBBBBBI")
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_MULTIPATH, _RTA_VIA = 1, 4, 5, 9, 18
# struct rtnexthop: length with its attributes, flags, hops, interface.
_NEXT_HOP = struct.Struct("=HBBi")
_RTN_UNICAST, _RTN_LOCAL = 1, 2
# Return the route of the table instead of one to the address alone.
_RTM_F_FIB_MATCH = 0x2000
# No route, and routes of type unreachable, prohibit and blackhole.
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)


class Way(NamedTuple):
    """``local``: the address is one of the node's own. ``interface``: towards it, empty if no route leads there."""

    local: bool
    interface: str


class DirectRoute(NamedTuple):
    """A route to a link without a gateway: the index of its interface, and the length of its prefix."""

    number: int
    prefix_length: int


def way_to(sock: NetlinkSocket, address: str) -> Way:
    """Return the way to a canonical address. ``sock`` is a NETLINK_ROUTE socket. Raises KernelError."""
    view = _route_to(sock, address, 0)
    if view is None:
        return Way(False, "")
    oif = parse_attributes(view, _ROUTE.size, len(view)).get(_RTA_OIF)
    try:
        name = socket.if_indextoname(struct.unpack("=I", oif)[0]) if oif else ""
    except OSError:
        name = ""
    return Way(_ROUTE.unpack_from(view)[7] == _RTN_LOCAL, name)


def direct_route(sock: NetlinkSocket, address: str) -> Optional[DirectRoute]:
    """Return the route to a canonical address that is on a link of the node, else None. Raises KernelError."""
    view = _route_to(sock, address, _RTM_F_FIB_MATCH)
    if view is None:
        return None
    attributes = parse_attributes(view, _ROUTE.size, len(view))
    oif = attributes.get(_RTA_OIF)
    _family, length, _source, _tos, _table, _protocol, _scope, kind, _flags = _ROUTE.unpack_from(view)
    if oif is None or kind != _RTN_UNICAST or _RTA_GATEWAY in attributes or _RTA_VIA in attributes:
        return None
    return DirectRoute(struct.unpack("=I", oif)[0], length)


def interfaces_with_gateways(sock: NetlinkSocket) -> set[int]:
    """Return the indexes of interfaces through which any table reaches a gateway. Raises KernelError."""
    found: set[int] = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        for view, kind, start, end in sock.dump(_RTM_GETROUTE, _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)):
            if kind == _RTM_NEWROUTE:
                found.update(_gateway_interfaces(memoryview(view)[start:end]))
    return found


def _gateway_interfaces(route: memoryview) -> Iterator[int]:
    attributes = parse_attributes(route, _ROUTE.size, len(route))
    if _RTA_OIF in attributes and (_RTA_GATEWAY in attributes or _RTA_VIA in attributes):
        yield struct.unpack("=I", attributes[_RTA_OIF])[0]
    hops = attributes.get(_RTA_MULTIPATH, memoryview(b""))
    while hops:
        length, _flags, _hops, number = _NEXT_HOP.unpack_from(hops)
        yield number
        hops = hops[(length + 3) & ~3 :]


def _route_to(sock: NetlinkSocket, address: str, flags: int) -> Optional[memoryview]:
    """Return the kernel's description of the route to an address; None if there is no route."""
    family = family_of(address)
    number = socket.AF_INET6 if family == IPV6 else socket.AF_INET
    request = _ROUTE.pack(number, address_bits(family), 0, 0, 0, 0, 0, 0, flags)
    with refusals_as(f"the route to {address} cannot be read", lambda error: error.errno in _NO_ROUTE):
        for reply in sock.request(_RTM_GETROUTE, request + attribute(_RTA_DST, packed(address) or b"")):
            return memoryview(reply.payload)
    return None
