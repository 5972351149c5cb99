# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The interfaces that lead to pods of this node and to nothing else.

Link-local traffic of pods, and what they forge, differs from that of uplinks by its interface only. So one counts if it
is the node's end of a veth pair with a route to just one address, or a bridge with nothing but such ends as ports; and
never if any gateway is reached through it, by any routing table. Pods that are on an uplink itself (macvlan, ipvlan, a
bridge with an uplink as port) have none.
"""

from __future__ import annotations

import socket
from typing import Dict, Iterable, NamedTuple

from ..addresses import address_bits, family_of
from .netlink.protocol import NETLINK_ROUTE
from .netlink.socket import NetlinkSocket
from .rtnetlink.ports import LinkKind, link_kinds
from .rtnetlink.routes import direct_route, interfaces_with_gateways

_BRIDGE, _VETH = "bridge", "veth"


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
        existing = set(socket.if_nameindex())
        found = {address: link for address, link in known.items() if link and (link.number, link.interface) in existing}
        missing = [address for address in known if address not in found]
        if missing:
            found.update(_found(missing))
        self._known = found
        return dict(found)


def _found(addresses: Iterable[str]) -> Dict[str, PodLink]:
    with NetlinkSocket(NETLINK_ROUTE) as sock:
        routes = {address: direct_route(sock, address) for address in addresses}
        if not any(routes.values()):
            return {}
        kinds = link_kinds(sock)
        gateways = interfaces_with_gateways(sock)
    found = {}
    for address, route in routes.items():
        own = kinds.get(route.number) if route is not None else None
        # The kernel accepts any bytes in a name; none of these is the name of an interface of pods.
        if route is None or own is None or route.number in gateways or not own.name.isascii():
            continue
        # The port of a bridge, or in a routing domain of its own (VRF), of which this route says nothing.
        if own.master:
            continue
        is_host = route.prefix_length == address_bits(family_of(address))
        if own.kind == _BRIDGE and _holds_only_pods(kinds, route.number):
            found[address] = PodLink(own.name, route.number, True)
        elif own.kind == _VETH and is_host:
            found[address] = PodLink(own.name, route.number, False)
    return found


def _holds_only_pods(kinds: Dict[int, LinkKind], bridge: int) -> bool:
    return all(item.kind == _VETH for item in kinds.values() if item.master == bridge)
