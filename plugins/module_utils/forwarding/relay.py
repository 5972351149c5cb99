# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One direction of a TCP connection: bytes are read from one end and written to the other.

A relay reads only when everything read before has been written, so a slow reader stops the writer through TCP's own
flow control, and a relay holds at most one buffer or one pipe of bytes.
"""

from __future__ import annotations

import contextlib
import socket
from typing import NamedTuple, Optional

from .limits import Totals
from .splice import Pipe, Pipes, Splice

BUFFER_BYTES = 1 << 16
#: Bytes after which a relay is spliced; for fewer a pipe is not worth its system calls.
_BULK_BYTES = 1 << 18
#: Bytes that one relay may transfer before other descriptors are served.
_TURN_BYTES = 1 << 21


class RelayContext(NamedTuple):
    """What all relays share to transfer bytes.

    ``buffer``: the copy buffer, used by one relay at a time. ``splice``: None if the system has none.
    """

    totals: Totals
    pipes: Pipes
    splice: Optional[Splice]
    buffer: memoryview


class RelaySocket:
    """The socket at one end of a connection, and its readiness.

    ``ended``: the peer has sent its FIN. ``failed``: the peer has reset the connection, which the kernel reports once.
    """

    __slots__ = ("ended", "failed", "number", "readable", "sock", "writable")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.number = sock.fileno()
        self.readable = True
        self.writable = True
        self.ended = False
        self.failed = False


class Relay:
    """One direction: bytes read from ``source`` and not yet written to ``sink``, in ``held`` or in ``pipe``."""

    __slots__ = ("finished", "held", "in_pipe", "moved", "pipe", "read_all", "sink", "source")

    def __init__(self, source: RelaySocket, sink: RelaySocket) -> None:
        self.source = source
        self.sink = sink
        self.held = b""
        self.pipe: Optional[Pipe] = None
        self.in_pipe = 0
        self.moved = 0
        self.read_all = False
        self.finished = False

    def move(self, context: RelayContext) -> bool:
        """Transfer bytes until it would block; return whether the quota is used up. Raises OSError."""
        if self.finished:
            return False
        left = _TURN_BYTES
        while left > 0:
            if self.in_pipe or self.held:
                if not self.sink.writable or not self._write(context):
                    return False
            elif self.read_all:
                # The sink's peer may have reset the connection by now, which the other relay reports.
                with contextlib.suppress(OSError):
                    self.sink.sock.shutdown(socket.SHUT_WR)
                self.finished = True
                return False
            elif not self.source.readable:
                return False
            else:
                left -= self._read(context)
        return True

    def _read(self, context: RelayContext) -> int:
        """Read once and write as much as possible; return the number of bytes read."""
        source = self.source
        if self.pipe is None and self.moved >= _BULK_BYTES and context.splice is not None:
            self.pipe = context.pipes.borrow()
        try:
            if self.pipe is not None and context.splice is not None:
                size = self.pipe.size
                count = self.in_pipe = context.splice(source.number, self.pipe.write_end, size)
            else:
                size = BUFFER_BYTES
                count = source.sock.recv_into(context.buffer)
        except (BlockingIOError, InterruptedError):
            source.readable = False
            return 0
        self.moved += count
        context.totals.bytes += count
        if not count:
            self.read_all = True
        elif self.pipe is None:
            sent = 0
            if self.sink.writable:
                try:
                    sent = self.sink.sock.send(context.buffer[:count])
                except BlockingIOError:
                    self.sink.writable = False
            if sent < count:
                self.held = bytes(context.buffer[sent:count])
            elif count < size and not source.ended:
                # The socket was drained; further bytes, or the end, cause a new event.
                source.readable = False
        return count

    def _write(self, context: RelayContext) -> bool:
        """Write the bytes held; return whether all were written."""
        sink = self.sink
        try:
            if self.in_pipe and self.pipe is not None and context.splice is not None:
                self.in_pipe -= context.splice(self.pipe.read_end, sink.number, self.in_pipe)
            else:
                self.held = self.held[sink.sock.send(self.held) :]
        except BlockingIOError:
            sink.writable = False
            return False
        return True

    def release(self, context: RelayContext) -> None:
        """Return the pipe to the pool, if there is one; its content is lost."""
        if self.pipe is not None:
            context.pipes.give_back(self.pipe, self.in_pipe == 0)
            self.pipe = None
