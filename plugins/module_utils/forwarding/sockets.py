# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sockets that do not block: opened for a listener, kept alive, limited in hops, reset.

Each forwarding lowers the hop limit (TTL, RFC 791; IPv6: RFC 8200) as a router does. Without that, nodes could forward
to each other in an endless loop, if endpoints of a Service are node ports of other nodes.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from typing import Any, Callable, Sequence

from ..base.closing import closed_on_error
from ..base.socket_filter import ALL_BYTES, JUMP_BITS, LOAD_BYTE, RETURN, attach

_RESET = struct.pack("=ii", 1, 0)
_HOPS = struct.Struct("=i")
#: A vanished peer is detected after 10 minutes of silence and 5 probes, a minute apart.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 600), (socket.TCP_KEEPINTVL, 60), (socket.TCP_KEEPCNT, 5))

#: The node lacks files, memory or local ports: no peer is to blame.
EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
#: linux/tcp.h: keep the headers of the packet that opened a connection, and return them.
_TCP_SAVE_SYN, _TCP_SAVED_SYN = 27, 28
#: linux/in.h, linux/in6.h: have the hop limit delivered with each datagram.
_IP_RECVTTL, _IPV6_RECVHOPLIMIT, _IPV6_HOPLIMIT = 12, 51, 52
_HEADER_BYTES = 512
#: For kernels that do not report it: while they answer with SYN cookies, and in sandboxes with a separate network
#: stack. Enough for the path from a node to any endpoint.
_UNKNOWN_HOPS = 32
#: Drops segments with the flag SYN, which is in byte 13 of the header (RFC 9293), and keeps all others.
_IGNORE_SYN = ((LOAD_BYTE, 0, 0, 13), (JUMP_BITS, 0, 1, 0x02), (RETURN, 0, 0, 0), (RETURN, 0, 0, ALL_BYTES))


def open_socket(address: str, kind: int) -> socket.socket:
    """Return a socket for an address, of either family; ``kind`` is SOCK_STREAM or SOCK_DGRAM. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def bound_socket(address: str, port: int, kind: int, prepare: Callable[[socket.socket], None]) -> socket.socket:
    """Return a socket bound to an address and port of one family; ``prepare`` sets options before. Raises OSError."""
    sock = open_socket(address, kind)
    with closed_on_error(sock):
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        prepare(sock)
        sock.bind((address, port))
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


def ignore_new_connections(sock: socket.socket) -> None:
    """Have the kernel ignore the SYN segments to a listening socket, if it can; connections being opened continue."""
    with contextlib.suppress(OSError):
        attach(sock, _IGNORE_SYN)


def save_hops(sock: socket.socket) -> None:
    """Ask the kernel to record the hop limits of what a socket receives, if it can."""
    if sock.type & socket.SOCK_STREAM:
        option = (socket.IPPROTO_TCP, _TCP_SAVE_SYN)
    elif sock.family == socket.AF_INET6:
        option = (socket.IPPROTO_IPV6, _IPV6_RECVHOPLIMIT)
    else:
        option = (socket.IPPROTO_IP, _IP_RECVTTL)
    with contextlib.suppress(OSError):
        sock.setsockopt(*option, 1)


def hops_of_connection(sock: socket.socket) -> int:
    """Return the hop limit with which the packet that opened an accepted connection arrived."""
    try:
        header = sock.getsockopt(socket.IPPROTO_TCP, _TCP_SAVED_SYN, _HEADER_BYTES)
    except OSError:
        header = b""
    if len(header) < 20:
        return _UNKNOWN_HOPS
    return header[8] if header[0] >> 4 == 4 else header[7]


def hops_of_datagram(ancillary: Sequence[tuple[int, int, Any]]) -> int:
    """Return the hop limit with which a datagram arrived, from the ancillary data of recvmsg(2)."""
    for level, kind, data in ancillary:
        if (level, kind) in ((socket.IPPROTO_IP, socket.IP_TTL), (socket.IPPROTO_IPV6, _IPV6_HOPLIMIT)):
            return int(_HOPS.unpack_from(data)[0])
    return _UNKNOWN_HOPS


def limit_hops(sock: socket.socket, hops: int) -> None:
    """Send the packets of a socket with this hop limit. Raises OSError."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, hops)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hops)
