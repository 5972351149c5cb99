# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kinds of all network devices, and which of them are ports of others, over route netlink."""

from __future__ import annotations

import socket
import struct
from typing import Mapping, NamedTuple

from ..netlink.attributes import attribute, attribute_text, each_attribute, nested_in, parse_attributes
from ..netlink.socket import NetlinkSocket

RTM_NEWLINK, RTM_GETLINK = 16, 18
IFLA_IFNAME, _IFLA_LINK, _IFLA_MASTER, IFLA_LINKINFO, _IFLA_LINK_NETNSID, IFLA_INFO_KIND = 3, 5, 10, 18, 37, 1
#: struct ifinfomsg of linux/rtnetlink.h: family, type, index, flags, changed flags.
LINK = struct.Struct("=BxHiII")
_NUMBER = struct.Struct("=i")
# linux/if_bridge.h, linux/rtnetlink.h
_IFLA_AF_SPEC, _IFLA_EXT_MASK, _IFLA_BRIDGE_VLAN_INFO = 26, 29, 2
_WITH_VLANS, _UNTAGGED = 2, 4
_VLAN = struct.Struct("=HH")


class LinkKind(NamedTuple):
    """A device: its name, its kind (``veth``, ``bridge``; empty for hardware), and the index of its master, or 0.

    ``peer``: the index of the other end of a pair, or 0. ``namespace``: the number by which this network namespace
    knows that of the other end; negative if it is this one.
    """

    name: str
    kind: str
    master: int
    peer: int = 0
    namespace: int = -1


def kind_of(attributes: Mapping[int, memoryview]) -> str:
    """Return the kind among the attributes of a device, empty for hardware."""
    kind = nested_in(attributes, IFLA_LINKINFO).get(IFLA_INFO_KIND)
    return "" if kind is None else attribute_text(kind)


def link_kinds(sock: NetlinkSocket) -> dict[int, LinkKind]:
    """Return all devices by index. ``sock`` is a NETLINK_ROUTE socket. Raises KernelError."""
    found = {}
    for view, kind, start, end in sock.dump(RTM_GETLINK, LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        if kind == RTM_NEWLINK:
            found[LINK.unpack_from(view, start)[2]] = _described(memoryview(view)[start:end])
    return found


def trunk_ports(sock: NetlinkSocket) -> set[int]:
    """Return the indexes of the ports of bridges that send frames of some VLAN with its tag. Raises KernelError.

    Without filters for VLANs in the kernel there are none. ``sock`` is a NETLINK_ROUTE socket.
    """
    found = set()
    request = LINK.pack(socket.AF_BRIDGE, 0, 0, 0, 0) + attribute(_IFLA_EXT_MASK, _NUMBER.pack(_WITH_VLANS))
    for view, _kind, start, end in sock.dump(RTM_GETLINK, request):
        about = parse_attributes(memoryview(view), start + LINK.size, end).get(_IFLA_AF_SPEC, memoryview(b""))
        for kind, raw in each_attribute(about, 0, len(about)):
            if kind == _IFLA_BRIDGE_VLAN_INFO and not _VLAN.unpack_from(raw)[0] & _UNTAGGED:
                found.add(LINK.unpack_from(view, start)[2])
    return found


def _described(payload: memoryview) -> LinkKind:
    attributes = parse_attributes(payload, LINK.size, len(payload))

    def number(attribute: int, default: int) -> int:
        return int(_NUMBER.unpack(attributes[attribute])[0]) if attribute in attributes else default

    return LinkKind(
        attribute_text(attributes[IFLA_IFNAME]),
        kind_of(attributes),
        number(_IFLA_MASTER, 0),
        number(_IFLA_LINK, 0),
        number(_IFLA_LINK_NETNSID, -1),
    )
