# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The flag ``dormant`` of tables of iptables-nft, which iptables-save does not show.

While a table has it, the kernel calls no chain of the table. Programs other than nft neither set nor remove it.
"""

from __future__ import annotations

from typing import Collection, Set

from ...base.errors import KernelError
from ...rendering.nftables.objects import TABLE_DORMANT, TableIdentity
from ..netlink.protocol import NETLINK_NETFILTER
from ..netlink.socket import NetlinkSocket
from ..nftables.listing import nft_tables, owner_hint
from ..nftables.messages import BATCH_BEGIN, BATCH_END, Encoder


def dormant_tables(family: str, among: Collection[str]) -> Set[str]:
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
