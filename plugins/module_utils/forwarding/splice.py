# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""splice(2): move bytes between a socket and a pipe without copying them to this process.

Python has ``os.splice`` since 3.10; on older versions the function of the C library is called. If that is missing as
well, connections are copied through a buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
from typing import Callable, Optional

_MOVE, _NONBLOCK = 1, 2
_FLAGS = _MOVE | _NONBLOCK
_F_SETPIPE_SZ = 1031
#: The maximum number of bytes that a relay holds in its pipe.
_PIPE_BYTES = 1 << 18

#: Move up to a number of bytes between descriptors and return how many were moved, 0 at the end. Raises OSError.
Splice = Callable[[int, int, int], int]


def _of_python() -> Optional[Splice]:
    function = getattr(os, "splice", None)
    if function is None:
        return None
    return lambda source, sink, count: int(function(source, sink, count, flags=_FLAGS))


def _of_c_library() -> Optional[Splice]:
    function = getattr(ctypes.CDLL(None, use_errno=True), "splice", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    function.restype = ctypes.c_ssize_t

    def splice(source: int, sink: int, count: int) -> int:
        moved = int(function(source, None, sink, None, count, _FLAGS))
        if moved < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return moved

    return splice


def find_splice() -> Optional[Splice]:
    """Return splice(2), or None if the system lacks it or does not allow it between sockets and pipes."""
    found = _of_python() or _of_c_library()
    return found if found is not None and _works(found) else None


def _works(splice: Splice) -> bool:
    first, second = socket.socketpair()
    with first, second, contextlib.suppress(OSError), contextlib.closing(Pipe()) as pipe:
        second.send(b"x")
        splice(first.fileno(), pipe.write_end, 1)
        splice(pipe.read_end, first.fileno(), 1)
        return second.recv(2, socket.MSG_DONTWAIT) == b"x"
    return False


class Pipe:
    """A non-blocking pipe. ``size``: bytes to request per call."""

    __slots__ = ("read_end", "size", "write_end")

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.size = fcntl.fcntl(self.write_end, _F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError as error:
            # Without CAP_SYS_RESOURCE, the kernel limits the size of a pipe and the sum of a user's pipes.
            if error.errno not in (errno.EPERM, errno.EBUSY):
                self.close()
                raise
            self.size = 1 << 16

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read_end)
        os.close(self.write_end)


class Pipes:
    """A pool of pipes; at most ``most`` exist, and ``spare`` unused ones are kept for the next connections."""

    def __init__(self, most: int, spare: int = 16) -> None:
        self._most = most
        self._keep = spare
        self._made = 0
        self._spare: list[Pipe] = []

    def borrow(self) -> Optional[Pipe]:
        """Return an empty pipe, or None if the pool or the system has no more."""
        if self._spare:
            return self._spare.pop()
        if self._made >= self._most:
            return None
        try:
            pipe = Pipe()
        except OSError:
            return None
        self._made += 1
        return pipe

    def give_back(self, pipe: Pipe, empty: bool) -> None:
        """Return a pipe to the pool. One that is not ``empty`` is closed."""
        if empty and len(self._spare) < self._keep:
            self._spare.append(pipe)
        else:
            self._made -= 1
            pipe.close()

    def close(self) -> None:
        """Close the unused pipes."""
        while self._spare:
            self._spare.pop().close()
            self._made -= 1
