# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The process with all endpoints of a load."""

from __future__ import annotations

import selectors
import socket
import sys
from typing import Any, Sequence

from tests.lab.load.model import Endpoint, family_of
from tests.lab.system import socket_inside


def _listen(endpoint: Endpoint) -> socket.socket:
    kind = socket.SOCK_STREAM if endpoint.protocol == "tcp" else socket.SOCK_DGRAM
    family = family_of(endpoint.address)
    sock = socket_inside(endpoint.place, family, kind) if endpoint.place else socket.socket(family, kind)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((endpoint.address, endpoint.port))
    if endpoint.protocol == "tcp":
        sock.listen(1024)
    sock.setblocking(False)
    return sock


def serve(endpoints: Sequence[Endpoint]) -> None:
    """Answer until standard input ends."""
    chooser = selectors.DefaultSelector()
    chooser.register(sys.stdin.buffer, selectors.EVENT_READ, "end")
    for endpoint in endpoints:
        chooser.register(_listen(endpoint), selectors.EVENT_READ, endpoint.protocol)
    print("ready", flush=True)
    while True:
        for key, _events in chooser.select():
            sock: Any = key.fileobj
            if key.data == "end":
                return
            try:
                _answer(chooser, sock, key.data)
            except BlockingIOError:
                continue
            except OSError:
                if key.data == "accepted":
                    chooser.unregister(sock)
                    sock.close()


def _answer(chooser: selectors.BaseSelector, sock: socket.socket, what: str) -> None:
    if what == "udp":
        data, peer = sock.recvfrom(100)
        sock.sendto(data.rstrip(b"\n") + b" " + peer[0].encode() + b"\n", peer)
        return
    if what == "tcp":
        for _ in range(64):
            accepted, _peer = sock.accept()
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            chooser.register(accepted, selectors.EVENT_READ, "accepted")
        return
    data = sock.recv(100)
    if not data:
        chooser.unregister(sock)
        sock.close()
        return
    sock.sendall(data.rstrip(b"\n") + b" " + sock.getpeername()[0].encode() + b"\n")
