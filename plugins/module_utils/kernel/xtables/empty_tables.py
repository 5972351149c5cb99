# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables and built-in chains of iptables-nft that are empty after our chains were removed.

iptables-nft creates a table and a built-in chain with the first rule in it, and never deletes them again. Legacy tables
cannot be deleted at all while their module is loaded. Source: linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

from typing import Iterable, Mapping, NamedTuple, Protocol

from ...base.errors import KernelError
from ...resources import Change, Kind, Resource
from ..netlink.attributes import text_attribute as text
from ..netlink.outcomes import is_busy, is_missing
from ..netlink.protocol import NETLINK_NETFILTER, Message
from ..netlink.socket import NetlinkSocket
from ..nftables.attributes import NFTA_CHAIN_NAME, NFTA_TABLE_NAME
from ..nftables.listing import ACCEPT, nft_chains, nft_tables
from ..nftables.messages import BATCH_BEGIN, BATCH_END, DELETE_CHAIN, DELETE_TABLE, family_header
from .chains import Emptied

#: NLM_F_NONREC: refuse to delete an object that still holds others.
_NOT_RECURSIVE = 0x100


class EmptyTableKey(NamedTuple):
    """A table, or with ``chain`` a built-in chain of it."""

    table: str
    chain: str = ""


class EmptyingChains(Protocol):
    """A resource of chains. After observing, ``emptied`` has what is empty once they are removed."""

    family: str
    qualifier: str
    emptied: Emptied


class EmptyTablesResource(Resource[EmptyTableKey, bool]):
    """The tables and built-in chains that the removal of our chains leaves empty, to be deleted after it.

    ``chains``: the resource, created for removal, that removes the chains. If it removes nothing, nothing is deleted; a
    chain with a policy other than ACCEPT is never deleted.
    """

    kind = Kind.EMPTY_TABLES
    # Applied right after the chains: once these are removed, nothing shows that the table held chains of ours.
    atomic = True

    def __init__(self, chains: EmptyingChains) -> None:
        self._chains = chains
        self.family, self.qualifier = chains.family, chains.qualifier

    def observe(self) -> dict[EmptyTableKey, bool]:
        """Return those tables and chains. ``chains`` must have been observed before. Raises KernelError."""
        emptied = self._chains.emptied
        if not emptied.tables and not emptied.builtin:
            return {}
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            uses = {table.name: table.uses for table in nft_tables(sock, self.family)}
            chains = nft_chains(sock, self.family)
        policies = {(chain.table, chain.name): chain.policy for chain in chains if chain.policy is not None}
        found = {}
        for (table, chain), policy in policies.items():
            whole = self._is_emptied(table, uses, policies)
            if whole or ((table, chain) in emptied.builtin and policy == ACCEPT):
                found[EmptyTableKey(table, chain)] = True
        found.update(
            {EmptyTableKey(table): True for table in emptied.tables if self._is_emptied(table, uses, policies)}
        )
        return found

    def _is_emptied(self, table: str, uses: Mapping[str, int], policies: Mapping[tuple[str, str], int]) -> bool:
        removed = self._chains.emptied.tables.get(table)
        builtin = [policy for (owner, _chain), policy in policies.items() if owner == table]
        return removed is not None and uses.get(table) == len(builtin) + removed and set(builtin) <= {ACCEPT}

    def apply(self, change: Change[EmptyTableKey, bool]) -> None:
        """Delete them, each table as a whole, and only if they are really empty. Raises KernelError."""
        header = family_header(self.family)
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            for keys in _together(change.removed):
                batch: list[Message] = [BATCH_BEGIN]
                for key in keys:
                    what = (DELETE_CHAIN, text(NFTA_CHAIN_NAME, key.chain)) if key.chain else (DELETE_TABLE, b"")
                    batch.append((what[0], _NOT_RECURSIVE, header + text(NFTA_TABLE_NAME, key.table) + what[1]))
                errors = sock.transact([*batch, BATCH_END], single_send=True, acknowledge=False).errors
                # Another program may have filled or deleted the table since it was observed.
                if errors and not any(is_busy(error) or is_missing(error) for error in errors):
                    raise KernelError(f"{self.label}: {keys[-1].table}: cannot be deleted: {errors[0]}")

    def describe(self, key: EmptyTableKey, value: bool) -> list[str]:
        """Return the first line of the table or chain in iptables-save."""
        return [f"{key.table}: :{key.chain} ACCEPT [0:0]" if key.chain else f"*{key.table}"]


def _together(keys: Iterable[EmptyTableKey]) -> list[list[EmptyTableKey]]:
    """Group the keys by transaction: a table with its chains; chains of a table that is kept, each alone."""
    listed = list(keys)
    tables = [key.table for key in listed if not key.chain]
    found = [[key for key in listed if key.table == table and key.chain] + [EmptyTableKey(table)] for table in tables]
    return found + [[key] for key in listed if key.table not in tables]
