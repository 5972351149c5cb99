# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Numbers and the message header of the netlink protocol. Source: linux/netlink.h."""

from __future__ import annotations

import struct

NETLINK_ROUTE = 0
NETLINK_NETFILTER = 12
NETLINK_GENERIC = 16

NLM_F_REQUEST = 0x1
NLM_F_ACK = 0x4
NLM_F_ECHO = 0x8
NLM_F_DUMP_INTR = 0x10
NLM_F_EXCL = 0x200
NLM_F_CREATE = 0x400
NLM_F_APPEND = 0x800
NLM_F_DUMP = 0x300

NLMSG_ERROR = 2
NLMSG_DONE = 3

SOL_NETLINK = 270
NETLINK_ADD_MEMBERSHIP = 1
NETLINK_CAP_ACK = 10
NETLINK_EXT_ACK = 11
NETLINK_GET_STRICT_CHK = 12

#: ``struct nlmsghdr``: length, type, flags, sequence number, port.
HEADER = struct.Struct("=IHHII")

#: A message: type, flags, and what follows the header.
Message = tuple[int, int, bytes]
#: A message in a buffer: the buffer, the message's type, start and end of what follows the header.
Slice = tuple[memoryview, int, int, int]
