# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The traffic counters of IPVS. Source: linux/ip_vs.h (64-bit statistics since Linux 4.1)."""

from __future__ import annotations

import struct
from typing import Iterable, NamedTuple

from ...rendering.ipvs.model import RealServerKey, VirtualServerKey
from ..netlink.attributes import nested_in
from . import messages
from .servers import IpvsSocket

IPVS_SVC_ATTR_STATS64 = 12
IPVS_DEST_ATTR_STATS64 = 12
# IPVS_STATS_ATTR_CONNS, INPKTS, OUTPKTS, INBYTES and OUTBYTES.
_FIELDS = range(1, 6)
_U64 = struct.Struct("=Q")


class Statistics(NamedTuple):
    """The counters of a virtual or real server; packets and bytes in (from clients) and out (to clients)."""

    connections: int
    packets_in: int
    packets_out: int
    bytes_in: int
    bytes_out: int


class RealServerStatistics(NamedTuple):
    """The counters of a real server, and the connections that IPVS calls active and inactive."""

    counters: Statistics
    active: int
    inactive: int


def _counters(attributes: dict[int, memoryview], kind: int) -> Statistics:
    found = nested_in(attributes, kind)
    return Statistics(*(_U64.unpack(found[field])[0] if field in found else 0 for field in _FIELDS))


def virtual_server_statistics(sock: IpvsSocket, family: str) -> dict[VirtualServerKey, Statistics]:
    """Return the counters of all virtual servers of a family. Raises KernelError."""
    return {key: _counters(attributes, IPVS_SVC_ATTR_STATS64) for key, _value, attributes in sock.services(family)}


def real_server_statistics(
    sock: IpvsSocket, servers: Iterable[VirtualServerKey]
) -> dict[RealServerKey, RealServerStatistics]:
    """Return the counters of the real servers of some virtual servers. Raises KernelError.

    A virtual server that was removed meanwhile has none.
    """
    found: dict[RealServerKey, RealServerStatistics] = {}
    for server in servers:
        for view, start, end in sock.real_server_messages(server):
            parts = messages.dest_attributes(view, start, end)
            if parts:
                found[messages.real_server_key(parts, server)] = RealServerStatistics(
                    _counters(parts, IPVS_DEST_ATTR_STATS64), *messages.connection_counts(parts)
                )
    return found
