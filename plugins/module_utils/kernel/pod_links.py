# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The interfaces that lead to pods of this node and to nothing else.

Link-local traffic of pods differs from that of uplinks of the node by its interface only. So one counts if it is
the node's end of a veth pair with a route to just one address, or a bridge with nothing but such ends as ports; and
never if any gateway is reached through it. Pods that are on an uplink itself (macvlan, ipvlan, a bridge with an uplink
as port) have none.
"""

from __future__ import annotations

import socket
from typing import Dict, FrozenSet, Iterable, NamedTuple

from ..addresses import FAMILIES, IPV4, IPV6, address_bits, family_of
from .facts import read_text
from .netlink.protocol import NETLINK_ROUTE
from .netlink.socket import NetlinkSocket
from .rtnetlink.ports import LinkKind, link_kinds
from .rtnetlink.routes import direct_route

_BRIDGE, _VETH = "bridge", "veth"
_ROUTES = {IPV4: "/proc/thread-self/net/route", IPV6: "/proc/thread-self/net/ipv6_route"}
#: In the lines of these files: the columns of the interface and of the flags.
_COLUMNS = {IPV4: (0, 3), IPV6: (9, 8)}
_RTF_GATEWAY = 0x2


class PodLink(NamedTuple):
    """An interface that leads to a pod. ``is_bridge``: other pods may be on it, too."""

    interface: str
    number: int
    is_bridge: bool


class PodLinks:
    """Finds interfaces by the addresses of pods, and remembers those that it has found for as long as they exist."""

    def __init__(self) -> None:
        self._known: Dict[str, PodLink] = {}

    def forget(self) -> None:
        """Determine all interfaces again the next time: the ports of a bridge and its routes may have changed."""
        self._known = {}

    def find(self, addresses: Iterable[str]) -> Dict[str, PodLink]:
        """Return the interfaces of addresses; without those to which no such interface leads. Raises KernelError."""
        known = {address: self._known.get(address) for address in addresses}
        found = {address: link for address, link in known.items() if link is not None and _exists(link)}
        missing = [address for address in known if address not in found]
        if missing:
            found.update(_found(missing))
        self._known = found
        return dict(found)


def _exists(link: PodLink) -> bool:
    try:
        return socket.if_nametoindex(link.interface) == link.number
    except OSError:
        return False


def _found(addresses: Iterable[str]) -> Dict[str, PodLink]:
    with NetlinkSocket(NETLINK_ROUTE) as sock:
        routes = {address: direct_route(sock, address) for address in addresses}
        if not any(routes.values()):
            return {}
        kinds = link_kinds(sock)
    gateways = _with_gateways()
    found = {}
    for address, route in routes.items():
        own = kinds.get(route.number) if route is not None else None
        # The kernel accepts any bytes in a name; none of these is the name of an interface of pods.
        if route is None or own is None or own.name in gateways or not own.name.isascii():
            continue
        is_host = route.prefix_length == address_bits(family_of(address))
        if own.kind == _BRIDGE and _holds_only_pods(kinds, route.number):
            found[address] = PodLink(own.name, route.number, True)
        elif own.kind == _VETH and is_host and not own.master:
            found[address] = PodLink(own.name, route.number, False)
    return found


def _holds_only_pods(kinds: Dict[int, LinkKind], bridge: int) -> bool:
    return all(item.kind == _VETH for item in kinds.values() if item.master == bridge)


def _with_gateways() -> FrozenSet[str]:
    """Return the names of interfaces through which the main table reaches a gateway."""
    found = set()
    for family in FAMILIES:
        name, flags = _COLUMNS[family]
        for line in (read_text(_ROUTES[family]) or "").splitlines():
            words = line.split()
            # The first line of one of the files is a heading.
            if len(words) > name and words[flags] != "Flags" and int(words[flags], 16) & _RTF_GATEWAY:
                found.add(words[name])
    return frozenset(found)
