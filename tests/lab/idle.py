# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A client that holds connections to a server open and never sends a request."""

from __future__ import annotations

import select
import socket
from typing import Callable


def hold_idle(server: tuple[str, int], source: str, count: int, until: Callable[[], bool]) -> int:
    """Keep ``count`` connections open from one IPv4 address, and open each again that the server closes.

    Return how many connections were opened, once there were ``count`` and ``until()``, called between rounds, is true.
    """
    poll = select.epoll()
    held: dict[int, socket.socket] = {}
    opened = 0
    try:
        while not until() or opened < count:
            for _turn in range(min(200, count - len(held))):
                sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                # Choosing the port when the destination is known leaves enough of them.
                sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
                sock.bind((source, 0))
                sock.connect_ex(server)
                held[sock.fileno()] = sock
                poll.register(sock.fileno(), select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)
                opened += 1
            for number, _mask in poll.poll(0.01, 1000):
                # Closing is not enough: a child that is being started may still hold the connection.
                poll.unregister(number)
                held.pop(number).close()
    finally:
        for sock in held.values():
            sock.close()
        poll.close()
    return opened
