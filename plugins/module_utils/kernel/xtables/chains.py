# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The resource of chains and jump rules: read with iptables-save, written with one iptables-restore."""

from __future__ import annotations

import os
import re
from collections import deque
from typing import Collection, Iterable, Iterator, NamedTuple, Optional

from ...base.errors import KernelError
from ...rendering.iptables.canonical import canonical_rule, target_of
from ...rendering.iptables.commit_order import commits
from ...rendering.iptables.portions import portions
from ...rendering.iptables.tables import (
    PRESENT,
    ChainKey,
    ChainTable,
    ChainTableKey,
    ChainTableValue,
    DormantKey,
    JumpKey,
    Ownership,
    transaction_text,
)
from ...resources import Change, Kind, Resource, difference
from ..netlink.protocol import NETLINK_NETFILTER
from ..netlink.socket import NetlinkSocket
from ..nftables.listing import activate_tables, dormant_tables, nft_chains
from .restore import RestoreError, restore, save
from .variant import LEGACY, NFT, XtablesVariant

Chains = Change[ChainTableKey, ChainTableValue]

KUBELET_CHAINS = ("KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT", "KUBE-MARK-DROP")


class SavedTables(NamedTuple):
    """Parsed iptables-save text: (table, chain) to raw rule texts, and the chains with a policy (built-in ones).

    ``unreadable``: tables that iptables-nft-save does not show, because they hold rules that only nft understands.
    """

    chains: dict[tuple[str, str], list[str]]
    builtin: set[tuple[str, str]]
    unreadable: tuple[str, ...] = ()


_QUOTED_PAIR = re.compile(r"\\.")
_UNREADABLE = re.compile(r"^# Table `(\w+)' is incompatible", re.MULTILINE)


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text one by one: with 5,000 Services, all of them together take 20 MiB."""
    start = 0
    while True:
        end = text.find("\n", start)
        if end < 0:
            yield text[start:]
            return
        yield text[start:end]
        start = end + 1


def _whole_lines(text: str) -> Iterator[str]:
    """Yield lines of iptables-save text; a line break within quotes (in an external comment) does not end one."""
    pending = ""
    for line in _lines(text):
        if not pending and not line.count('"') & 1 and "\\" not in line:
            yield line
            continue
        pending = f"{pending}\n{line}" if pending else line
        if not _QUOTED_PAIR.sub("", pending).count('"') & 1:
            yield pending
            pending = ""
    if pending:
        yield pending


def parse_save(text: str) -> SavedTables:
    """Parse iptables-save text (with or without counters on the chain lines)."""
    chains: dict[tuple[str, str], list[str]] = {}
    builtin: set[tuple[str, str]] = set()
    table = ""
    chain = ""
    rules: list[str] = []
    for line in _whole_lines(text):
        head = line[:1]
        if head == "-":
            option, _blank, rest = line.partition(" ")
            name, _blank, rule = rest.partition(" ")
            if option != "-A":
                continue
            if name != chain:
                chain, rules = name, chains.setdefault((table, name), [])
            rules.append(rule)
        elif head == ":":
            name, policy = line[1:].split(" ", 2)[:2]
            chains.setdefault((table, name), [])
            if policy != "-":
                builtin.add((table, name))
        elif head == "*":
            table, chain = line[1:].strip(), ""
    return SavedTables(chains, builtin, tuple(_UNREADABLE.findall(text)))


def unreadable_text(variant: XtablesVariant, table: str) -> str:
    """Return in words that the variant's save program does not show a table, and why."""
    return (
        f"table {table} of {variant.family}: {variant.save} cannot show it, since it holds rules "
        "that only nft understands; move these to a table of their own"
    )


def refuse_unreadable(variant: XtablesVariant, saved: SavedTables, tables: Collection[str]) -> None:
    """Raise KernelError for the first of the tables that the variant's save program does not show."""
    for table in saved.unreadable:
        if table in tables:
            raise KernelError(unreadable_text(variant, table))


def check_readable(
    variant: XtablesVariant, saved: SavedTables, ownership: Ownership, wanted: Collection[str] = ()
) -> None:
    """Raise KernelError if a table that the variant's save program cannot show holds, or will hold, chains of ours.

    ``wanted``: the tables that will get chains of ours. Any other may remain unread if no chain of ours is in it.
    """
    if not saved.unreadable:
        return
    with NetlinkSocket(NETLINK_NETFILTER) as sock:
        ours = {chain.table for chain in nft_chains(sock, variant.family) if ownership.owns(chain.table, chain.name)}
    refuse_unreadable(variant, saved, ours.union(wanted))


def observed_table(saved: SavedTables, family: str, ownership: Ownership) -> ChainTable:
    """Filter parsed iptables-save output down to chains owned by ``ownership`` and jumps to them from built-in chains.

    Any rule of a built-in chain that leads into a chain of ours is ours, except for a shared chain, where only the
    plain jump is. Rules of other chains never are.
    """
    table: ChainTable = {}
    for (name, chain), rules in saved.chains.items():
        if (name, chain) in saved.builtin or not ownership.owns(name, chain):
            continue
        key = ChainKey(name, chain)
        if key in ownership.presence_only:
            table[key] = PRESENT
        else:
            table[key] = tuple([canonical_rule(rule, family) for rule in rules])
    for name, chain in sorted(saved.builtin):
        for rule in saved.chains[(name, chain)]:
            target = target_of(rule)
            if not target or not ownership.owns(name, target):
                continue
            canonical = canonical_rule(rule, family)
            if (name, target) in ownership.shared and canonical != f"-j {target}":
                continue
            jump = JumpKey(name, chain, canonical)
            count = table.get(jump, 0)
            table[jump] = (count if isinstance(count, int) else 0) + 1
    return table


def _external_references(saved: SavedTables, family: str, ownership: Ownership, observed: ChainTable) -> list[ChainKey]:
    """Return chains of ours that rules of other programs jump to."""
    used: list[ChainKey] = []
    for (table, chain), rules in saved.chains.items():
        if ownership.owns(table, chain):
            continue
        for rule in rules:
            target = ChainKey(table, target_of(rule))
            if target in observed and JumpKey(table, chain, canonical_rule(rule, family)) not in observed:
                used.append(target)
    return used


def reachable_chains(saved: SavedTables, start: Iterable[ChainKey], among: Collection[object]) -> set[ChainKey]:
    """Return those chains in ``among`` that are in ``start`` or that rules of the returned chains lead into."""
    pending = list(start)
    reached: set[ChainKey] = set()
    while pending:
        key = pending.pop()
        if key not in reached and key in among:
            reached.add(key)
            pending += [ChainKey(key.table, target_of(rule)) for rule in saved.chains[key]]
    return reached


def shared_chains_to_keep(saved: SavedTables, family: str, ownership: Ownership) -> list[ChainKey]:
    """Return the shared chains to be kept: kubelet has chains on the node, or they hold rules that are not ours."""
    kubelet = any(chain in KUBELET_CHAINS for _table, chain in saved.chains)
    ours = ownership.shared_content
    return [
        key
        for key in ownership.shared
        if key in saved.chains
        and (kubelet or not all(canonical_rule(rule, family) in ours for rule in saved.chains[key]))
    ]


class Emptied(NamedTuple):
    """Containers that hold only entries to be removed.

    ``tables``: tables, with the number of chains to be removed. ``builtin``: built-in chains as (table, chain).
    """

    tables: dict[str, int]
    builtin: frozenset[tuple[str, str]]


def _emptied(saved: SavedTables, removed: ChainTable) -> Emptied:
    """Return the tables and built-in chains that are empty once the entries ``removed`` are removed."""
    jumps: dict[tuple[str, str], int] = {}
    for key, count in removed.items():
        if isinstance(key, JumpKey) and isinstance(count, int):
            jumps[key.table, key.chain] = jumps.get((key.table, key.chain), 0) + count
    builtin = frozenset(place for place, count in jumps.items() if len(saved.chains[place]) == count)
    names = {key.table for key in removed}
    for (table, chain), rules in saved.chains.items():
        if (table, chain) in saved.builtin:
            remains = bool(rules) and (table, chain) not in builtin
        else:
            remains = ChainKey(table, chain) not in removed
        if remains:
            names.discard(table)
    chains = [key.table for key in removed if isinstance(key, ChainKey)]
    return Emptied({name: chains.count(name) for name in names}, builtin)


def _entries_of(key: ChainTableKey, value: ChainTableValue) -> int:
    """Return the number of legacy table entries that a chain (head, rules and end) or a jump occupies."""
    if isinstance(key, JumpKey):
        return value if isinstance(value, int) else 1
    return 2 + (len(value) if isinstance(value, tuple) else 0)


def added_entries(change: Change[ChainTableKey, ChainTableValue]) -> dict[str, int]:
    """Return, per table, by how many entries a change grows it."""
    found: dict[str, int] = {}
    for key, value in change.added.items():
        found[key.table] = found.get(key.table, 0) + _entries_of(key, value)
    for key, (old, new) in change.replaced.items():
        found[key.table] = found.get(key.table, 0) + _entries_of(key, new) - _entries_of(key, old)
    for key, value in change.removed.items():
        found[key.table] = found.get(key.table, 0) - _entries_of(key, value)
    return found


class ChainsResource(Resource[ChainTableKey, ChainTableValue]):
    """Chains of ours and the jumps into them, of one family, in the tables of one iptables variant.

    ``for_removal``: chains that must be kept are not observed, so that
    an empty desired table removes all the rest. A shared chain (KUBE-FIREWALL) is kept if kubelet has chains on the
    node or if it holds rules that are not ours; kube-proxy always keeps it. Chains that external rules lead into are
    kept as well. Without ``for_removal``, chains that external rules jump to are emptied instead of removed, since the
    kernel refuses to remove them, and with them everything else in the table: ``referenced`` holds those last observed.
    After observing, ``kept`` lists these, as ``table chain``, and ``emptied`` the tables and built-in
    chains that hold nothing else. ``processes``: the process numbers of the last restore programs, by which
    notifications of the kernel identify our own changes.
    """

    kind = Kind.CHAINS
    atomic = True

    def __init__(self, variant: XtablesVariant, ownership: Ownership, for_removal: bool = False) -> None:
        self.family = variant.family
        self.variant = variant
        self.ownership = ownership
        self.kept: list[str] = []
        self.referenced: frozenset[ChainKey] = frozenset()
        self.emptied = Emptied({}, frozenset())
        self.processes: deque[int] = deque(maxlen=1024)
        self._for_removal = for_removal
        self._written: Optional[dict[str, int]] = None

    def observe(self) -> ChainTable:
        """Return our chains and jumps. Raises KernelError, also if a table with chains of ours cannot be read."""
        text = save(self.variant, self.progress)
        self.progress()
        saved = parse_save(text)
        self.progress()
        wanted = () if self._for_removal else {chain.table for chain in self.ownership.fixed}
        check_readable(self.variant, saved, self.ownership, wanted)
        table = observed_table(saved, self.variant.family, self.ownership)
        if self._for_removal:
            self._drop_kept(saved, table)
            self.emptied = _emptied(saved, table)
            return table
        self.referenced = frozenset(_external_references(saved, self.family, self.ownership, table))
        if self.variant.name == NFT:
            for name in sorted(dormant_tables(self.family, {*wanted, *(key.table for key in table)})):
                table[DormantKey(name)] = PRESENT
        return table

    def _drop_kept(self, saved: SavedTables, table: ChainTable) -> None:
        family = self.variant.family
        used = _external_references(saved, family, self.ownership, table)
        keep = reachable_chains(saved, used, table)
        keep.update(key for key in shared_chains_to_keep(saved, family, self.ownership) if key in table)
        self.kept = sorted(f"{key.table} {key.chain}" for key in keep)
        for entry in list(table):
            if isinstance(entry, DormantKey):
                continue
            chain = ChainKey(entry.table, target_of(entry.rule)) if isinstance(entry, JumpKey) else entry
            if chain in keep and (chain in self.ownership.shared or not isinstance(entry, JumpKey)):
                del table[entry]

    def apply(self, change: Change[ChainTableKey, ChainTableValue]) -> None:
        """Make the whole change in one run of iptables-restore: all or nothing per commit. Raises KernelError.

        With iptables-nft large changes are made in portions, so a failure may leave chains that no rule leads to.
        """
        dormant = [key.table for key in change.removed if isinstance(key, DormantKey)]
        if dormant:
            # First, so that Services are served again even if another change is refused.
            self.processes.append(os.getpid())
            activate_tables(self.family, dormant)
            change = Change(change.added, change.replaced, dict(change.removed))
            for table in dormant:
                del change.removed[DormantKey(table)]
        change = self._with_referenced_emptied(change)
        if self.variant.name == LEGACY:
            self._note_written(change)
        try:
            self._restore(change)
        except RestoreError:
            if self._for_removal or not any(isinstance(key, ChainKey) for key in change.removed):
                raise
            rest = self._change_after_refusal(change)
            if rest is None:
                raise
            self._restore(rest)

    def _with_referenced_emptied(self, change: Chains) -> Chains:
        """Return the change with chains emptied instead of removed if rules of other programs jump to them."""
        used = [key for key in change.removed if isinstance(key, ChainKey) and key in self.referenced]
        if self._for_removal or not used:
            return change
        removed = {key: value for key, value in change.removed.items() if key not in used}
        emptied: Chains = Change(change.added, dict(change.replaced), removed)
        emptied.replaced.update((key, (change.removed[key], ())) for key in used)
        return emptied

    def _change_after_refusal(self, change: Chains) -> Optional[Chains]:
        """Read everything, and return what is left of a refused change, without removing chains that are referred to.

        None if no rule of another program jumps to any of the chains to be removed.
        """
        observed = self.observe()
        used = [key for key in change.removed if isinstance(key, ChainKey) and key in self.referenced]
        if not used:
            return None
        target: ChainTable = change.new_values()
        emptied: ChainTable = dict.fromkeys(used, ())
        target.update(emptied)
        if self.variant.name == LEGACY:
            self._note_written(Change(added=emptied))
        return difference(observed, target, [*target, *(key for key in change.removed if key not in target)])

    def _restore(self, change: Chains) -> None:
        for run in portions(change) if self.variant.name == NFT else [commits(change)]:
            self.progress()
            text = "".join(map(transaction_text, run))
            process = restore(self.variant, text, self.progress)
            if process:
                self.processes.append(process)

    def _note_written(self, change: Change[ChainTableKey, ChainTableValue]) -> None:
        self._written = self._written or {}
        for table, more in added_entries(change).items():
            self._written[table] = self._written.get(table, 0) + more

    def pop_written(self) -> Optional[dict[str, int]]:
        """Return :func:`added_entries` of all changes since the last call; None if there was none.

        Only changes of legacy tables are recorded.
        """
        written, self._written = self._written, None
        return written

    def describe(self, key: ChainTableKey, value: ChainTableValue) -> list[str]:
        """Return the lines of iptables-save for one chain or jump."""
        if isinstance(key, JumpKey):
            return [f"{key.table}: -I {key.chain} {key.rule}"]
        if isinstance(key, DormantKey):
            return [f"{key.table}: flags dormant"]
        lines = [f"{key.table}: :{key.chain} - [0:0]"]
        if isinstance(value, tuple):
            lines += [f"{key.table}: -A {key.chain} {rule}" for rule in value]
        return lines
