# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The generation of nf_tables and its list of tables. Source: net/netfilter/nf_tables_api.c.

Each transaction of any program in a network namespace increments the generation, which the kernel keeps in 32 bits.
What the data path does to sets (session affinity) and counters does not increment it.
"""

from __future__ import annotations

import hashlib
from typing import Iterable, NamedTuple

from ...base.errors import KernelError
from ..netlink.attributes import parse_attributes
from ..netlink.outcomes import Reply
from ..netlink.protocol import NETLINK_NETFILTER
from ..netlink.socket import NetlinkSocket
from .attributes import GENMSG, GENMSG_BYTES, GET_GENERATION, GET_TABLE, NEW_GENERATION, NFTA_GEN_ID

#: The last two bytes of ``struct nfgenmsg`` are those of the generation.
_HEAD_COMPARED = 2


class Generation(NamedTuple):
    """The generation, and the SHA-256 of what the kernel lists of all tables: names, flags, handles, owners, uses."""

    number: int
    tables: str


def read_generation() -> Generation:
    """Return the generation in the network namespace of the calling thread. Raises KernelError."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        for _attempt in range(3):
            before = _number(sock)
            rows: list[bytes] = []
            for view, _kind, start, end in sock.dump(GET_TABLE, GENMSG):
                rows.append(bytes(view[start : start + _HEAD_COMPARED]) + bytes(view[start + GENMSG_BYTES : end]))
            if _number(sock) == before:
                return Generation(before, hashlib.sha256(b"\0".join(sorted(rows))).hexdigest())
    raise KernelError("nf_tables: the tables kept changing while they were listed")


def generation_in(replies: Iterable[Reply]) -> int:
    """Return the generation that the kernel reports, 0 if none of these messages is such a report."""
    for reply in replies:
        if reply.type == NEW_GENERATION:
            found = parse_attributes(memoryview(reply.payload), GENMSG_BYTES, len(reply.payload))
            if NFTA_GEN_ID in found:
                return int.from_bytes(found[NFTA_GEN_ID], "big")
    return 0


def _number(sock: NetlinkSocket) -> int:
    number = generation_in(sock.request(GET_GENERATION, GENMSG))
    if not number:
        raise KernelError("nf_tables: the kernel reported no generation")
    return number
