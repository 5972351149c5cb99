# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Open connections (TCP) and sessions (UDP) of clients, and past totals. To be read in the loop's thread."""

from __future__ import annotations

import collections
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Union

from ..rendering.userspace.model import Endpoint
from . import tcp, udp
from .balancing import Balancer


class Client(NamedTuple):
    """An open connection or session: protocol (TCP, UDP), the client's address and port, and the listener's."""

    protocol: str
    source: str
    source_port: int
    address: str
    port: int


class Opened(NamedTuple):
    """A connection or session: the client, its endpoint, the source that the endpoint sees, and its state."""

    source: Endpoint
    endpoint: Endpoint
    seen_as: Endpoint
    state: str


def _name(read: Callable[[], Any]) -> Endpoint:
    """Return the address and port that a socket has, or no address if it is not connected."""
    try:
        name = read()
        return str(name[0]), int(name[1])
    except OSError:
        return "", 0


def opened_by(
    client: Endpoint, server: Union[tcp.TcpServer, udp.UdpServer, None], connections: Iterable[tcp.Connection]
) -> Iterator[Opened]:
    """Yield what a client, with port 0 for any, has open through a listener's socket. ``connections``: all over TCP."""
    if isinstance(server, udp.UdpServer):
        for address, session in server.sessions.items():
            if address[0] == client[0] and client[1] in (0, address[1]):
                state = "replied" if session.answered else "unreplied"
                yield Opened(address[:2], session.endpoint, _name(session.sock.getsockname), state)
        return
    for connection in connections:
        if connection.server is not server or connection.client != client[0]:
            continue
        source, end = _name(connection.client_end.sock.getpeername), connection.endpoint_end
        if connection.endpoint is not None and end is not None and client[1] in (0, source[1]):
            state = "half closed" if connection.half_closed else "open"
            yield Opened(source, connection.endpoint, _name(end.sock.getsockname), state)


def clients_of(connections: Iterable[tcp.Connection], sessions: Iterable[udp.Session]) -> Iterator[Client]:
    """Yield the client of each connection, unless it was reset meanwhile, and of each session."""
    for connection in connections:
        source = _name(connection.client_end.sock.getpeername)
        if source[0]:
            yield Client("TCP", *source, *connection.server.key[1:])
    for session in sessions:
        yield Client("UDP", *session.address[:2], *session.server.key[1:])


class Used(NamedTuple):
    """What a ServicePort sent to an endpoint: connections and sessions since the first one, and those open now."""

    owner: str
    endpoint: Endpoint
    opened: int
    open: int


def used_by_owner(
    balancers: Mapping[str, Balancer], connections: Iterable[tcp.Connection], sessions: Iterable[udp.Session]
) -> Iterator[Used]:
    """Yield what each ServicePort has sent to each of its endpoints: all connections over TCP, and sessions."""
    now = collections.Counter((session.server.listener.owner, session.endpoint) for session in sessions)
    for connection in connections:
        if connection.endpoint is not None and connection.endpoint_end is not None:
            now[connection.server.listener.owner, connection.endpoint] += 1
    for owner, balancer in balancers.items():
        for endpoint, count in balancer.opened.items():
            yield Used(owner, endpoint, count, now[owner, endpoint])
