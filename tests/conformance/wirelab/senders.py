# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Senders: one try of a TCP, UDP or SCTP flow, and its outcome.

An outcome is a text: ``10.244.1.11:8080 from 10.244.1.1``, ``outside from 203.0.113.10``, ``reject icmp 3/3``,
``reject icmp6 1/4``, ``reject rst``, ``reject abort``, ``reset``, ``drop``, ``error NAME``.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from . import sctp
from .addressing import default_source, join_host_port
from .endpoints import ANY
from .flows import Flow
from .topology import Topology

# <linux/in.h>, <linux/in6.h>, <linux/errqueue.h>
IP_RECVERR, IPV6_RECVERR = 11, 25
ORIGIN_ICMP, ORIGIN_ICMP6 = 2, 3

TRY_SECONDS = 0.9
# A second try after no answer waits longer, so that a busy machine does not look like a firewall.
SECOND_TRY_FACTOR = 2
AT_ONCE, AT_ONCE_SLOW = 60, 24
FULL_QUEUE_PAUSE = 0.05
# Above the constant source ports of cases.
SOURCE_PORTS = range(45000, 61000)

DROP = "drop"


class Try(NamedTuple):
    """The outcome of one try, and the source address it was sent from (None: unknown)."""

    outcome: str
    sent_from: str | None


class Senders:
    """The senders of one lab. *time_scale* multiplies every wait (slow machines)."""

    def __init__(self, topology: Topology, time_scale: float = 1.0) -> None:
        self._topology = topology
        self._scale = time_scale
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(AT_ONCE if time_scale <= 1 else AT_ONCE_SLOW)
        self._source_ports = itertools.cycle(SOURCE_PORTS)
        self.open_connections: dict[str, socket.socket] = {}

    async def attempt(self, flow: Flow) -> Try:
        """Try once, and a second time with more time if there was no answer."""
        seconds = float(flow.options.get("timeout", TRY_SECONDS)) * self._scale
        async with self._slots:
            done = await self.attempt_once(flow, seconds)
            if done.outcome == DROP:
                done = await self.attempt_once(flow, SECOND_TRY_FACTOR * seconds)
        return done

    async def attempt_once(self, flow: Flow, seconds: float) -> Try:
        """Try once, waiting this long for an answer."""
        send: Callable[[Flow, socket.socket], Awaitable[str]]
        if flow.kind == "tcp":
            made, send = self.make_socket(flow, socket.SOCK_STREAM), self._tcp
        elif flow.kind == "udp":
            made, send = self.make_socket(flow, socket.SOCK_DGRAM), self._udp
        else:
            made, send = self.make_socket(flow, socket.SOCK_RAW, sctp.PROTOCOL), self._sctp
        sent_from = None
        try:
            if flow.kind != "tcp":
                # This sends no packet yet; it fixes the source address and lets ICMP errors find the socket.
                made.connect((flow.destination, flow.port if flow.kind == "udp" else 0))
                sent_from = made.getsockname()[0]
            outcome = await asyncio.wait_for(send(flow, made), seconds)
        except asyncio.TimeoutError:
            outcome = DROP
        except PermissionError as error:
            outcome = failure(made, await self._refusal(made, SECOND_TRY_FACTOR * seconds) or error)
        except OSError as error:
            outcome = failure(made, error)
        else:
            sent_from = sent_from or made.getsockname()[0]
        finally:
            if made not in self.open_connections.values():
                made.close()
        return Try(outcome, sent_from)

    def make_socket(self, flow: Flow, kind: int, protocol: int = 0) -> socket.socket:
        """Return a socket at the flow's source, bound as the flow says, which keeps ICMP errors for :func:`failure`."""
        family = socket.AF_INET if flow.version == 4 else socket.AF_INET6
        made = self._topology.namespaces[flow.host].socket(family, kind, protocol)
        if family == socket.AF_INET:
            made.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
        else:
            made.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVERR, 1)
        source = flow.source or default_source(flow.host, flow.version)
        if kind == socket.SOCK_RAW:
            # Raw sockets have no ports; the SCTP sender writes its own into the packet.
            if source:
                made.bind((source, 0))
        elif flow.source_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((source or ANY[family], flow.source_port))
        else:
            self._bind_to_next_port(made, source or ANY[family])
        return made

    def _bind_to_next_port(self, made: socket.socket, address: str) -> None:
        """Bind to a source port that no earlier try of this lab had.

        IPVS forwards a packet from the source port of an earlier connection to that connection's endpoint while the
        connection is in TIME_WAIT, if it was persistent (is_new_conn_expected in the kernel's
        net/netfilter/ipvs/ip_vs_core.c), and UDP likewise in every mode. A port chosen at random would now and then
        reach the endpoint of an earlier step.
        """
        for port in itertools.islice(self._source_ports, len(SOURCE_PORTS)):
            try:
                made.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return
        raise OSError(errno.EADDRINUSE, f"all source ports of {address} are in use")

    async def _refusal(self, made: socket.socket, seconds: float) -> OSError | None:
        """Return the error that an ICMP message brings to a socket whose packet a filter of its own host stopped.

        Sending fails with EPERM both for a rejected and a dropped packet; only the message differs. It arrives over
        the loopback device, mostly before send() returns, but later where ksoftirqd has been given the received packets
        because there were many of them. None if no message comes in time.
        """

        async def receive() -> None:
            while True:  # a raw socket gets packets of other flows as well
                await self._loop.sock_recv(made, 4096)

        try:
            await asyncio.wait_for(receive(), seconds)
        except asyncio.TimeoutError:
            return None
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Close the connections that flows left open."""
        for connection in self.open_connections.values():
            connection.close()
        self.open_connections = {}

    async def _tcp(self, flow: Flow, made: socket.socket) -> str:
        await self._loop.sock_connect(made, (flow.destination, flow.port))
        line = b""
        while not line.endswith(b"\n"):
            data = await self._loop.sock_recv(made, 512)
            if not data:
                return "reset"
            line += data
        name = flow.options.get("open")
        if name:
            earlier = self.open_connections.pop(name, None)
            if earlier:
                earlier.close()
            self.open_connections[name] = made
        return _answered(line)

    async def _send(self, made: socket.socket, data: bytes) -> None:
        """Send a datagram, again and again while a full queue of this very machine keeps it from leaving."""
        while True:
            try:
                made.send(data)
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
            await asyncio.sleep(FULL_QUEUE_PAUSE)

    async def _udp(self, flow: Flow, made: socket.socket) -> str:
        nonce = b"%x" % random.getrandbits(60)
        await self._send(made, nonce + b" ")
        while True:
            got, _, line = (await self._loop.sock_recv(made, 2048)).partition(b" ")
            if got == nonce:  # not the late answer to an earlier try from the same port
                return _answered(line)

    async def _sctp(self, flow: Flow, made: socket.socket) -> str:
        port = flow.source_port or random.randrange(20000, 60000)
        tag = random.getrandbits(32) | 1
        await self._send(made, sctp.packet(port, flow.port, 0, sctp.init(tag)))
        while True:
            data = await self._loop.sock_recv(made, 4096)
            packet = sctp.parse(sctp.strip_ipv4_header(data) if flow.version == 4 else data)
            if packet is None or (packet.destination_port, packet.verification_tag) != (port, tag):
                continue
            if packet.kind == sctp.ABORT:
                return "reject abort"
            if packet.kind == sctp.INIT_ACK:
                return _answered(sctp.cookie(packet.body))


def failure(made: socket.socket, error: OSError) -> str:
    """Return the outcome of a try that ended with an error: which ICMP message, a TCP reset, something else."""
    icmp = _icmp_error(made)
    if icmp:
        return "reject " + icmp
    if isinstance(error, ConnectionRefusedError):
        return "reject rst"
    if isinstance(error, ConnectionResetError):
        return "reset"
    return "error " + errno.errorcode.get(error.errno or 0, str(error.errno))


def _icmp_error(made: socket.socket) -> str | None:
    """Return type and code of the ICMP message in the socket's error queue (struct sock_extended_err)."""
    try:
        _data, ancillary, _flags, _peer = made.recvmsg(1024, 1024, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
    except OSError:  # the queue is empty
        return None
    for level, kind, data in ancillary:
        if (level, kind) in ((socket.IPPROTO_IP, IP_RECVERR), (socket.IPPROTO_IPV6, IPV6_RECVERR)):
            _errno, origin, icmp_type, code = struct.unpack("@IBBB", data[:7])
            if origin == ORIGIN_ICMP:
                return f"icmp {icmp_type}/{code}"
            if origin == ORIGIN_ICMP6:
                return f"icmp6 {icmp_type}/{code}"
    return None


def _answered(line: bytes) -> str:
    """Return the outcome that an endpoint's line describes (:func:`wirelab.endpoints.answer_line`)."""
    where, destination, port, source, _source_port = line.decode().split()
    if where == "outside":
        return "outside from " + source
    return f"{join_host_port(destination, int(port))} from {source}"
