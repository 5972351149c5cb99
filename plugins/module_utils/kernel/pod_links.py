# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The interfaces that lead to pods of this node and to nothing else.

Link-local traffic of pods, and what they forge, differs from that of uplinks by its interface only. So one counts if it
is the node's end of a veth pair with a route to just one address, or a bridge with nothing but such ends as ports; and
never if any gateway is reached through it, by any routing table. Pods that are on an uplink itself (macvlan, ipvlan, a
bridge with an uplink as port) have none.

Which port of a bridge an address belongs to, the network namespace at the other end says: there the network plugin has
configured it, and a pod without CAP_NET_ADMIN cannot. What neighbours or frames claim is not believed.
"""

from __future__ import annotations

import socket
from typing import Iterable, NamedTuple, Optional

from ..base.addresses import address_bits, family_of, packed
from .netlink.protocol import NETLINK_ROUTE
from .netlink.socket import NetlinkSocket
from .rtnetlink.addresses import addresses_behind
from .rtnetlink.ports import LinkKind, link_kinds, trunk_ports
from .rtnetlink.routes import DirectRoute, direct_route, interfaces_with_gateways

_BRIDGE, _VETH = "bridge", "veth"


#: The index and the name of the port of a bridge.
Port = tuple[int, str]


class PodLink(NamedTuple):
    """An interface that leads to a pod.

    ``is_bridge``: other pods may be on it, too. ``port``: that of the bridge behind which the pod is; None if unknown.
    """

    interface: str
    number: int
    is_bridge: bool
    port: Optional[Port] = None


class PodLinks:
    """Finds interfaces by the addresses of pods, and remembers those that it has found for as long as they exist.

    ``ports``: of the bridges among them. The value is whether the operator has given it VLANs with tags.
    ``complete``: each address of the last call has an interface, and a port if that is a bridge.
    """

    def __init__(self) -> None:
        self.ports: dict[Port, bool] = {}
        self.complete = True
        self._known: dict[str, PodLink] = {}
        #: A pod that later adds the address of another one does not get it.
        self._first: dict[str, Port] = {}

    def forget(self) -> None:
        """Determine all interfaces again the next time: the ports of a bridge and its routes may have changed."""
        self._known = {}
        self.ports = {}

    def find(self, addresses: Iterable[str]) -> dict[str, PodLink]:
        """Return the interfaces of addresses; without those to which no such interface leads. Raises KernelError."""
        known = {address: self._known.get(address) for address in addresses}
        existing = set(socket.if_nameindex())
        found = {
            address: link
            for address, link in known.items()
            if link
            and (link.number, link.interface) in existing
            and (link.port in existing if link.is_bridge else link.port is None)
        }
        self.ports = {port: has_trunk for port, has_trunk in self.ports.items() if port in existing}
        missing = [address for address in known if address not in found]
        if missing:
            found.update(self._found(missing))
        self._known = found
        self.complete = len(found) == len(known) and all(link.port or not link.is_bridge for link in found.values())
        self._first = {address: link.port for address, link in found.items() if link.port is not None}
        return dict(found)

    def _found(self, addresses: list[str]) -> dict[str, PodLink]:
        with NetlinkSocket(NETLINK_ROUTE) as sock:
            routes = {address: direct_route(sock, address) for address in addresses}
            if not any(routes.values()):
                return {}
            kinds = link_kinds(sock)
            gateways = interfaces_with_gateways(sock)
            found = _links(routes, kinds, gateways)
            return self._with_ports(sock, found, kinds)

    def _with_ports(
        self, sock: NetlinkSocket, found: dict[str, PodLink], kinds: dict[int, LinkKind]
    ) -> dict[str, PodLink]:
        """Return the links with the ports of bridges; without one where several pods have the address."""
        bridges = {link.number for link in found.values() if link.is_bridge}
        ports = {number: item for number, item in kinds.items() if item.master in bridges and item.name.isascii()}
        trunks = trunk_ports(sock) if ports else set()
        self.ports.update({(number, item.name): number in trunks for number, item in ports.items()})
        behind = addresses_behind(sock, ports) if ports else {}
        for address, link in found.items():
            claims = behind.get(packed(address) or b"", set())
            first = self._first.get(address)
            number = first[0] if first is not None and first[0] in claims else min(claims, default=0)
            if len(claims) == 1 or (first is not None and number == first[0]):
                found[address] = link._replace(port=(number, ports[number].name))
        return found


def _links(
    routes: dict[str, Optional[DirectRoute]], kinds: dict[int, LinkKind], gateways: set[int]
) -> dict[str, PodLink]:
    found: dict[str, PodLink] = {}
    for address, route in routes.items():
        own = kinds.get(route.number) if route is not None else None
        # The kernel accepts any bytes in a name; none of these is the name of an interface of pods.
        if route is None or own is None or route.number in gateways or not own.name.isascii():
            continue
        # The port of a bridge, or in a routing domain of its own (VRF), of which this route says nothing.
        if own.master:
            continue
        is_host = route.prefix_length == address_bits(family_of(address))
        ports = (item for item in kinds.values() if item.master == route.number)
        if own.kind == _BRIDGE and all(port.kind == _VETH for port in ports):
            found[address] = PodLink(own.name, route.number, True)
        elif own.kind == _VETH and is_host:
            found[address] = PodLink(own.name, route.number, False)
    return found
