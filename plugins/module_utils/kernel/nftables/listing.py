# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""List the tables and chains of nf_tables, whichever program created them. Source: linux/netfilter/nf_tables.h."""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Optional

from ...errors import KernelError
from ..netlink.attributes import attribute_text, parse_attributes
from ..netlink.outcomes import NetlinkRefusal
from ..netlink.socket import NetlinkSocket
from .attributes import (
    NFTA_CHAIN_HOOK,
    NFTA_CHAIN_NAME,
    NFTA_CHAIN_POLICY,
    NFTA_CHAIN_TABLE,
    NFTA_TABLE_NAME,
    NFTA_TABLE_USE,
)
from .messages import GET_CHAIN, GET_TABLE, family_header

ACCEPT = 1
_HEAD = 4


class NftTable(NamedTuple):
    """A table; ``uses``: the number of objects (chains, sets and others) it holds."""

    name: str
    uses: int


class NftChain(NamedTuple):
    """A chain of a table; ``policy``: None without a hook, else ACCEPT or the number of nf_tables for dropping."""

    table: str
    name: str
    policy: Optional[int]


def _dump(sock: NetlinkSocket, kind: int, family: str, what: str) -> Iterator[Dict[int, memoryview]]:
    try:
        dumped = sock.dump(kind, family_header(family))
    except NetlinkRefusal as refusal:
        raise KernelError(f"{what} of nftables ({family}) cannot be listed: {refusal.error}") from refusal
    for view, _kind, start, end in dumped:
        yield parse_attributes(view, start + _HEAD, end)


def nft_tables(sock: NetlinkSocket, family: str) -> List[NftTable]:
    """Return all tables of a family, over a NETLINK_NETFILTER socket. Raises KernelError."""
    return [
        NftTable(attribute_text(found[NFTA_TABLE_NAME]), int.from_bytes(found.get(NFTA_TABLE_USE, b""), "big"))
        for found in _dump(sock, GET_TABLE, family, "tables")
    ]


def nft_chains(sock: NetlinkSocket, family: str) -> List[NftChain]:
    """Return all chains of a family, over a NETLINK_NETFILTER socket. Raises KernelError."""
    chains = []
    for found in _dump(sock, GET_CHAIN, family, "chains"):
        policy = int.from_bytes(found.get(NFTA_CHAIN_POLICY, b""), "big") if NFTA_CHAIN_HOOK in found else None
        chains.append(NftChain(attribute_text(found[NFTA_CHAIN_TABLE]), attribute_text(found[NFTA_CHAIN_NAME]), policy))
    return chains
