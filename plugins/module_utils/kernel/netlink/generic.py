# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lookup of the numbers of generic netlink families. Source: linux/genetlink.h.

A family has a number while its module is loaded; loaded again, it has another one.
"""

from __future__ import annotations

import struct

from ...base.errors import KernelError
from .attributes import attribute, attribute_text, parse_attributes, text_attribute
from .outcomes import NetlinkRefusal, is_missing
from .socket import NetlinkSocket

_CTRL_CMD_GETFAMILY = 3
_CTRL_ATTR_FAMILY_ID = 1
_CTRL_ATTR_FAMILY_NAME = 2
_GENL_ID_CTRL = 16
_HEADER = struct.pack("=BBH", _CTRL_CMD_GETFAMILY, 1, 0)
_NUMBER = struct.Struct("=H")


def generic_family(sock: NetlinkSocket, name: str) -> int:
    """Return the number of a generic netlink family; ``sock`` is a NETLINK_GENERIC socket. Raises KernelError."""
    try:
        replies = sock.request(_GENL_ID_CTRL, _HEADER + text_attribute(_CTRL_ATTR_FAMILY_NAME, name))
    except NetlinkRefusal as refusal:
        if not is_missing(refusal.error):
            raise KernelError(f"generic netlink family {name}: {refusal.error}") from refusal
        reason = "its module is not loaded or not built"
        raise KernelError(f"the kernel has no generic netlink family {name}: {reason}") from refusal
    for reply in replies:
        number = parse_attributes(memoryview(reply.payload), 4, len(reply.payload)).get(_CTRL_ATTR_FAMILY_ID)
        if number is not None:
            return int(_NUMBER.unpack(number)[0])
    raise KernelError(f"the kernel gave no number for the generic netlink family {name}")


def has_number(sock: NetlinkSocket, name: str, number: int) -> bool:
    """Return whether a generic netlink family has this number. Raises KernelError.

    The question is about the number, so the kernel does not load the family's module to answer it.
    """
    try:
        replies = sock.request(_GENL_ID_CTRL, _HEADER + attribute(_CTRL_ATTR_FAMILY_ID, _NUMBER.pack(number)))
    except NetlinkRefusal as refusal:
        if is_missing(refusal.error):
            return False
        raise KernelError(f"generic netlink family {number}: {refusal.error}") from refusal
    for reply in replies:
        found = parse_attributes(memoryview(reply.payload), 4, len(reply.payload)).get(_CTRL_ATTR_FAMILY_NAME)
        if found is not None:
            return attribute_text(found) == name
    return False
