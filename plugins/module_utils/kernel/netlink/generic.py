# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lookup of the numbers of generic netlink families. Source: linux/genetlink.h."""

from __future__ import annotations

import struct

from ...errors import KernelError
from .attributes import parse_attributes, text_attribute
from .outcomes import NetlinkRefusal, is_missing
from .socket import NetlinkSocket

_CTRL_CMD_GETFAMILY = 3
_CTRL_ATTR_FAMILY_ID = 1
_CTRL_ATTR_FAMILY_NAME = 2
_GENL_ID_CTRL = 16


def generic_family(sock: NetlinkSocket, name: str) -> int:
    """Return the number of a generic netlink family; ``sock`` is a NETLINK_GENERIC socket. Raises KernelError."""
    payload = struct.pack("=BBH", _CTRL_CMD_GETFAMILY, 1, 0) + text_attribute(_CTRL_ATTR_FAMILY_NAME, name)
    try:
        replies = sock.request(_GENL_ID_CTRL, payload)
    except NetlinkRefusal as refusal:
        if not is_missing(refusal.error):
            raise KernelError(f"generic netlink family {name}: {refusal.error}") from refusal
        reason = "its module is not loaded or not built"
        raise KernelError(f"the kernel has no generic netlink family {name}: {reason}") from refusal
    for reply in replies:
        number = parse_attributes(memoryview(reply.payload), 4, len(reply.payload)).get(_CTRL_ATTR_FAMILY_ID)
        if number is not None:
            return int(struct.unpack("=H", number)[0])
    raise KernelError(f"the kernel gave no number for the generic netlink family {name}")
