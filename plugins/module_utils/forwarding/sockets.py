# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sockets that do not block: opened for a listener, kept alive, reset."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Callable

_RESET = struct.pack("=ii", 1, 0)
#: A vanished peer is detected after 10 minutes of silence and 5 probes, a minute apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 600), (socket.TCP_KEEPINTVL, 60), (socket.TCP_KEEPCNT, 5))


def open_socket(address: str, kind: int) -> socket.socket:
    """Return a socket for an address, of either family; ``kind`` is SOCK_STREAM or SOCK_DGRAM. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def bound_socket(address: str, port: int, kind: int, prepare: Callable[[socket.socket], None]) -> socket.socket:
    """Return a socket bound to an address and port of one family; ``prepare`` sets options before. Raises OSError."""
    sock = open_socket(address, kind)
    try:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        prepare(sock)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def keep_alive(sock: socket.socket) -> None:
    """Enable TCP keepalive, and send small segments at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def reset(sock: socket.socket) -> None:
    """Close a connected socket with a reset instead of a FIN."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
