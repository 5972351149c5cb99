# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The servers of the lab: every endpoint, and the fabric for everything that the proxy does not redirect.

An answer is one line, ``ep|outside ADDRESS PORT SOURCE SOURCE-PORT``: which address and port the packet was for when it
arrived, and where it came from.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from . import sctp
from .topology import OUTSIDE_MARK, Topology

# <linux/in.h>, <linux/in6.h>; not all of them are in Python's socket module
IP_PKTINFO = 8
IP_TRANSPARENT, IPV6_TRANSPARENT = 19, 75
SCTP_RECEIVE_BUFFER = 1 << 20
ANY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
FAMILIES = (socket.AF_INET, socket.AF_INET6)

Ancillary = list[tuple[int, int, bytes]]


class Listener(NamedTuple):
    """An address and port that must answer."""

    host: str
    protocol: str
    port: int


def answer_line(outside: bool, destination: str, port: int, source: str, source_port: int) -> bytes:
    """Return the line that an endpoint answers with."""
    return f"{'outside' if outside else 'ep'} {destination} {port} {source} {source_port}\n".encode()


class Endpoints:
    """All listeners of one lab, in the running event loop."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._watched: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sctp_ports: dict[tuple[str, int], set[int]] = {}
        self._present: set[Listener] = set()

    def listen(self, listener: Listener) -> None:
        """Answer on this port, over both IP families. A listener that exists is not changed."""
        if listener in self._present:
            return
        self._present.add(listener)
        start = {"tcp": self._listen_tcp, "udp": self._listen_udp, "sctp": self._listen_sctp}[listener.protocol]
        for family in FAMILIES:
            start(listener, family)

    def close(self) -> None:
        """Stop everything."""
        for watched in self._watched:
            self._loop.remove_reader(watched.fileno())
        for task in list(self._tasks):
            task.cancel()
        for open_socket in self._sockets:
            open_socket.close()

    def _socket(self, host: str, family: int, kind: int, protocol: int = 0) -> socket.socket:
        made = self._topology.namespaces[host].socket(family, kind, protocol)
        self._sockets.append(made)
        if host == "fabric":
            _as_outside(made, family)
        return made

    def _bound(self, listener: Listener, family: int, kind: int) -> socket.socket:
        made = self._socket(listener.host, family, kind)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((ANY[socket.AddressFamily(family)], listener.port))
        return made

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self, readable: socket.socket, callback: Callable[[], None]) -> None:
        self._loop.add_reader(readable.fileno(), callback)
        self._watched.append(readable)

    # TCP: the answer as soon as the connection is established, then an echo

    def _listen_tcp(self, listener: Listener, family: int) -> None:
        server = self._bound(listener, family, socket.SOCK_STREAM)
        server.listen(1024)
        self._task(self._accept(server, listener.host == "fabric"))

    async def _accept(self, server: socket.socket, outside: bool) -> None:
        while True:
            try:
                connection, peer = await self._loop.sock_accept(server)
            except OSError:  # The client has closed the connection already.
                await asyncio.sleep(0.01)
                continue
            connection.setblocking(False)
            self._task(self._serve(connection, peer, outside))

    async def _serve(self, connection: socket.socket, peer: Any, outside: bool) -> None:
        try:
            here = connection.getsockname()
            await self._loop.sock_sendall(connection, answer_line(outside, here[0], here[1], peer[0], peer[1]))
            while data := await self._loop.sock_recv(connection, 4096):
                await self._loop.sock_sendall(connection, data)
        except OSError:
            return  # The client has closed the connection; its sender reports why.
        finally:
            connection.close()

    # UDP: the sender's nonce, then the answer, from the address that the request was for

    def _listen_udp(self, listener: Listener, family: int) -> None:
        server = self._bound(listener, family, socket.SOCK_DGRAM)
        _want_packet_info(server, family)
        outside = listener.host == "fabric"

        def readable() -> None:
            try:
                data, ancillary, _flags, peer = server.recvmsg(2048, 256)
                destination = _destination(ancillary)
                answer = data.split(b" ")[0] + b" " + answer_line(outside, destination, listener.port, peer[0], peer[1])
                server.sendmsg([answer], _from_address(family, destination), 0, peer)
            except OSError:
                return  # An ICMP error for an earlier answer; the sender reports the loss.

        self._watch(server, readable)

    # SCTP: one raw socket for each namespace and family sees the packets for all ports

    def _listen_sctp(self, listener: Listener, family: int) -> None:
        ports = self._sctp_ports.get((listener.host, family))
        if ports is not None:
            ports.add(listener.port)
            return
        ports = self._sctp_ports[listener.host, family] = {listener.port}
        server = self._socket(listener.host, family, socket.SOCK_RAW, sctp.PROTOCOL)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SCTP_RECEIVE_BUFFER)
        _want_packet_info(server, family)
        outside = listener.host == "fabric"

        def readable() -> None:
            try:
                data, ancillary, _flags, peer = server.recvmsg(4096, 256)
                destination = _destination(ancillary)
                if family == socket.AF_INET:
                    # Read the header: for a forwarded packet, packet info has the address of the device.
                    destination = socket.inet_ntoa(data[16:20])
                    data = sctp.strip_ipv4_header(data)
                answer = _answer_init(data, ports, outside, destination, peer[0])
                if answer:
                    server.sendmsg([answer], _from_address(family, destination), 0, (peer[0], 0))
            except OSError:
                return

        self._watch(server, readable)


def _answer_init(data: bytes, ports: set[int], outside: bool, destination: str, source: str) -> bytes | None:
    packet = sctp.parse(data)
    if packet is None or packet.kind != sctp.INIT:
        return None
    if packet.destination_port in ports:
        line = answer_line(outside, destination, packet.destination_port, source, packet.source_port)
        chunk = sctp.init_ack(random.getrandbits(32) | 1, line)
    else:
        chunk = sctp.abort()
    return sctp.packet(packet.destination_port, packet.source_port, sctp.initiate_tag(packet.body), chunk)


def _as_outside(made: socket.socket, family: int) -> None:
    """Answer for addresses that are not the host's own, back through the node."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, OUTSIDE_MARK)
    if family == socket.AF_INET:
        made.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)
    else:
        made.setsockopt(socket.IPPROTO_IPV6, IPV6_TRANSPARENT, 1)


def _want_packet_info(made: socket.socket, family: int) -> None:
    if family == socket.AF_INET:
        made.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
    else:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)


def _destination(ancillary: Ancillary) -> str:
    """Return the address that a datagram was for (struct in_pktinfo, struct in6_pktinfo)."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO):
            return socket.inet_ntop(socket.AF_INET, data[8:12])
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
            return socket.inet_ntop(socket.AF_INET6, data[:16])
    raise OSError("datagram without packet info")


def _from_address(family: int, address: str) -> Ancillary:
    """Return ancillary data that makes *address* the source of what is sent, over any device."""
    any_device = struct.pack("@I", 0)
    if family == socket.AF_INET:
        return [(socket.IPPROTO_IP, IP_PKTINFO, any_device + socket.inet_aton(address) + b"\0" * 4)]
    return [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, socket.inet_pton(socket.AF_INET6, address) + any_device)]
