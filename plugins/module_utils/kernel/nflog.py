# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the packets that rules send to an NFLOG group. Source: linux/netfilter/nfnetlink_log.h."""

from __future__ import annotations

import os
import struct
from typing import Iterator, NamedTuple, Optional

from ..base.closing import closed_on_error
from ..base.errors import KernelError
from .netlink.attributes import attribute, attribute_text, parse_attributes
from .netlink.listener import NetlinkListener
from .netlink.protocol import HEADER, NETLINK_NETFILTER
from .nftables.attributes import GENMSG_BYTES

_PACKET, _CONFIG = 0x400, 0x401
_CFG_CMD, _CFG_MODE = 1, 2
_BIND = b"\x01"
_COPY_PACKET = 2
_PAYLOAD, _PREFIX = 9, 10
_NLMSG_ERROR, _REQUEST_WITH_ACK = 2, 5
_WITH_PORTS = (6, 17, 132)
#: IPv6 extension headers that precede the transport header: hop-by-hop, routing, destination options.
_EXTENSIONS = (0, 43, 60)


class LoggedPacket(NamedTuple):
    """The beginning of a packet. ``prefix``: of the rule that logged it. ``port``: the destination port, 0 if none."""

    prefix: str
    source: bytes
    destination: bytes
    protocol: int
    port: int


def parse_packet(prefix: str, data: bytes) -> Optional[LoggedPacket]:
    """Return the addresses, protocol and port of an IP packet; None if it is too short."""
    version = data[0] >> 4 if data else 0
    if version == 4 and len(data) >= 20:
        protocol, source, destination, position = data[9], data[12:16], data[16:20], (data[0] & 15) * 4
    elif version == 6 and len(data) >= 40:
        protocol, source, destination, position = data[6], data[8:24], data[24:40], 40
        while protocol in _EXTENSIONS and len(data) >= position + 2:
            protocol, position = data[position], position + (data[position + 1] + 1) * 8
    else:
        return None
    has_port = protocol in _WITH_PORTS and len(data) >= position + 4
    port = int.from_bytes(data[position + 2 : position + 4], "big") if has_port else 0
    return LoggedPacket(prefix, source, destination, protocol, port)


class PacketLog(NetlinkListener):
    """The reader of one NFLOG group in the network namespace of the calling thread; a group has only one.

    Raises KernelError if another program reads the group, or without the right to.
    """

    def __init__(self, group: int) -> None:
        self._name = f"NFLOG group {group}"
        super().__init__(NETLINK_NETFILTER, (), self._name)
        header = struct.pack("!BBH", 0, 0, group)
        mode = struct.pack("!IBB", 0, _COPY_PACKET, 0)
        with closed_on_error(self):
            for part in (attribute(_CFG_CMD, _BIND), attribute(_CFG_MODE, mode)):
                body = header + part
                message = HEADER.pack(HEADER.size + len(body), _CONFIG, _REQUEST_WITH_ACK, 1, 0) + body
                self.send(message)
                # The kernel answers before the call to send it returns.
                list(self.packets())

    def packets(self) -> Iterator[LoggedPacket]:
        """Yield the packets that have arrived, without waiting. Raises KernelError."""
        for notification in self.notifications():
            payload = notification.payload
            if notification.kind == _NLMSG_ERROR:
                (code,) = struct.unpack_from("=i", payload)
                if code:
                    raise KernelError(f"{self._name}: {os.strerror(-code)}")
            elif notification.kind == _PACKET:
                found = parse_attributes(payload, GENMSG_BYTES, len(payload))
                if _PAYLOAD in found:
                    prefix = attribute_text(found[_PREFIX]) if _PREFIX in found else ""
                    packet = parse_packet(prefix, bytes(found[_PAYLOAD]))
                    if packet is not None:
                        yield packet
