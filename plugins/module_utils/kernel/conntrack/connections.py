# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Entries of connection tracking of all protocols, and the removal of some of them.

A table may have a million entries, of which few belong to given addresses. So the kernel selects them, or for many
addresses only the two ends of an entry are decoded unless it belongs to one of them.
"""

from __future__ import annotations

import struct
from typing import AbstractSet, Callable, Iterator, NamedTuple, Optional

from ...base.addresses import IPV6
from ...base.progress import Progress, unheeded
from ..netlink.attributes import attribute, nested, parse_attributes
from ..netlink.protocol import Slice
from . import messages as ct
from .socket import ConntrackSocket, Steps, collecting

#: Up to this many addresses, the kernel selects entries: it goes through the table twice for each of them.
_MOST_SELECTED = 4
#: Entries between two pauses.
_PORTION = 1000
# The start of a tuple: length and type of it, then the type and the value of the source address.
_SOURCE_V4, _SOURCE_V6 = struct.Struct("=HH4x2xH4s"), struct.Struct("=HH4x2xH16s")


class Connection(NamedTuple):
    """A tracked connection: its client, the replying end, and the port (0 for protocols without ports).

    ``identity``: the attributes by which exactly this entry is deleted.
    """

    source: bytes
    destination: bytes
    protocol: int
    port: int
    identity: bytes


def _connection(entry: Slice) -> Optional[Connection]:
    view, _kind, start, end = entry
    found = parse_attributes(view, start + ct.NFGENMSG.size, end)
    tuples = ct.parse_tuples(found)
    if tuples is None:
        return None
    (protocol, source, _destination), (_protocol, replying, _client) = tuples
    return Connection(source[:-2], replying[:-2], protocol, int.from_bytes(replying[-2:], "big"), ct.identity_of(found))


def _ends(entry: Slice, layout: struct.Struct, address: int) -> Optional[tuple[bytes, bytes]]:
    """Return client and replying end of an entry; None if its attributes come in an unexpected order."""
    view, _kind, start, end = entry
    offset = start + ct.NFGENMSG.size
    if offset + layout.size > end:
        return None
    length, original, kind, client = layout.unpack_from(view, offset)
    offset += (length + 3) & ~3
    if kind != address or original & ct.TYPE_MASK != ct.CTA_TUPLE_ORIG or offset + layout.size > end:
        return None
    _length, reply, kind, replying = layout.unpack_from(view, offset)
    return (client, replying) if kind == address and reply & ct.TYPE_MASK == ct.CTA_TUPLE_REPLY else None


def _selections(family: str, addresses: AbstractSet[bytes]) -> Iterator[bytes]:
    """Yield the selections of entries that together are those of these addresses; an empty one is the whole table."""
    if len(addresses) > _MOST_SELECTED:
        yield b""
        return
    kind = ct.CTA_IP_V6_SRC if family == IPV6 else ct.CTA_IP_V4_SRC
    for address in sorted(addresses):
        source = nested(ct.CTA_TUPLE_IP, attribute(kind, address))
        yield ct.selection(family, ct.CTA_TUPLE_ORIG, source, ct.CTA_FILTER_ORIG_FLAGS, ct.FILTER_IP_SRC)
        yield ct.selection(family, ct.CTA_TUPLE_REPLY, source, ct.CTA_FILTER_REPLY_FLAGS, ct.FILTER_IP_SRC)


def _connections(sock: ConntrackSocket, family: str, addresses: AbstractSet[bytes]) -> Iterator[Optional[Connection]]:
    """Yield the connections with one of these addresses at an end, and None after each portion of entries."""
    layout, kind = (_SOURCE_V6, ct.CTA_IP_V6_SRC) if family == IPV6 else (_SOURCE_V4, ct.CTA_IP_V4_SRC)
    for only in _selections(family, addresses):
        is_everything = not only
        for number, entry in enumerate(sock.dump(family, only), 1):
            if number % _PORTION == 0:
                yield None
            ends = _ends(entry, layout, kind)
            if ends is not None and ends[0] not in addresses and ends[1] not in addresses:
                # The kernel does not know the selection.
                is_everything = True
                continue
            connection = _connection(entry)
            if connection is not None and not addresses.isdisjoint(connection[:2]):
                yield connection
        yield None
        if is_everything:
            return


def cutting_connections(
    family: str, addresses: AbstractSet[bytes], unwanted: Callable[[Connection], bool], progress: Progress = unheeded
) -> Steps[int]:
    """Delete the unwanted entries of a family with one of these addresses at an end; return how many existed.

    Wherever it pauses, what is unwanted may change. Raises KernelError.
    """

    def read() -> Iterator[Optional[Connection]]:
        return (each for each in _connections(sock, family, addresses) if each is None or unwanted(each))

    deleted = 0
    with ConntrackSocket(progress) as sock:
        found = yield from collecting(read)
        for start in range(0, len(found), _PORTION):
            chosen = [each.identity for each in found[start : start + _PORTION] if unwanted(each)]
            deleted += sock.delete(family, list(dict.fromkeys(chosen)))
            yield
    return deleted
