# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Results of attempts whose packets the sender's own host refuses to send."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from types import SimpleNamespace

import pytest

from tests.conformance.wirelab.flows import parse_flow
from tests.conformance.wirelab.senders import Senders, Try

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
