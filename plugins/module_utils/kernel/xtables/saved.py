# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Save the chains of a service proxy as iptables-save prints them, and restore them among the rules of other programs.

The text of the node's own iptables-save is saved, and restored unchanged, whichever program wrote the rules. A jump
from a built-in chain is restored to its position among the remaining rules of other programs; these are never changed.
"""

from __future__ import annotations

import difflib
import functools
from typing import Callable, Iterable, Mapping, NamedTuple, Optional, Sequence

from ...base.errors import ConfigurationError, KernelError, errors_as
from ...rendering.iptables.canonical import canonical_rule, target_of
from ...rendering.iptables.commit_order import Commit, commits
from ...rendering.iptables.portions import ChainChange, portions
from ...rendering.iptables.restore_input import one_line, transaction
from ...rendering.iptables.tables import ChainKey, ChainTableKey, JumpKey, Ownership
from ...resources import Change, Kind, Resource
from ..netlink.protocol import NETLINK_NETFILTER
from ..netlink.socket import NetlinkSocket
from ..nftables.listing import nft_chains, nft_tables
from .chains import Emptied, SavedTables, check_readable, parse_save, reachable_chains, shared_chains_to_keep
from .restore import restore, save
from .variant import NFT, XtablesVariant

CHAIN = "chain"
BUILTIN = "builtin"

Rules = tuple[str, ...]


class SavedChainKey(NamedTuple):
    """``kind``: chain, for a whole chain of ours; builtin, for a built-in chain (with all of its rules, in order)."""

    kind: str
    table: str
    chain: str


SavedChainTable = dict[SavedChainKey, Rules]
SavedChange = Change[SavedChainKey, Rules]


def merged_rules(observed: Sequence[str], saved: Sequence[str], ours: Callable[[str], bool]) -> Rules:
    """Return the rules that a built-in chain should hold: those of other programs as observed, ours as saved.

    Each of ours is placed after the external rule that it followed when it was saved, if that one still exists.
    """
    others = [rule for rule in observed if not ours(rule)]
    before = [rule for rule in saved if not ours(rule)]
    place: dict[int, int] = {}
    matcher = difflib.SequenceMatcher(None, before, others, autojunk=False)
    for block in matcher.get_matching_blocks():
        place.update((block.a + step, block.b + step) for step in range(block.size))
    inserted: dict[int, list[str]] = {}
    position = number = 0
    for rule in saved:
        if ours(rule):
            inserted.setdefault(position, []).append(rule)
        else:
            position = place[number] + 1 if number in place else position
            number += 1
    merged: list[str] = []
    for index in range(len(others) + 1):
        merged += inserted.get(index, ())
        merged += others[index : index + 1]
    return tuple(merged)


def places_in(known: SavedTables) -> tuple[str, ...]:
    """Return the existing tables, each followed by its built-in chains as ``TABLE CHAIN``."""
    found: dict[str, None] = {}
    for table, chain in known.chains:
        found[table] = None
        if (table, chain) in known.builtin:
            found[f"{table} {chain}"] = None
    return tuple(found)


def places_of_nft(family: str) -> tuple[str, ...]:
    """Return the same for iptables-nft, whose save program lists chains that do not exist. Raises KernelError."""
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        tables = [table.name for table in nft_tables(sock, family)]
        chains = [f"{chain.table} {chain.name}" for chain in nft_chains(sock, family) if chain.policy is not None]
    return (*tables, *chains)


def restore_lines(commit: Commit, ours: Callable[[str, str], bool]) -> str:
    """Return one commit as input of ``iptables-restore --noflush``.

    ``ours`` returns for a table and rule whether a rule of a built-in chain is ours: no other rule is ever named.
    Raises KernelError if a rule or a name holds a line break.
    """
    change: SavedChange = commit.change
    chains: list[str] = []
    first: list[str] = []
    last: list[str] = []
    wanted = change.new_values()
    before = {**change.removed, **{key: old for key, (old, _new) in change.replaced.items()}}
    for key in (*change.removed, *change.replaced, *change.added):
        if key.kind == CHAIN:
            chains.append(f":{key.chain} - [0:0]")
            if key in wanted:
                first += [f"-A {key.chain} {rule}" for rule in wanted[key]]
            else:
                last.append(f"-X {key.chain}")
            continue
        first[:0] = [f"-D {key.chain} {rule}" for rule in before.get(key, ()) if ours(key.table, rule)]
        for position, rule in enumerate(wanted.get(key, ()), 1):
            if ours(key.table, rule):
                first.append(f"-I {key.chain} {position} {rule}")
    with errors_as(KernelError, "saved state", ConfigurationError):
        return transaction(commit.table, chains, map(one_line, [*first, *last]))


def saved_portions(change: SavedChange) -> list[list[Commit]]:
    """Split a large change as :func:`portions` does; all built-in chains change in one step, as jumps do there."""
    keys: dict[ChainTableKey, SavedChainKey] = {
        ChainKey(key.table, key.chain) if key.kind == CHAIN else JumpKey(key.table, key.chain, ""): key
        for key in (*change.added, *change.replaced, *change.removed)
    }
    names = {key: name for name, key in keys.items()}
    whole: ChainChange = Change(
        {names[key]: rules for key, rules in change.added.items()},
        {names[key]: pair for key, pair in change.replaced.items()},
        {names[key]: rules for key, rules in change.removed.items()},
    )

    def of_saved(commit: Commit) -> Commit:
        parts = (commit.change.added, commit.change.replaced, commit.change.removed)
        return Commit(commit.table, Change(*({keys[name]: value for name, value in part.items()} for part in parts)))

    return [list(map(of_saved, run)) for run in portions(whole)]


class SavedChainsResource(Resource[SavedChainKey, Rules]):
    """The chains of a service proxy in one iptables variant and family, and the built-in chains that lead to them.

    ``saved``: the chains to restore, and ``places``, the tables and built-in chains (``TABLE CHAIN``) that existed when
    they were saved; None to save the current state. After observing, ``places`` has those that exist now, and
    ``emptied`` those that did not exist then and hold nothing once the chains are restored.
    """

    kind = Kind.CHAINS
    atomic = True

    def __init__(
        self,
        variant: XtablesVariant,
        ownership: Ownership,
        saved: Optional[Mapping[SavedChainKey, Rules]] = None,
        places: Sequence[str] = (),
    ) -> None:
        self.variant = variant
        self.family, self.qualifier = variant.family, variant.name
        self.ownership = ownership
        self.saved = dict(saved or {})
        self.places: tuple[str, ...] = ()
        self._restoring = saved is not None
        self._places_then = frozenset(places)
        self.emptied = Emptied({}, frozenset())
        self._keep: set[ChainKey] = set()

    def _is_jump(self, table: str, rule: str) -> bool:
        """Return whether a rule of a built-in chain leads into a chain of ours that need not be kept."""
        target = target_of(rule)
        if not target or not self.ownership.owns(table, target):
            return False
        key = ChainKey(table, target)
        if key in self.ownership.shared and canonical_rule(rule, self.variant.family) != f"-j {target}":
            return False
        return key not in self._keep

    def observe(self) -> SavedChainTable:
        """Return the chains with their rules, and the built-in chains that lead, or led when saved, to them.

        Raises KernelError, also if a table cannot be read that has chains of ours or gets them back.
        """
        known = parse_save(save(self.variant, self.progress))
        self.progress()
        check_readable(self.variant, known, self.ownership, {key.table for key in self.saved})
        self.places = places_of_nft(self.variant.family) if self.variant.name == NFT else places_in(known)
        self._keep = self._chains_to_keep(known)
        table: SavedChainTable = {}
        for (name, chain), rules in known.chains.items():
            if (name, chain) in known.builtin:
                key = SavedChainKey(BUILTIN, name, chain)
                if key in self.saved or any(self._is_jump(name, rule) for rule in rules):
                    table[key] = tuple(rules)
            elif self.ownership.owns(name, chain) and ChainKey(name, chain) not in self._keep:
                table[SavedChainKey(CHAIN, name, chain)] = tuple(rules)
        self.emptied = self._emptied(known, table)
        return table

    def _chains_to_keep(self, known: SavedTables) -> set[ChainKey]:
        """Return chains of ours that are not saved but must be kept, because other programs use them."""
        if not self._restoring:
            return set()
        back = {ChainKey(key.table, key.chain) for key in self.saved if key.kind == CHAIN}
        used: list[ChainKey] = []
        for (table, chain), rules in known.chains.items():
            if (table, chain) in known.builtin or self.ownership.owns(table, chain):
                continue
            targets = (target_of(rule) for rule in rules)
            used += [ChainKey(table, target) for target in targets if target and self.ownership.owns(table, target)]
        used += shared_chains_to_keep(known, self.variant.family, self.ownership)
        return reachable_chains(known, used, {ChainKey(*chain) for chain in known.chains} - back)

    def _emptied(self, known: SavedTables, table: SavedChainTable) -> Emptied:
        ours: dict[str, int] = {}
        occupied: set[str] = set()
        builtin: set[tuple[str, str]] = set()
        for (name, chain), rules in known.chains.items():
            if (name, chain) in known.builtin:
                if not all(self._is_jump(name, rule) for rule in rules):
                    occupied.add(name)
                elif rules:
                    ours.setdefault(name, 0)
                    builtin.add((name, chain))
            elif SavedChainKey(CHAIN, name, chain) in table:
                ours[name] = ours.get(name, 0) + 1
            else:
                occupied.add(name)
        tables = {name: count for name, count in ours.items() if name not in {*self._places_then, *occupied}}
        return Emptied(tables, frozenset(place for place in builtin if " ".join(place) not in self._places_then))

    def desired(self, observed: Mapping[SavedChainKey, Rules]) -> SavedChainTable:
        """Return the observed table with our entries replaced by the saved ones; call it after :meth:`observe`."""
        table = {key: rules for key, rules in self.saved.items() if key.kind == CHAIN}
        for key in dict.fromkeys((*observed, *self.saved)):
            if key.kind == BUILTIN:
                ours = functools.partial(self._is_jump, key.table)
                table[key] = merged_rules(observed.get(key, ()), self.saved.get(key, ()), ours)
        return table

    def apply(self, change: SavedChange) -> None:
        """Make the whole change in one run of iptables-restore: all or nothing per commit. Raises KernelError.

        With iptables-nft large changes are made in portions, so a failure may leave chains that no rule leads to.
        """
        for run in saved_portions(change) if self.variant.name == NFT else [commits(change)]:
            self.progress()
            text = "".join(restore_lines(commit, self._is_jump) for commit in run)
            restore(self.variant, text, self.progress)

    def describe(self, key: SavedChainKey, value: Rules) -> list[str]:
        """Return the lines of iptables-save for one chain."""
        head: Iterable[str] = [f"{key.table}: :{key.chain} - [0:0]"] if key.kind == CHAIN else []
        return [*head, *(f"{key.table}: -A {key.chain} {rule}" for rule in value)]
