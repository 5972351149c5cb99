# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The state of the forwarder as JSON values."""

from __future__ import annotations

from typing import List, TypedDict


class ForwardingStatus(TypedDict, total=False):
    """The state of the forwarder; empty if there has been no listener.

    ``unbound``: some of the listeners whose address cannot be listened on, ``unboundCount`` all of them.
    """

    listeners: int
    sockets: int
    connections: int
    sessions: int
    mostConnections: int
    mostSessions: int
    accepted: int
    udpSessions: int
    bytes: int
    connectFailures: int
    unreachable: int
    refusedBySourceRange: int
    refusedByLimit: int
    evicted: int
    droppedDatagrams: int
    unbound: List[str]
    unboundCount: int
