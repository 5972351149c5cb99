# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Probes in a :class:`.network.Network`: one attempt per flow, all concurrently, over TCP, UDP, SCTP and ICMP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from tests.conformance.wirelab.endpoints import Endpoints, Listener
from tests.conformance.wirelab.flows import Flow
from tests.conformance.wirelab.namespaces import NetworkNamespace
from tests.conformance.wirelab.senders import Senders

from .network import Network

LISTENING = (("tcp", 80), ("tcp", 8080), ("tcp", 8443), ("udp", 53), ("udp", 8080), ("sctp", 8080))
#: The second and third attempts wait longer, so that a busy machine is not mistaken for a firewall.
#: NETPOL_TIME_SCALE multiplies them, for an emulated machine.
TRY_SECONDS = tuple(seconds * float(os.environ.get("NETPOL_TIME_SCALE", "1")) for seconds in (0.25, 0.5, 1.0))
_ECHO = {4: (socket.IPPROTO_ICMP, 8, 0), 6: (socket.IPPROTO_ICMPV6, 128, 129)}


class Probe(NamedTuple):
    """One attempt: ``host`` is the sending namespace, ``source`` its address; ``port`` is 0 for ICMP."""

    protocol: str
    host: str
    source: str
    destination: str
    port: int = 0


class Wire:
    """Answer on every end of a network, and send probes. Use it within one event loop."""

    def __init__(self, network: Network) -> None:
        self._namespaces: dict[str, NetworkNamespace] = network.namespaces
        self._endpoints = Endpoints(cast(Any, network))
        self._senders = Senders(cast(Any, network))
        for host in network.names:
            if host != "router":
                for protocol, port in LISTENING:
                    self._endpoints.listen(Listener(host, protocol, port))

    def close(self) -> None:
        """Stop answering."""
        self._senders.close()
        self._endpoints.close()

    async def allowed(self, probes: Sequence[Probe]) -> dict[Probe, bool]:
        """Send every probe and return for each whether its destination answered."""
        found = dict.fromkeys(probes, False)
        for seconds in TRY_SECONDS:
            waiting = [probe for probe, answered in found.items() if not answered]
            answers = await asyncio.gather(*(self._answered(probe, seconds) for probe in waiting))
            found.update(zip(waiting, answers))
        return found

    async def _answered(self, probe: Probe, seconds: float) -> bool:
        if probe.protocol == "icmp":
            return await self._echo(probe, seconds)
        flow = self._flow(probe)
        outcome = (await self._senders.attempt_once(flow, seconds)).outcome
        return " from " in outcome

    @staticmethod
    def _flow(probe: Probe, **options: str) -> Flow:
        return Flow(str(probe), probe.protocol, options, probe.host, probe.source, probe.destination, probe.port)

    async def open(self, name: str, probe: Probe) -> bool:
        """Open a TCP connection and keep it under a name."""
        return " from " in (await self._senders.attempt_once(self._flow(probe, open=name), 2.0)).outcome

    async def is_alive(self, name: str) -> bool:
        """Return whether an open connection still transfers data both ways."""
        made = self._senders.open_connections[name]
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(made, b"still there?\n")
            return bool(await asyncio.wait_for(loop.sock_recv(made, 64), 2.0))
        except (asyncio.TimeoutError, OSError):
            return False

    async def _echo(self, probe: Probe, seconds: float) -> bool:
        version = 6 if ":" in probe.destination else 4
        protocol, request, reply = _ECHO[version]
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        loop = asyncio.get_running_loop()
        with contextlib.closing(self._namespaces[probe.host].socket(family, socket.SOCK_RAW, protocol)) as made:
            made.bind((probe.source, 0))
            nonce = os.urandom(12)
            number = int.from_bytes(os.urandom(2), "big")
            message = struct.pack("!BBHHH", request, 0, 0, number, 1) + nonce
            if version == 4:
                message = message[:2] + struct.pack("!H", _checksum(message)) + message[4:]
            try:
                await loop.sock_sendto(made, message, (probe.destination, 0))
                await asyncio.wait_for(_receive(made, version, reply, nonce), seconds)
            except (asyncio.TimeoutError, OSError):
                return False
            return True


async def _receive(made: socket.socket, version: int, reply: int, nonce: bytes) -> None:
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(made, 2048)
        if version == 4:
            data = data[(data[0] & 15) * 4 :]
        if data[0] == reply and data[8:] == nonce:
            return


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
