# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Entries of connection tracking of all protocols, and the removal of some of them."""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Tuple

from ..netlink.attributes import parse_attributes
from .messages import (
    CTA_IP_V4_SRC,
    CTA_IP_V6_SRC,
    CTA_PROTO_NUM,
    CTA_PROTO_SRC_PORT,
    CTA_TUPLE_IP,
    CTA_TUPLE_ORIG,
    CTA_TUPLE_PROTO,
    CTA_TUPLE_REPLY,
    NFGENMSG,
    identity_of,
)
from .socket import ConntrackSocket, collected


class Connection(NamedTuple):
    """A tracked connection: its client, the replying end, and the port (0 for protocols without ports).

    ``identity``: the attributes by which exactly this entry is deleted.
    """

    source: bytes
    destination: bytes
    protocol: int
    port: int
    identity: bytes


def _source(view: memoryview) -> Tuple[bytes, int, int]:
    """Return source address, protocol and source port of a tuple."""
    parts = parse_attributes(view, 0, len(view))
    addresses = parse_attributes(parts[CTA_TUPLE_IP], 0, len(parts[CTA_TUPLE_IP]))
    transport = parse_attributes(parts[CTA_TUPLE_PROTO], 0, len(parts[CTA_TUPLE_PROTO]))
    address = next(bytes(addresses[kind]) for kind in (CTA_IP_V4_SRC, CTA_IP_V6_SRC) if kind in addresses)
    port = int.from_bytes(transport.get(CTA_PROTO_SRC_PORT, b""), "big")
    return address, bytes(transport[CTA_PROTO_NUM])[0], port


def _connections(sock: ConntrackSocket, family: str) -> Iterator[Connection]:
    for view, _kind, start, end in sock.dump(family):
        found = parse_attributes(view, start + NFGENMSG.size, end)
        if CTA_TUPLE_ORIG not in found or CTA_TUPLE_REPLY not in found:
            continue
        source, protocol, _port = _source(found[CTA_TUPLE_ORIG])
        destination, _protocol, port = _source(found[CTA_TUPLE_REPLY])
        yield Connection(source, destination, protocol, port, identity_of(found))


def cut_connections(family: str, unwanted: Callable[[Connection], bool]) -> int:
    """Delete the entries of a family that are unwanted; return how many existed. Raises KernelError."""
    with ConntrackSocket() as sock:
        chosen = collected(lambda: (each.identity for each in _connections(sock, family) if unwanted(each)))
        return sock.delete(family, chosen)
