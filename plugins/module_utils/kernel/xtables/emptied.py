# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables of iptables-nft in which nothing is left once our chains have gone.

iptables-nft makes a table with its built-in chains when the first rule comes, and never deletes it again. Legacy
tables cannot be deleted at all while their module is loaded. Source: linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import errno
from typing import Dict, List, NamedTuple, Set, Tuple

from ...errors import KernelError
from ...resources import Change, Resource
from ..netlink import NETLINK_NETFILTER, Message, NetlinkRefusal, NetlinkSocket, attribute_text, parse_attributes
from ..netlink import text_attribute as text
from ..nftables.messages import (
    BATCH_BEGIN,
    BATCH_END,
    DELETE_CHAIN,
    DELETE_TABLE,
    GET_CHAIN,
    GET_TABLE,
    family_header,
)
from .chains import ChainsResource

#: NLM_F_NONREC: refuse to delete what still holds something.
_NOT_RECURSIVE = 0x100
_TABLE_NAME, _TABLE_USE = 1, 3
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY = 1, 3, 4, 5
_ACCEPT = 1
#: Somebody has put something into the table since we looked, or has deleted it.
_OVERTAKEN = frozenset((errno.EBUSY, errno.ENOENT))


class BuiltinChains(NamedTuple):
    """The names of a table's built-in chains."""

    names: Tuple[str, ...]


class EmptiedTablesResource(Resource[str, BuiltinChains]):
    """The tables that the removal of our chains leaves empty, by name: for taking them away afterwards.

    ``chains``: the resource, made for removal, whose removal it is. A table in which there is nothing of ours now is
    never touched, nor is one with a policy other than ACCEPT.
    """

    def __init__(self, chains: ChainsResource) -> None:
        self.name = f"{chains.name}: emptied tables"
        self._chains = chains
        self._family = chains.variant.family

    def observe(self) -> Dict[str, BuiltinChains]:
        """Those tables. ``chains`` has to be observed before. Raises KernelError."""
        if not self._chains.emptied:
            return {}
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            try:
                uses = self._uses(sock)
                builtin, strict = self._builtin(sock)
            except NetlinkRefusal as refusal:
                raise KernelError(f"{self.name}: cannot be read: {refusal}") from refusal
        found = {}
        for table in self._chains.emptied:
            chains = builtin.get(table, [])
            if table not in strict and uses.get(table) == len(chains) + self._chains.emptied[table]:
                found[table] = BuiltinChains(tuple(sorted(chains)))
        return found

    def _uses(self, sock: NetlinkSocket) -> Dict[str, int]:
        """How many things (chains, sets and others) each table of the family holds."""
        found = {}
        for payload, _kind, start, end in sock.dump(GET_TABLE, family_header(self._family)):
            attributes = parse_attributes(payload, start + 4, end)
            use = int.from_bytes(attributes.get(_TABLE_USE, b""), "big")
            found[attribute_text(attributes[_TABLE_NAME])] = use
        return found

    def _builtin(self, sock: NetlinkSocket) -> Tuple[Dict[str, List[str]], Set[str]]:
        """The built-in chains of each table, and the tables in which one has a policy other than ACCEPT."""
        found: Dict[str, List[str]] = {}
        strict: Set[str] = set()
        for payload, _kind, start, end in sock.dump(GET_CHAIN, family_header(self._family)):
            attributes = parse_attributes(payload, start + 4, end)
            if _CHAIN_HOOK not in attributes:
                continue
            table = attribute_text(attributes[_CHAIN_TABLE])
            found.setdefault(table, []).append(attribute_text(attributes[_CHAIN_NAME]))
            if int.from_bytes(attributes.get(_CHAIN_POLICY, b""), "big") != _ACCEPT:
                strict.add(table)
        return found, strict

    def apply(self, change: Change[str, BuiltinChains]) -> None:
        """Delete them, each as a whole and only if it is really empty. Raises KernelError."""
        header = family_header(self._family)
        with NetlinkSocket(NETLINK_NETFILTER) as sock:
            for table, chains in change.removed.items():
                batch: List[Message] = [BATCH_BEGIN]
                for name in chains.names:
                    batch.append((DELETE_CHAIN, _NOT_RECURSIVE, header + text(1, table) + text(3, name)))
                batch += [(DELETE_TABLE, _NOT_RECURSIVE, header + text(1, table)), BATCH_END]
                errors = sock.transact(batch, single_send=True, acknowledge=False).errors
                if errors and not {error.errno for error in errors} & _OVERTAKEN:
                    raise KernelError(f"{self.name}: {table}: cannot be deleted: {errors[0]}")

    def describe(self, key: str, value: BuiltinChains) -> List[str]:
        """The table and its chains as iptables-save begins them."""
        return [f"*{key}", *(f"{key}: :{name} ACCEPT [0:0]" for name in value.names)]
