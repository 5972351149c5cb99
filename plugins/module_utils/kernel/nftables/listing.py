# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""List the tables and chains of nf_tables, whichever program created them, and make dormant tables active.

While a table has the flag ``dormant``, the kernel calls no chain of the table. Programs other than nft neither set nor
remove it, and iptables-save does not show it. Source: linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

from typing import Collection, Iterator, NamedTuple, Optional

from ...base.errors import KernelError
from ...rendering.nftables.objects import TABLE_DORMANT, TableIdentity
from ..netlink.attributes import attribute_text, number_in, parse_attributes
from ..netlink.outcomes import MessageError, NetlinkRefusal, is_forbidden, is_missing, is_unsupported, refusals_as
from ..netlink.protocol import NETLINK_NETFILTER, Slice
from ..netlink.socket import NetlinkSocket
from . import attributes as uapi
from .messages import BATCH_BEGIN, BATCH_END, GET_CHAIN, Encoder, family_header

ACCEPT = 1


class NftTable(NamedTuple):
    """A table; ``uses``: the number of objects (chains, sets and others) it holds.

    ``owner``: the netlink port of the program that alone can change the table, 0 if there is none.
    """

    name: str
    uses: int
    flags: int = 0
    owner: int = 0

    @property
    def dormant(self) -> bool:
        """Return whether no hook of the table is called."""
        return bool(self.flags & TABLE_DORMANT)


class NftChain(NamedTuple):
    """A chain of a table; ``policy``: None without a hook, else ACCEPT or the number of nf_tables for dropping."""

    table: str
    name: str
    policy: Optional[int]


def dumped(sock: NetlinkSocket, kind: int, payload: bytes) -> list[Slice]:
    """Return a dump of objects of a table; nothing if the table, or nf_tables itself, does not exist."""
    try:
        return sock.dump(kind, payload)
    except NetlinkRefusal as refusal:
        if is_missing(refusal.error) or is_unsupported(refusal.error):
            return []
        raise


def _dump(sock: NetlinkSocket, kind: int, family: str, what: str) -> Iterator[dict[int, memoryview]]:
    with refusals_as(f"{what} of nftables ({family}) cannot be listed"):
        dumped = sock.dump(kind, family_header(family))
    for view, _kind, start, end in dumped:
        yield parse_attributes(view, start + uapi.GENMSG_BYTES, end)


def nft_tables(sock: NetlinkSocket, family: str) -> list[NftTable]:
    """Return all tables of a family, over a NETLINK_NETFILTER socket. Raises KernelError."""
    return [
        NftTable(
            attribute_text(found[uapi.NFTA_TABLE_NAME]),
            number_in(found, uapi.NFTA_TABLE_USE),
            number_in(found, uapi.NFTA_TABLE_FLAGS),
            number_in(found, uapi.NFTA_TABLE_OWNER),
        )
        for found in _dump(sock, uapi.GET_TABLE, family, "tables")
    ]


def owner_hint(sock: NetlinkSocket, family: str, name: str, error: MessageError) -> str:
    """Return what to append to a refusal if another program owns the table: its netlink port; empty if none is known.

    The kernel refuses every change of such a table by other programs and deletes it when its owner ends.
    """
    try:
        tables = nft_tables(sock, family) if is_forbidden(error) else []
    except KernelError:
        return ""
    owner = next((table.owner for table in tables if table.name == name), 0)
    return f"; the program with netlink port {owner} (usually its process number) owns the table" if owner else ""


def nft_chains(sock: NetlinkSocket, family: str) -> list[NftChain]:
    """Return all chains of a family, over a NETLINK_NETFILTER socket. Raises KernelError."""
    chains = []
    for found in _dump(sock, GET_CHAIN, family, "chains"):
        policy = number_in(found, uapi.NFTA_CHAIN_POLICY) if uapi.NFTA_CHAIN_HOOK in found else None
        chains.append(
            NftChain(attribute_text(found[uapi.NFTA_CHAIN_TABLE]), attribute_text(found[uapi.NFTA_CHAIN_NAME]), policy)
        )
    return chains


def dormant_tables(family: str, among: Collection[str]) -> set[str]:
    """Return those of the tables in which the kernel calls no chain. Raises KernelError."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        return {table.name for table in nft_tables(sock, family) if table.dormant and table.name in among}


def activate_tables(family: str, names: Collection[str]) -> None:
    """Make the kernel call the chains of these tables again, those of other programs included. Raises KernelError."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        tables = [table for table in nft_tables(sock, family) if table.dormant and table.name in names]
        if not tables:
            return
        changes = [
            Encoder(family, TableIdentity(table.name, "")).table_flags(table.flags & ~TABLE_DORMANT) for table in tables
        ]
        errors = sock.transact([BATCH_BEGIN, *changes, BATCH_END], single_send=True, acknowledge=False).errors
        if not errors:
            return
        name = tables[max(0, min(errors[0].position - 1, len(tables) - 1))].name
        text = f"table {name} ({family}) is dormant and cannot be made active: {errors[0]}"
        text += owner_hint(sock, family, name, errors[0])
        raise KernelError(text)
