# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kinds of all network devices, and which of them are ports of others, over route netlink."""

from __future__ import annotations

import socket
import struct
from typing import Dict, NamedTuple

from ..netlink.attributes import attribute_text, parse_attributes
from ..netlink.socket import NetlinkSocket

_RTM_NEWLINK, _RTM_GETLINK = 16, 18
_IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 10, 18, 1
_LINK = struct.Struct("=BxHiII")
_NUMBER = struct.Struct("=I")


class LinkKind(NamedTuple):
    """A device: its name, its kind (``veth``, ``bridge``; empty for hardware), and the index of its master, or 0."""

    name: str
    kind: str
    master: int


def link_kinds(sock: NetlinkSocket) -> Dict[int, LinkKind]:
    """Return all devices by index. ``sock`` is a NETLINK_ROUTE socket. Raises KernelError."""
    found = {}
    for view, kind, start, end in sock.dump(_RTM_GETLINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        if kind == _RTM_NEWLINK:
            found[_LINK.unpack_from(view, start)[2]] = _described(memoryview(view)[start:end])
    return found


def _described(payload: memoryview) -> LinkKind:
    attributes = parse_attributes(payload, _LINK.size, len(payload))
    info = attributes.get(_IFLA_LINKINFO)
    kind = None if info is None else parse_attributes(info, 0, len(info)).get(_IFLA_INFO_KIND)
    master = attributes.get(_IFLA_MASTER)
    return LinkKind(
        attribute_text(attributes[_IFLA_IFNAME]),
        "" if kind is None else attribute_text(kind),
        0 if master is None else int(_NUMBER.unpack(master)[0]),
    )
