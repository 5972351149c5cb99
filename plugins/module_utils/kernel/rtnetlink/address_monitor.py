# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Notifications of route netlink about addresses and links. Sources: rtnetlink(7), linux/rtnetlink.h."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Union

from ...base.addresses import unpacked
from ..netlink.attributes import attribute_text, parse_attributes
from ..netlink.listener import NetlinkListener
from ..netlink.protocol import NETLINK_ROUTE
from .addresses import RTM_DELADDR, RTM_NEWADDR, parse_address
from .ports import IFLA_IFNAME, LINK

RTM_DELLINK = 17
RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR = 1, 5, 9


class AddressEvent(NamedTuple):
    """An address was added to, or removed from, the interface with this index."""

    added: bool
    family: str
    address: str
    interface: int


class LinkRemoved(NamedTuple):
    """An interface was removed."""

    name: str


class AddressMonitor(NetlinkListener):
    """Listens for added and removed addresses and for removed links. Raises KernelError if no socket can be opened."""

    def __init__(self) -> None:
        groups = (RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR)
        super().__init__(NETLINK_ROUTE, groups, "routing netlink")

    def events(self) -> Iterator[Union[AddressEvent, LinkRemoved]]:
        """Yield the events since the last call, without waiting. Raises KernelError."""
        for kind, payload in self.notifications():
            if kind == RTM_DELLINK:
                attributes = parse_attributes(payload, LINK.size, len(payload))
                if IFLA_IFNAME in attributes:
                    yield LinkRemoved(attribute_text(attributes[IFLA_IFNAME]))
            elif kind in (RTM_NEWADDR, RTM_DELADDR):
                item = parse_address(payload)
                if item is not None:
                    yield AddressEvent(kind == RTM_NEWADDR, item.family, unpacked(item.packed), item.interface)
