# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Results of attempts whose packets the sender's own host refuses to send, and the source ports of attempts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from types import SimpleNamespace

import pytest

from tests.conformance.wirelab.flows import parse_flow
from tests.conformance.wirelab.senders import SOURCE_PORTS, Senders, Try

LOOPBACK = "127.0.0.1"
# No program listens on it, and the kernel assigns it to no socket: it answers that the port is unreachable.
CLOSED_PORT = 1


class NotLetOut(socket.socket):
    """A socket for which send() fails; the packet itself is passed on after a while, or never."""

    errors: list[int]
    seconds: float | None

    def send(self, data, flags=0):
        if not self.errors:
            return super().send(data, flags)
        if self.seconds is not None:
            asyncio.get_running_loop().call_later(self.seconds, super().send, data)
        number = self.errors.pop(0)
        raise OSError(number, os.strerror(number))


def attempt(errors, seconds, wait):
    """Make one attempt over UDP on the loopback device with such a socket."""

    def make(family, kind, protocol=0):
        made = NotLetOut(family, kind, protocol)
        made.setblocking(False)
        made.errors, made.seconds = list(errors), seconds
        return made

    async def run():
        topology = SimpleNamespace(namespaces={"node": SimpleNamespace(socket=make)})
        return await Senders(topology).attempt_once(parse_flow(f"udp node -> {LOOPBACK}:{CLOSED_PORT}"), wait)

    return asyncio.run(run())


@pytest.mark.parametrize("seconds", [0, 0.2])
def test_a_refusal_counts_also_when_its_message_comes_after_the_error(seconds):
    assert attempt([errno.EPERM], seconds, wait=30) == Try("reject icmp 3/3", LOOPBACK)


def test_without_a_message_the_error_itself_is_the_outcome():
    assert attempt([errno.EPERM], None, wait=0.1) == Try("error EPERM", LOOPBACK)


def test_a_full_queue_is_tried_again():
    assert attempt([errno.ENOBUFS] * 3, None, wait=30) == Try("reject icmp 3/3", LOOPBACK)


def test_a_queue_that_stays_full_drops():
    assert attempt([errno.ENOBUFS] * 1000, None, wait=0.2) == Try("drop", LOOPBACK)


def source_ports(flow_text, count, kind):
    """Return the source ports of sockets that are made and closed one after the other."""

    async def run():
        topology = SimpleNamespace(namespaces={"node": SimpleNamespace(socket=socket.socket)})
        senders, flow = Senders(topology), parse_flow(flow_text)
        ports = []
        for _ in range(count):
            with senders.make_socket(flow, kind) as made:
                ports.append(made.getsockname()[1])
        return ports

    return asyncio.run(run())


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
@pytest.mark.parametrize("source", ["node", f"node/{LOOPBACK}"])
def test_no_two_attempts_have_one_source_port(source, kind):
    ports = source_ports(f"tcp {source} -> {LOOPBACK}:{CLOSED_PORT}", 1000, kind)
    assert len(set(ports)) == 1000


def test_a_source_port_in_use_is_skipped():
    with socket.socket() as user:
        # Where another program has bound to the port already, it is in use as well.
        with contextlib.suppress(OSError):
            user.bind((LOOPBACK, SOURCE_PORTS[3]))
        ports = source_ports(f"tcp node/{LOOPBACK} -> {LOOPBACK}:{CLOSED_PORT}", 10, socket.SOCK_STREAM)
    assert len(ports) == 10 and SOURCE_PORTS[3] not in ports


def test_a_constant_source_port_is_used_again():
    assert source_ports(f"tcp node -> {LOOPBACK}:{CLOSED_PORT} sport=44123", 3, socket.SOCK_STREAM) == [44123] * 3
