# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the kernel answers to netlink messages: errors, each with the place of its message, and replies.

Sources: netlink(7), linux/netlink.h (struct nlmsgerr, extended acknowledgements).
"""

from __future__ import annotations

import errno
import os
import struct
from typing import List, NamedTuple

from ..errors import KernelError
from .attributes import attribute_text, parse_attributes

_NLM_F_CAPPED = 0x100
_NLM_F_ACK_TLVS = 0x200
_NLMSGERR_ATTR_MSG = 1
_LENGTH = struct.Struct("=I")
#: ESRCH: IPVS, of a virtual server; EADDRNOTAVAIL and ENXIO: of an address; ENODEV: of a device.
_MISSING = frozenset((errno.ENOENT, errno.ESRCH, errno.ENODEV, errno.ENXIO, errno.EADDRNOTAVAIL))
_TRANSIENT = frozenset(
    (errno.ENOENT, errno.EEXIST, errno.EBUSY, errno.ENOBUFS, errno.ERESTART, errno.EINTR, errno.EAGAIN)
)


class MessageError(NamedTuple):
    """The kernel refused one message.

    ``position``: its place among the messages given, from 0; ``errno``: positive number (subsystems add their own from
    4096 on); ``text``: what the kernel said in words, often empty; ``payload``: what follows the number in ``struct
    nlmsgerr``, the header of the message refused and, for subsystems that answer on their own, its copy.
    """

    position: int
    errno: int
    text: str
    payload: bytes

    def __str__(self) -> str:
        return f"{errno_text(self.errno)}: {self.text}" if self.text else errno_text(self.errno)


def is_missing(error: MessageError) -> bool:
    """Whether the object of a request, or what it belongs to, does not exist."""
    return error.errno in _MISSING


def is_existing(error: MessageError) -> bool:
    """Whether what was to be made exists already."""
    return error.errno == errno.EEXIST


def is_busy(error: MessageError) -> bool:
    """Whether something still refers to the object of a request."""
    return error.errno == errno.EBUSY


def is_forbidden(error: MessageError) -> bool:
    """Whether the caller lacks the right, as a rule CAP_NET_ADMIN."""
    return error.errno == errno.EPERM


def is_interrupted(error: MessageError) -> bool:
    """Whether the same request may succeed at once, because something interrupted it."""
    return error.errno == errno.EINTR


def is_unsupported(error: MessageError) -> bool:
    """Whether the kernel has no such subsystem, address family or kind of object."""
    return error.errno in (errno.EOPNOTSUPP, errno.EAFNOSUPPORT)


def is_not_understood(error: MessageError) -> bool:
    """Whether the kernel does not know the request or an attribute of it: an older kernel, or no such subsystem."""
    return error.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def is_transient(error: MessageError) -> bool:
    """Whether another program changed the same objects meanwhile, or the kernel was short of memory for a moment."""
    return error.errno in _TRANSIENT


class Reply(NamedTuple):
    """A message that answers the message at ``position``: its type, and its payload without the netlink header."""

    position: int
    type: int
    payload: bytes


class Outcome(NamedTuple):
    """What came back from a transaction: refused messages in their order, and answers other than acknowledgements."""

    errors: List[MessageError]
    replies: List[Reply]


def errno_text(number: int) -> str:
    """An error number in words, e.g. ``File exists (EEXIST)``."""
    name = errno.errorcode.get(number)
    return f"{os.strerror(number)} ({name})" if name else f"error {number}"


def extended_text(payload: bytes, flags: int) -> str:
    """The text of an extended acknowledgement; ``payload`` begins with the error number."""
    if not flags & _NLM_F_ACK_TLVS or len(payload) < 20:
        return ""
    start = 20
    if not flags & _NLM_F_CAPPED:
        start = 4 + ((_LENGTH.unpack_from(payload, 4)[0] + 3) & ~3)
    text = parse_attributes(memoryview(payload), start, len(payload)).get(_NLMSGERR_ATTR_MSG)
    return "" if text is None else attribute_text(text)


class NetlinkRefusal(KernelError):
    """The kernel refused one request; ``error`` has the number and its words."""

    def __init__(self, error: MessageError) -> None:
        super().__init__(f"netlink: {error}")
        self.error = error
