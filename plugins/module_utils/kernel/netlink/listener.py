# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Receive the notifications of a netlink subsystem. Sources: netlink(7), linux/netlink.h."""

from __future__ import annotations

import errno
import socket
from typing import Iterator, NamedTuple, Sequence

from ...base.closing import Closing, closed_on_error
from ...base.errors import KernelError, os_errors
from ...base.socket_filter import ALL_BYTES, JUMP_EQUAL, LOAD_WORD, RETURN, Instruction, attach
from .protocol import HEADER, NETLINK_ADD_MEMBERSHIP, SOL_NETLINK
from .socket import SO_RCVBUFFORCE, set_buffer

#: One transaction of nf_tables can cause tens of thousands of notifications at once.
_RECEIVE_BUFFER_BYTES = 16 << 20
_DATAGRAM_BYTES = 1 << 20
_PORT_OFFSET = 12


class Notification(NamedTuple):
    """One message: its type, and the data after the header.

    The payload is only valid until the next one is read.
    """

    kind: int
    payload: memoryview


class NetlinkListener(Closing):
    """A socket that only receives, in the network namespace of the calling thread; a context manager.

    ``groups``: multicast groups by number (``RTNLGRP_...``, ``NFNLGRP_...``). ``ignored``: netlink ports; the kernel
    does not deliver what they cause, which costs time and may fill the buffer. Wait for ``fileno()`` to become
    readable, then read :meth:`notifications`. Raises KernelError if there is no socket or group.
    """

    def __init__(self, protocol: int, groups: Sequence[int], what: str, ignored: Sequence[int] = ()) -> None:
        self._what = f"notifications of {what}"
        self._lost = False
        self._buffer = bytearray(_DATAGRAM_BYTES)
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with os_errors(KernelError, self._what):
            self._socket = socket.socket(socket.AF_NETLINK, kind, protocol)
        with os_errors(KernelError, self._what), closed_on_error(self._socket):
            if ignored:
                attach(self._socket, _without(ignored))
            self._socket.bind((0, 0))
            set_buffer(self._socket, SO_RCVBUFFORCE, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            for group in groups:
                self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the descriptor to wait for; -1 after closing."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message to the kernel; its answer is among the notifications. Raises KernelError."""
        with os_errors(KernelError, self._what):
            self._socket.send(message)

    def pop_lost(self) -> bool:
        """Return whether notifications were lost since the last call, because the socket was not read in time."""
        lost, self._lost = self._lost, False
        return lost

    def notifications(self) -> Iterator[Notification]:
        """Yield the messages that have arrived, without waiting. Raises KernelError."""
        while True:
            try:
                size = self._socket.recv_into(self._buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise KernelError(f"{self._what}: {error.strerror}") from error
                self._lost = True
                continue
            yield from _messages(memoryview(self._buffer)[:size])


def _without(ports: Sequence[int]) -> list[Instruction]:
    """Return a program that accepts messages unless one of these ports has caused the first one."""
    # A program loads numbers in network order, but netlink has them in the order of the host.
    jumps = [(JUMP_EQUAL, len(ports) - index, 0, socket.htonl(port)) for index, port in enumerate(ports)]
    return [(LOAD_WORD, 0, 0, _PORT_OFFSET), *jumps, (RETURN, 0, 0, ALL_BYTES), (RETURN, 0, 0, 0)]


def _messages(view: memoryview) -> Iterator[Notification]:
    offset = 0
    while offset + HEADER.size <= len(view):
        length, kind, _flags, _sequence, _port = HEADER.unpack_from(view, offset)
        if length < HEADER.size:
            return
        yield Notification(kind, view[offset + HEADER.size : offset + length])
        offset += (length + 3) & ~3
