# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The section ``traffic``: what is counted for each Service, and for how many Services there are metrics."""

from __future__ import annotations

from typing import NamedTuple, Tuple

from ..field import AGENT, HONOURED, Field
from ..reader import Section

_MOST = 10_000


class TrafficSettings(NamedTuple):
    """``count_connections``, ``count_bytes``: nftables mode counts these, the latter with packets.

    ``metrics_ports``: the most ServicePorts that have metrics. ``metrics_namespaces``: only Services in these have
    metrics; all if it is empty.
    """

    count_connections: bool = False
    count_bytes: bool = False
    metrics_ports: int = 0
    metrics_namespaces: Tuple[str, ...] = ()


FIELDS: Tuple[Field, ...] = (
    Field(
        "traffic.countConnections",
        "traffic.count_connections",
        "`false`",
        "nftables",
        HONOURED,
        "in nftables mode, count the connections of each [Service and endpoint](traffic.md); the other modes always do",
    ),
    Field(
        "traffic.countBytes",
        "traffic.count_bytes",
        "`false`",
        "nftables",
        HONOURED,
        "count the [packets and bytes](traffic.md#packets-and-bytes-in-nftables-mode) of each Service; ipvs mode "
        "counts them anyway, the other modes cannot",
    ),
    Field(
        "traffic.metricsPorts",
        "traffic.metrics_ports",
        "0",
        "all",
        AGENT,
        f"of how many ports of Services there are [metrics](traffic.md#metrics), for each IP family, 0 to {_MOST}: of "
        "those with the most new connections",
    ),
    Field(
        "traffic.metricsNamespaces",
        "traffic.metrics_namespaces",
        "all",
        "all",
        AGENT,
        "namespaces whose Services have these metrics",
    ),
)


def read(section: Section) -> TrafficSettings:
    """Read and validate the section."""
    default = TrafficSettings()
    found = TrafficSettings(
        count_connections=section.flag("countConnections", default.count_connections),
        count_bytes=section.flag("countBytes", default.count_bytes),
        metrics_ports=section.integer("metricsPorts", default.metrics_ports, 0, _MOST),
        metrics_namespaces=section.namespaces("metricsNamespaces"),
    )
    section.finish()
    return found
