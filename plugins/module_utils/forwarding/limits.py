# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Limits of the forwarder, so that no client, Service or endpoint can exhaust the agent."""

from __future__ import annotations

from typing import NamedTuple

from ..base.addresses import FAMILIES

#: Pipes for splice(2), of two descriptors each; a connection without one is copied through a buffer.
MOST_PIPES = 256


class Limits(NamedTuple):
    """The limits; times are in seconds."""

    #: TCP connections at a time, each of which takes two open files.
    connections: int = 16384
    #: UDP sessions at a time, each with one file.
    sessions: int = 8192
    #: Listening sockets.
    listeners: int = 65536
    #: The time for one attempt to connect to an endpoint.
    connect_seconds: float = 1.0
    #: The maximum number of endpoints to try for one connection.
    attempts: int = 5
    #: How long a connection may be silent.
    idle_seconds: float = 86400.0
    #: How long a connection may be silent after one side has closed its half.
    half_closed_seconds: float = 3600.0
    #: How long a UDP session that was never answered may be silent.
    udp_seconds: float = 30.0
    #: How long a UDP session that was answered may be silent.
    udp_stream_seconds: float = 120.0
    #: How long an endpoint to which a connection failed is used only if no other is left.
    avoid_seconds: float = 5.0
    #: How long open connections may continue when the agent stops.
    drain_seconds: float = 5.0
    #: The number of clients that are remembered for each ServicePort.
    affinity_clients: int = 65536


def within_files(limits: Limits, files: int, others: int) -> Limits:
    """Return the limits for a process with ``files`` file descriptors: a quarter each for sessions and listeners.

    ``others``: how many of them the rest of the process uses.
    """
    left = max(64, files - others - 2 * MOST_PIPES)
    return limits._replace(
        connections=min(limits.connections, left // 4),
        sessions=min(limits.sessions, left // 4),
        listeners=min(limits.listeners, left // 4),
    )


class Totals:
    """Counters since the start of the agent, for metrics and status.

    ``accepted``: TCP connections; ``sessions``: UDP sessions. ``refused_sources``: connections and datagrams from
    clients outside the source ranges. ``refused_limit``: connections refused because there were too many, ``evicted``:
    connections and sessions ended to make room for others. ``connect_failures``: attempts to connect to an endpoint
    that failed, ``unreachable``: connections for which all did, or whose hop limit was used up. ``dropped``: datagrams
    without an endpoint, that a socket did not take, or whose hop limit was used up. ``bytes``: moved by TCP
    connections, in both directions. ``unopened``: attempts to listen at the loopback address of a family that failed.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self.sessions = 0
        self.refused_sources = 0
        self.refused_limit = 0
        self.evicted = 0
        self.connect_failures = 0
        self.unreachable = 0
        self.dropped = 0
        self.bytes = 0
        self.unopened: dict[str, int] = dict.fromkeys(FAMILIES, 0)
