# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All users of the conntrack table read it in the same way: interrupted dumps, kernels without filters."""

from __future__ import annotations

import errno
import socket

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import packed_place as place
from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.behaviour import CORRECTED
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack import socket as conntrack_socket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack import tcp_flows
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.connections import cutting_connections
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.flows import parse_flow
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.socket import ConntrackSocket, finished
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.conntrack.stale import delete_stale
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import attribute, nested
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.outcomes import (
    MessageError,
    NetlinkRefusal,
    Outcome,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import DumpInterrupted
from ansible_collections.kubenode.proxy.plugins.module_utils.serviceports.flows import Frontend
from tests.lab.pausing import end_connections

CLIENT, SERVICE, POD = "192.0.2.1", "10.96.0.10", "10.244.1.5"
PORT, POD_PORT = 53, 5353


def half(kind: int, source: bytes, destination: bytes, protocol: int) -> bytes:
    addresses = nested(1, attribute(1, source[:-2]), attribute(2, destination[:-2]))
    ports = [attribute(2, source[-2:]), attribute(3, destination[-2:])]
    return nested(kind, addresses, nested(2, attribute(1, bytes((protocol,))), *ports))


def original(client_port: int, protocol: int) -> bytes:
    return half(1, place(CLIENT, client_port), place(SERVICE, PORT), protocol)


def entry(client_port: int, protocol: int) -> bytes:
    return (
        bytes(4) + original(client_port, protocol) + half(2, place(POD, POD_PORT), place(CLIENT, client_port), protocol)
    )


class Kernel:
    """A stand-in for both netlink sockets that answers each dump with the next of ``dumps`` and records deletions.

    ``interrupted``: how many dumps it marks as interrupted. ``refusal``: the error that refuses a filter, or 0.
    """

    def __init__(self, dumps: list[list[bytes]], interrupted: int = 0, refusal: int = 0) -> None:
        self.dumps = dumps
        self.interrupted = interrupted
        self.refusal = refusal
        self.deleted: list[bytes] = []
        self.opened = self.closed = 0

    def __call__(self, _protocol):
        self.opened += 1
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.close()

    def close(self):
        self.closed += 1

    def dump_stream(self, _kind, payload):
        if self.refusal and len(payload) > 4:
            raise NetlinkRefusal(MessageError(0, self.refusal, "", b""))
        messages = self.dumps.pop(0)
        for message in messages:
            yield memoryview(message), 0, 0, len(message)
        self.interrupted -= 1
        if self.interrupted >= 0:
            raise DumpInterrupted

    def transact(self, messages):
        if messages and len(messages[0][2]) > 4 and messages[0][0] == 0x0102:
            self.deleted += [payload[4:] for _kind, _flags, payload in messages]
        return Outcome([], [])


def remove_stale(kernel):
    with ConntrackSocket() as sock:
        return delete_stale(sock, "IPv4", (), CORRECTED, [Frontend("UDP", SERVICE, PORT)])


def end(kernel):
    return end_connections("IPv4", (POD, POD_PORT), (SERVICE, PORT)).connections


def cut(kernel):
    several = {bytes((10, 244, 1, number)) for number in range(5, 20)}
    return finished(
        cutting_connections("IPv4", several, lambda connection: connection.destination == place(POD, 0)[:-2])
    )


USERS = [
    pytest.param(remove_stale, socket.IPPROTO_UDP, id="stale entries"),
    pytest.param(end, socket.IPPROTO_TCP, id="connections to an endpoint"),
    pytest.param(cut, socket.IPPROTO_TCP, id="connections that policies deny"),
]


@pytest.fixture
def kernel_with(monkeypatch):
    def make(*arguments, **options):
        kernel = Kernel(*arguments, **options)
        monkeypatch.setattr(conntrack_socket, "NetlinkSocket", kernel)
        monkeypatch.setattr(tcp_flows, "NetlinkSocket", kernel)
        return kernel

    return make


@pytest.mark.parametrize(("use", "protocol"), USERS)
def test_entries_of_a_table_that_never_stops_changing_are_deleted(kernel_with, use, protocol):
    kernel = kernel_with([[entry(40000 + number, protocol)] for number in range(20)], interrupted=20)
    assert use(kernel) == 1
    last = 40000 + 20 - len(kernel.dumps) - 1
    assert kernel.deleted == [original(last, protocol)]
    assert kernel.opened == kernel.closed


@pytest.mark.parametrize(("use", "protocol"), USERS)
def test_only_the_whole_dump_counts_if_there_is_one(kernel_with, use, protocol):
    dumps = [[entry(40000, protocol)], [entry(40001, protocol), entry(40002, protocol)], [], []]
    kernel = kernel_with(dumps, interrupted=1)
    assert use(kernel) == 2
    assert kernel.deleted == [original(40001, protocol), original(40002, protocol)]


@pytest.mark.parametrize(("use", "protocol"), USERS)
def test_a_kernel_that_does_not_know_filters_returns_all_entries(kernel_with, use, protocol):
    others = [entry(50000, socket.IPPROTO_SCTP), bytes(4)]
    kernel = kernel_with([[*others, entry(40000, protocol)], [], []], refusal=errno.EOPNOTSUPP)
    if use is cut:
        others.pop()
    assert use(kernel) == (2 if use is cut else 1)
    assert original(40000, protocol) in kernel.deleted


def test_a_table_that_cannot_be_read_is_an_error(kernel_with):
    kernel = kernel_with([], refusal=errno.EPERM)
    with pytest.raises(KernelError, match="connection tracking table cannot be read"):
        end(kernel)
    assert kernel.opened == kernel.closed


@pytest.mark.parametrize(
    ("protocol", "status", "info", "state"),
    [
        (17, 0b1010, b"", "replied"),
        (17, 0b1000, b"", "unreplied"),
        (17, 0b1110, b"", "replied, assured"),
        (6, 0b1110, nested(1, attribute(1, bytes((3,)))), "established, assured"),
        (6, 0b1110, nested(1, attribute(1, bytes((200,)))), "replied, assured"),
        (132, 0b0010, nested(3, attribute(1, bytes((4,)))), "established"),
    ],
)
def test_an_entry_is_read_with_its_state_and_endpoint(protocol: int, status: int, info: bytes, state: str) -> None:
    name = {6: "TCP", 17: "UDP", 132: "SCTP"}[protocol]
    more = attribute(3, status.to_bytes(4, "big")) + attribute(7, (29).to_bytes(4, "big")) + nested(4, info)
    raw = entry(5555, protocol) + more
    found = parse_flow(memoryview(raw), 0, len(raw), name)
    assert found is not None
    assert (found.source, found.destination) == ((CLIENT, 5555), (SERVICE, PORT))
    assert (found.reply_source, found.reply_destination) == ((POD, POD_PORT), (CLIENT, 5555))
    assert (found.state, found.seconds) == (state, 29)
    assert parse_flow(memoryview(raw), 0, len(raw), "TCP" if protocol == 17 else "UDP") is None
    assert parse_flow(memoryview(raw[:4]), 0, 4, name) is None
