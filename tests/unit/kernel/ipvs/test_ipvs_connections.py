# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connections of IPVS that are in use, from the lines of /proc/net/ip_vs_conn."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.connections import (
    connections_of,
    parse_connections,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.ipvs.model import RealServerKey, VirtualServerKey

LINES = """\
Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP 0A000001 C350 0A600001 0050 0AF40101 1F90 ESTABLISHED     899
TCP 0A000001 C351 0A600001 0050 0AF40101 1F90 CLOSE_WAIT      119
TCP 0A000001 C352 0A600001 0050 0AF40102 1F90 TIME_WAIT       119
TCP 0A000001 C353 0A600001 0050 0AF40102 1F90 CLOSE             9
UDP 0A000001 C354 0A60000A 0035 0AF40103 0035 UDP             299
TCP 0A000001 0000 0A600002 0050 0AF40104 1F90 NONE          10799
IP  0A000001 0000 0A600002 0000 0AF40104 0000 NONE          10799
TCP fd00:0000:0000:0000:0000:0000:0000:0001 C350 fd00:0010:0096:0000:0000:0000:0000:0001 0050 \
fd00:0010:0244:0000:0000:0000:0000:0005 1F90 FIN_WAIT        119
""".splitlines()


def test_connections_in_use_are_counted_by_real_server() -> None:
    web, dns = VirtualServerKey("tcp", "10.96.0.1", 80), VirtualServerKey("udp", "10.96.0.10", 53)
    assert parse_connections(LINES, "IPv4") == {
        RealServerKey(web, "10.244.1.1", 8080): 2,
        RealServerKey(dns, "10.244.1.3", 53): 1,
    }
    six = VirtualServerKey("tcp", "fd00:10:96::1", 80)
    assert parse_connections(LINES, "IPv6") == {RealServerKey(six, "fd00:10:244::5", 8080): 1}


def test_connections_of_one_virtual_server_with_the_affinity_of_clients() -> None:
    web, sticky = VirtualServerKey("tcp", "10.96.0.1", 80), VirtualServerKey("tcp", "10.96.0.2", 80)
    found = connections_of(LINES, "IPv4", web)
    assert [(item.client[1], item.real_server.ip, item.state, item.seconds) for item in found] == [
        (0xC350, "10.244.1.1", "established", 899),
        (0xC351, "10.244.1.1", "close_wait", 119),
        (0xC352, "10.244.1.2", "time_wait", 119),
        (0xC353, "10.244.1.2", "close", 9),
    ]
    (record,) = connections_of(LINES, "IPv4", sticky)
    assert record.is_affinity and (record.client[0], record.real_server.ip) == ("10.0.0.1", "10.244.1.4")
    (six,) = connections_of(LINES, "IPv6", VirtualServerKey("tcp", "fd00:10:96::1", 80))
    assert six.client == ("fd00::1", 0xC350) and not six.is_affinity


def test_invalid_line_is_named() -> None:
    with pytest.raises(KernelError, match=r"cannot parse line: 'TCP 0A000001 C350 0A600001 port"):
        parse_connections(["TCP 0A000001 C350 0A600001 port 0AF40101 1F90 ESTABLISHED 899"], "IPv4")
