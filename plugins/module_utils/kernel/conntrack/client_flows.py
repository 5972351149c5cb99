# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connections of clients to chosen destinations, and which of them are in use, from connection tracking.

Large tables are expected: of most entries only the destination is read.
"""

from __future__ import annotations

import functools
from typing import Iterator, Mapping

from ..client_flow import ClientFlow, Wanted
from ..netlink.attributes import parse_attributes
from .messages import CTA_TUPLE_ORIG, NFGENMSG, PROTOCOLS, RawEntry, parse_tuple, state_number
from .socket import ConntrackSocket, collected

# Connections that no server has answered, for example because a network policy drops them, and those that have ended.
# linux/netfilter/nf_conntrack_tcp.h: SYN_SENT, TIME_WAIT and CLOSE; nf_conntrack_sctp.h: COOKIE_WAIT and CLOSED.
_NOT_IN_USE: Mapping[str, frozenset[int]] = {"TCP": frozenset((1, 7, 8)), "SCTP": frozenset((1, 2))}


def client_flows(family: str, wanted: Wanted) -> list[ClientFlow]:
    """Return the connections of a family to destinations that are wanted. Raises KernelError."""
    found: list[ClientFlow] = []
    with ConntrackSocket() as sock:
        for protocol in PROTOCOLS:
            found += collected(functools.partial(_flows, sock, family, protocol, wanted))
    return found


def _flows(sock: ConntrackSocket, family: str, protocol: str, wanted: Wanted) -> Iterator[ClientFlow]:
    for entry in sock.entries(family, protocol):
        if wanted(protocol, entry.destination):
            source, used = _details(entry, protocol)
            yield ClientFlow(protocol, source, entry.destination, used)


def _details(entry: RawEntry, protocol: str) -> tuple[bytes, bool]:
    """Return the source of an entry, and whether its connection is in use."""
    parts = parse_attributes(entry.view, entry.start + NFGENMSG.size, entry.end)
    original = parse_tuple(parts, CTA_TUPLE_ORIG)
    source = original[1] if original is not None else b""
    state = state_number(parts, protocol)
    return source, state is None or state not in _NOT_IN_USE[protocol]
