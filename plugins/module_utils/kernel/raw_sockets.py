# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Raw sockets, over which the packet filter and IPVS answer requests by getsockopt(2)."""

from __future__ import annotations

import ctypes
import socket
from typing import Optional

from ..base.errors import KernelError, os_errors

_libc = ctypes.CDLL(None, use_errno=True)


def kernel_copy(sock: socket.socket, level: int, option: int, request: bytes, size: int) -> Optional[bytearray]:
    """Return the answer of getsockopt to a request in the buffer; None if the kernel refuses."""
    buffer = bytearray(size)
    buffer[: len(request)] = request
    length = ctypes.c_uint32(size)
    pointer = (ctypes.c_char * size).from_buffer(buffer)
    result = _libc.getsockopt(sock.fileno(), level, option, pointer, ctypes.byref(length))
    del pointer
    return None if result < 0 or length.value != size else buffer


def raw_socket(family: int) -> socket.socket:
    """Return a socket for requests to the packet filter and IPVS by getsockopt. Raises KernelError."""
    with os_errors(KernelError, "raw socket"):
        return socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)
