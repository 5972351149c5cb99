# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Netlink batches against the host's kernel: order, attribution of errors, dumps."""

from __future__ import annotations

import errno
import socket
import struct
import subprocess

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink import socket as netlink_socket
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import (
    attribute,
    attribute_text,
    parse_attributes,
    text_attribute,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.generic import generic_family
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.outcomes import NetlinkRefusal
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.protocol import (
    NETLINK_GENERIC,
    NETLINK_ROUTE,
    NLM_F_CREATE,
    NLM_F_EXCL,
    Message,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.socket import NetlinkSocket

RTM_NEWADDR, RTM_GETADDR, RTM_GETLINK = 20, 22, 18
NEW = NLM_F_CREATE | NLM_F_EXCL


def address(number: int, index: int = 1) -> Message:
    raw = struct.pack("!I", 0x0A000000 + number)
    head = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, index)
    return (RTM_NEWADDR, NEW, head + attribute(2, raw) + attribute(1, raw))


def test_every_error_is_attributed_to_its_message():
    """Send 20,000 messages, most of them refused: more errors than the receive buffer holds for one send."""
    messages = [address(number, 1 if number % 100 == 0 else 999) for number in range(20_000)]
    messages[300] = (RTM_NEWADDR, NEW, b"short")
    with NetlinkSocket(NETLINK_ROUTE) as sock:
        errors = {error.position: error for error in sock.transact(messages).errors}
        assert set(errors) == {number for number in range(20_000) if number % 100 or number == 300}
        assert errors[1].errno == errno.ENODEV and "Device not found" in str(errors[1])
        assert errors[300].errno == errno.EOPNOTSUPP
        again = sock.transact([address(0), address(7), address(100)]).errors
        assert [(error.position, error.errno) for error in again] == [(0, errno.EEXIST), (2, errno.EEXIST)]
    shown = subprocess.run(["ip", "-o", "-4", "address", "show"], check=True, capture_output=True, text=True).stdout
    assert shown.count("inet 10.") == 200


def test_a_small_receive_buffer_only_makes_batches_smaller(monkeypatch):
    monkeypatch.setattr(netlink_socket, "_RECEIVE_BUFFER_BYTES", 65536)
    with NetlinkSocket(NETLINK_ROUTE, send_bytes=16384) as sock:
        errors = sock.transact([address(number, 999) for number in range(5000)]).errors
    assert [error.position for error in errors] == list(range(5000))


def test_dump_and_request():
    with NetlinkSocket(NETLINK_ROUTE) as sock:
        head = struct.pack("=BxHiII", 0, 0, 0, 0, 0)
        names = [
            attribute_text(parse_attributes(view, start + len(head), end)[3])
            for view, _kind, start, end in sock.dump(RTM_GETLINK, head)
        ]
        assert "lo" in names
        (reply,) = sock.request(RTM_GETLINK, head + text_attribute(3, "lo"))
        assert struct.unpack_from("=BxHi", reply.payload)[2] == 1
        with pytest.raises(NetlinkRefusal, match=r"No such device \(ENODEV\)"):
            sock.request(RTM_GETLINK, head + text_attribute(3, "nonesuch"))


def test_an_abandoned_dump_does_not_disturb_the_next_one():
    with NetlinkSocket(NETLINK_ROUTE) as sock:
        sock.transact([address(number) for number in range(2000)])
        head = struct.pack("=BBBBI", socket.AF_INET, 0, 0, 0, 0)
        stream = sock.dump_stream(RTM_GETADDR, head)
        next(stream)
        stream.close()
        assert len(sock.dump(RTM_GETADDR, head)) == 2001


def test_generic_families():
    with NetlinkSocket(NETLINK_GENERIC) as sock:
        assert generic_family(sock, "nlctrl") == 16
        with pytest.raises(KernelError, match="no generic netlink family NONESUCH"):
            generic_family(sock, "NONESUCH")
