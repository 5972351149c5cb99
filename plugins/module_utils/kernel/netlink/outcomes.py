# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's answers to netlink messages: errors, each with the position of its message, and replies.

Sources: netlink(7), linux/netlink.h (struct nlmsgerr, extended acknowledgements).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from typing import Callable, Iterator, NamedTuple

from ...base.errors import KernelError
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

    ``position``: its index in the messages sent, from 0; ``errno``: positive number (subsystems add their own from 4096
    on); ``text``: the kernel's explanation, often empty; ``payload``: the data after the number in ``struct nlmsgerr``,
    which is the header of the refused message and, for subsystems that answer themselves, its copy.
    """

    position: int
    errno: int
    text: str
    payload: bytes

    def __str__(self) -> str:
        return f"{errno_text(self.errno)}: {self.text}" if self.text else errno_text(self.errno)


def is_missing(error: MessageError) -> bool:
    """Return whether the object of a request, or the one that it belongs to, does not exist."""
    return error.errno in _MISSING


def is_existing(error: MessageError) -> bool:
    """Return whether the object to be created exists already."""
    return error.errno == errno.EEXIST


def is_busy(error: MessageError) -> bool:
    """Return whether another object still refers to the object of a request."""
    return error.errno == errno.EBUSY


def is_forbidden(error: MessageError) -> bool:
    """Return whether the caller lacks a privilege, usually CAP_NET_ADMIN."""
    return error.errno == errno.EPERM


def is_interrupted(error: MessageError) -> bool:
    """Return whether the same request may succeed at once, because it was interrupted."""
    return error.errno == errno.EINTR


def is_unsupported(error: MessageError) -> bool:
    """Return whether the kernel has no such subsystem, address family or kind of object."""
    return error.errno in (errno.EOPNOTSUPP, errno.EAFNOSUPPORT)


def is_not_understood(error: MessageError) -> bool:
    """Return whether the kernel does not know the request or one of its attributes (too old, or no such subsystem)."""
    return error.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def is_transient(error: MessageError) -> bool:
    """Return whether another program changed the same objects meanwhile, or the kernel was briefly short of memory."""
    return error.errno in _TRANSIENT


class Reply(NamedTuple):
    """A message that answers the message at ``position``: its type, and its payload without the netlink header."""

    position: int
    type: int
    payload: bytes


class Outcome(NamedTuple):
    """The result of a transaction: refused messages in their order, and answers other than acknowledgements."""

    errors: list[MessageError]
    replies: list[Reply]


def errno_text(number: int) -> str:
    """Return an error number in words, e.g. ``File exists (EEXIST)``."""
    name = errno.errorcode.get(number)
    return f"{os.strerror(number)} ({name})" if name else f"error {number}"


def extended_text(payload: bytes, flags: int) -> str:
    """Return the text of an extended acknowledgement; ``payload`` begins with the error number."""
    if not flags & _NLM_F_ACK_TLVS or len(payload) < 20:
        return ""
    start = 20
    if not flags & _NLM_F_CAPPED:
        start = 4 + ((_LENGTH.unpack_from(payload, 4)[0] + 3) & ~3)
    text = parse_attributes(memoryview(payload), start, len(payload)).get(_NLMSGERR_ATTR_MSG)
    return "" if text is None else attribute_text(text)


class NetlinkRefusal(KernelError):
    """The kernel refused one request; ``error`` has the number and its text."""

    def __init__(self, error: MessageError) -> None:
        super().__init__(f"netlink: {error}")
        self.error = error


@contextlib.contextmanager
def refusals_as(doing: str, fine: Callable[[MessageError], bool] = lambda _error: False) -> Iterator[None]:
    """Turn a refusal in the ``with`` statement, unless ``fine``, into a KernelError: ``doing``, then the reason."""
    try:
        yield
    except NetlinkRefusal as refusal:
        if not fine(refusal.error):
            raise KernelError(f"{doing}: {refusal.error}") from refusal
