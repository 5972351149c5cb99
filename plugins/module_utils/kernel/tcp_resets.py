# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Resets of TCP connections that the node forwards: their clients learn of the end even if they only wait.

A client accepts a reset only with the number of the byte that it expects next, which nothing on the node knows. So the
client is asked: to a SYN, ACK within its connection it answers with an acknowledgement (RFC 5961, section 4.2; RFC 793
as well), which has the number. A packet socket sees it before any rule or IPVS does, as it sees what a client sends by
itself.

Segments are sent in the name of the address that the client is connected to. For connection tracking and IPVS they
belong to no connection and cannot begin one, so that nothing translates or remembers them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Collection, Generator, Optional, Sequence, TypeVar

from ..base import socket_filter as bpf
from ..base.addresses import IPV6, unpacked
from ..base.closing import Closing
from ..base.errors import KernelError, os_errors

#: The client and its destination, each as address and port in network order.
Flow = tuple[bytes, bytes]
Found = TypeVar("Found")
#: Work that yields the seconds after which it continues, or None to continue at once, and returns a result.
PausingSteps = Generator[Optional[float], None, Found]

#: Destinations whose clients are asked together: the filter of the socket compares them (net.core.optmem_max).
_MOST_DESTINATIONS = 200
#: Segments sent, and packets read, between two pauses.
_PORTION = 100
#: Linux answers such segments of one connection at most every 500 ms (net.ipv4.tcp_invalid_ratelimit).
_ATTEMPTS, _ATTEMPT_SECONDS = 2, 0.6
_PAUSE_SECONDS = 0.01
#: The time for what was on its way to the client when the connection was ended.
_LINGER_SECONDS = 0.05
_RECEIVE_BYTES = 1 << 22
_SO_RCVBUFFORCE = 33
_IPV4, _TCP = struct.Struct("!BBHHHBBH4s4s"), struct.Struct("!HHIIBBHHH")
_RST, _ACK, _SYN_ACK = 0x04, 0x10, 0x12
_HEADER_BYTES, _HOPS, _DONT_FRAGMENT = 20, 64, 0x4000
_IPV6_HEADER_BYTES = 40


def resetting(family: str, flows: Collection[Flow]) -> PausingSteps[int]:
    """Reset the connections of clients that answer; return their number. Raises KernelError."""
    count = 0
    destinations = sorted({flow[1] for flow in flows})
    for first in range(0, len(destinations), _MOST_DESTINATIONS):
        chosen = set(destinations[first : first + _MOST_DESTINATIONS])
        with _Wire(family, {flow for flow in flows if flow[1] in chosen}, chosen) as wire:
            for _attempt in range(_ATTEMPTS):
                asked = sorted(wire.waiting)
                for start in range(0, len(asked), _PORTION):
                    wire.ask(asked[start : start + _PORTION])
                    wire.answer()
                    yield None
                end = time.monotonic() + _ATTEMPT_SECONDS
                while wire.waiting and time.monotonic() < end:
                    yield None if wire.answer() else _PAUSE_SECONDS
            yield _LINGER_SECONDS
            wire.answer()
            count += len(wire.reset)
    return count


class _Wire(Closing):
    """The sockets that send to the clients of some flows, and see what these send.

    ``waiting``: the flows whose clients have not answered. ``reset``: those that have been reset.
    """

    def __init__(self, family: str, flows: set[Flow], destinations: Collection[bytes]) -> None:
        self.flows = flows
        self.waiting = set(flows)
        self.reset: set[Flow] = set()
        self._is_ipv6 = family == IPV6
        number, kind = (socket.AF_INET6, 0x86DD) if self._is_ipv6 else (socket.AF_INET, 0x0800)
        with contextlib.ExitStack() as stack, os_errors(KernelError, "sockets that reset connections"):
            self._sending = stack.enter_context(socket.socket(number, socket.SOCK_RAW, socket.IPPROTO_RAW))
            self._sending.setblocking(False)
            flags = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
            self._seeing = stack.enter_context(socket.socket(socket.AF_PACKET, flags, socket.htons(kind)))
            bpf.attach(self._seeing, _program(self._is_ipv6, destinations))
            with contextlib.suppress(OSError):
                self._seeing.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
            self._open = stack.pop_all()

    def close(self) -> None:
        """Close the sockets."""
        self._open.close()

    def ask(self, flows: Sequence[Flow]) -> None:
        """Have the clients of flows tell which byte they expect next."""
        for flow in flows:
            self._send(flow, 0, _SYN_ACK)

    def answer(self) -> int:
        """Reset the connections of clients that have sent something; return how many packets were read."""
        for count in range(_PORTION):
            try:
                packet = self._seeing.recv(_IPV6_HEADER_BYTES + _HEADER_BYTES + _IPV6_HEADER_BYTES)
            except OSError:
                return count
            found = self._parse(packet)
            if found is None:
                continue
            flow, expected, flags = found
            # A client that answers with a reset has no such connection any more.
            if not flags & _RST:
                self._send(flow, expected, _RST)
                self.reset.add(flow)
            self.waiting.discard(flow)
        return _PORTION

    def _parse(self, packet: bytes) -> Optional[tuple[Flow, int, int]]:
        """Return a packet's flow, the byte that its sender expects next, and the flags; None for other flows."""
        size, start, end = (_IPV6_HEADER_BYTES, 8, 24) if self._is_ipv6 else ((packet[0] & 15) * 4, 12, 16)
        if len(packet) < size + _HEADER_BYTES:
            return None
        source, destination = packet[start:end], packet[end : 2 * end - start]
        flow = (source + packet[size : size + 2], destination + packet[size + 2 : size + 4])
        number = int.from_bytes(packet[size + 8 : size + 12], "big")
        return (flow, number, packet[size + 13]) if flow in self.flows and packet[size + 13] & (_ACK | _RST) else None

    def _send(self, flow: Flow, number: int, flags: int) -> None:
        """Send a segment to a flow's client in the name of its destination; one that cannot be sent is lost."""
        (client, client_port), (server, server_port) = ((place[:-2], place[-2:]) for place in flow)
        ports = int.from_bytes(server_port, "big"), int.from_bytes(client_port, "big")
        fields = (*ports, number, 0, _HEADER_BYTES // 4 << 4, flags, 0)
        pseudo = server + client + struct.pack("!II", socket.IPPROTO_TCP, _HEADER_BYTES)
        segment = _TCP.pack(*fields, _checksum(pseudo + _TCP.pack(*fields, 0, 0)), 0)
        if self._is_ipv6:
            header = struct.pack("!IHBB", 6 << 28, len(segment), socket.IPPROTO_TCP, _HOPS) + server + client
        else:
            # The kernel fills in length and checksum.
            header = _IPV4.pack(0x45, 0, 0, 0, _DONT_FRAGMENT, _HOPS, socket.IPPROTO_TCP, 0, server, client)
        with contextlib.suppress(OSError):
            self._sending.sendto(header + segment, (unpacked(client), 0))


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _program(is_ipv6: bool, destinations: Collection[bytes]) -> list[bpf.Instruction]:
    """Return the filter that accepts segments to one of these addresses, of IPv6 their last four bytes, and ports."""
    protocol, address = (6, 36) if is_ipv6 else (9, 16)
    lines: list[bpf.Instruction] = [
        (bpf.LOAD_BYTE, 0, 0, protocol),
        (bpf.JUMP_EQUAL, 1, 0, socket.IPPROTO_TCP),
        (bpf.RETURN, 0, 0, 0),
        (bpf.LOAD_INDEX, 0, 0, _IPV6_HEADER_BYTES) if is_ipv6 else (bpf.LOAD_INDEX_IHL, 0, 0, 0),
    ]
    for place in destinations:
        lines += [
            (bpf.LOAD_WORD, 0, 0, address),
            (bpf.JUMP_EQUAL, 0, 3, int.from_bytes(place[-6:-2], "big")),
            (bpf.LOAD_HALF_AT_INDEX, 0, 0, 2),
            (bpf.JUMP_EQUAL, 0, 1, int.from_bytes(place[-2:], "big")),
            (bpf.RETURN, 0, 0, bpf.ALL_BYTES),
        ]
    return [*lines, (bpf.RETURN, 0, 0, 0)]
