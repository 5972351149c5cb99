# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packets that rules log: their headers, and a group that another program reads."""

from __future__ import annotations

import socket

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nflog import PacketLog, parse_packet

FOUR = bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2))
SIX = socket.inet_pton(socket.AF_INET6, "fd00::1"), socket.inet_pton(socket.AF_INET6, "fd00::2")
PORTS = bytes((0x80, 1, 0, 53))


def four(protocol, rest, options=b""):
    head = bytes((0x45 + len(options) // 4, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0))
    return head + b"".join(FOUR) + options + rest


def six(protocol, rest):
    return bytes((0x60, 0, 0, 0, 0, 0, protocol, 64)) + b"".join(SIX) + rest


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (four(17, PORTS), ("p", *FOUR, 17, 53)),
        (four(6, PORTS, bytes(8)), ("p", *FOUR, 6, 53)),
        (four(1, PORTS), ("p", *FOUR, 1, 0)),
        (four(17, PORTS[:2]), ("p", *FOUR, 17, 0)),
        (six(17, PORTS), ("p", *SIX, 17, 53)),
        (six(0, bytes((60, 0, *bytes(6), 17, 1, *bytes(14))) + PORTS), ("p", *SIX, 17, 53)),
        (six(0, b"\x3c"), ("p", *SIX, 0, 0)),
        (four(17, b"")[:19], None),
        (six(17, b"")[:39], None),
        (b"", None),
        (b"\x00" * 60, None),
    ],
)
def test_headers(data, found):
    assert parse_packet("p", data) == found


def test_a_group_has_one_reader():
    first = PacketLog(4999)
    try:
        with pytest.raises(KernelError, match="NFLOG group 4999"):
            PacketLog(4999)
        assert list(first.packets()) == []
    finally:
        first.close()
    PacketLog(4999).close()
