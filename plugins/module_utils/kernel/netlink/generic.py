# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lookup of the numbers of generic netlink families. Source: linux/genetlink.h.

A family has a number while its module is loaded; loaded again, it has another one.
"""

from __future__ import annotations

import struct
from typing import Optional

from ...base.errors import KernelError
from .attributes import attribute, attribute_text, parse_attributes, text_attribute
from .outcomes import Reply, is_missing, refusals_as
from .socket import NetlinkSocket

_CTRL_CMD_GETFAMILY = 3
_CTRL_ATTR_FAMILY_ID = 1
_CTRL_ATTR_FAMILY_NAME = 2
_GENL_ID_CTRL = 16
_HEADER = struct.pack("=BBH", _CTRL_CMD_GETFAMILY, 1, 0)
_NUMBER = struct.Struct("=H")


def _answer(sock: NetlinkSocket, question: bytes, name: str, wanted: int) -> Optional[memoryview]:
    """Return an attribute of the kernel's answer to a question about a family; None if there is no such family."""
    replies: list[Reply] = []
    with refusals_as(f"generic netlink family {name}", is_missing):
        replies = sock.request(_GENL_ID_CTRL, _HEADER + question)
    found = (parse_attributes(memoryview(reply.payload), 4, len(reply.payload)) for reply in replies)
    return next((attributes[wanted] for attributes in found if wanted in attributes), None)


def generic_family(sock: NetlinkSocket, name: str) -> int:
    """Return the number of a generic netlink family; ``sock`` is a NETLINK_GENERIC socket. Raises KernelError."""
    number = _answer(sock, text_attribute(_CTRL_ATTR_FAMILY_NAME, name), name, _CTRL_ATTR_FAMILY_ID)
    if number is None:
        reason = "its module is not loaded or not built"
        raise KernelError(f"the kernel has no generic netlink family {name}: {reason}")
    return int(_NUMBER.unpack(number)[0])


def has_number(sock: NetlinkSocket, name: str, number: int) -> bool:
    """Return whether a generic netlink family has this number. Raises KernelError.

    The question is about the number, so the kernel does not load the family's module to answer it.
    """
    question = attribute(_CTRL_ATTR_FAMILY_ID, _NUMBER.pack(number))
    found = _answer(sock, question, name, _CTRL_ATTR_FAMILY_NAME)
    return found is not None and attribute_text(found) == name
