# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The addresses at the other ends of veth pairs, in the network namespaces of their pods (Linux 4.20 and later)."""

from __future__ import annotations

import socket
import struct
from typing import Dict, Iterable, Mapping, Set

from ..netlink.attributes import attribute, parse_attributes
from ..netlink.outcomes import NetlinkRefusal
from ..netlink.socket import NetlinkSocket
from .ports import LinkKind

# linux/rtnetlink.h, linux/if_addr.h
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_IFA_ADDRESS, _IFA_LOCAL, _IFA_TARGET_NETNSID = 1, 2, 10
_HEADER = struct.Struct("=BBBBI")
_NUMBER = struct.Struct("=i")


def addresses_behind(sock: NetlinkSocket, ports: Mapping[int, LinkKind]) -> Dict[bytes, Set[int]]:
    """Return the indexes of the ports behind whose other ends each address is. Raises KernelError.

    ``sock``: a NETLINK_ROUTE socket, whose checks of requests become strict: without, the kernel ignores the namespace.
    """
    sock.check_strictly()
    found: Dict[bytes, Set[int]] = {}
    for number, port in ports.items():
        if port.namespace >= 0:
            for family in (socket.AF_INET, socket.AF_INET6):
                for address in _addresses(sock, family, port):
                    found.setdefault(address, set()).add(number)
    return found


def _addresses(sock: NetlinkSocket, family: int, port: LinkKind) -> Iterable[bytes]:
    wanted = _NUMBER.pack(port.namespace)
    try:
        slices = sock.dump(_RTM_GETADDR, _HEADER.pack(family, 0, 0, 0, 0) + attribute(_IFA_TARGET_NETNSID, wanted))
    except NetlinkRefusal:
        # The namespace is gone, or the kernel cannot look into others.
        return
    for view, kind, start, end in slices:
        attributes = parse_attributes(view, start + _HEADER.size, end)
        # An older kernel answers with the addresses of this namespace.
        answered = bytes(attributes.get(_IFA_TARGET_NETNSID, b""))
        if kind == _RTM_NEWADDR and answered == wanted:
            own = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
            if own is not None and _HEADER.unpack_from(view, start)[4] == port.peer:
                yield bytes(own)
