# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The resource table of chains and jump rules, the ownership of chains, and the text for iptables-restore.

One table holds both: ``ChainKey`` maps to the tuple of its rules, ``JumpKey`` to the number of times the rule occurs in
a built-in chain (1 is desired; any more are removed). Rules are canonical texts (see ``canonical``), without ``-A
CHAIN``. The value PRESENT means a chain that must exist but whose rules belong to another program. ``DormantKey`` marks
a table of iptables-nft in which the kernel calls no chain: it is never desired, and iptables-restore cannot remove it.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional, Union

from ...base.errors import ConfigurationError
from ...resources import Change, Kind
from ...serviceports.info import ServicePortName
from .commit_order import Commit, commits
from .restore_input import one_line, transaction

FILTER = "filter"
NAT = "nat"
MANGLE = "mangle"

# Names of the resource table of chains and jumps, and of the table of fragments of shared chains.
CHAINS = Kind.CHAINS
FRAGMENTS = "fragments"

PRESENT = "present"

Rules = tuple[str, ...]


class ChainKey(NamedTuple):
    """A chain of our own: table (nat, filter, mangle) and name."""

    table: str
    chain: str


class JumpKey(NamedTuple):
    """A rule in a built-in chain (INPUT, PREROUTING, ...) that jumps to a chain of ours."""

    table: str
    chain: str
    rule: str


class DormantKey(NamedTuple):
    """The flag ``dormant`` of a table of iptables-nft; its value is PRESENT."""

    table: str


ChainTableKey = Union[ChainKey, JumpKey, DormantKey]
ChainTableValue = Union[Rules, str, int]
ChainTable = dict[ChainTableKey, ChainTableValue]


Place = tuple[int, tuple[str, ...]]
"""Rank and owner of a fragment: its position among those of its chain."""


class Fragment(NamedTuple):
    """A part of a chain that many ServicePorts share; the parts are joined in the order of rank and owner.

    ``rank`` is 0 for rules before those of the Services, 1 for those of a Service, 2 for rules that must come last.
    ``owner`` is the ServicePort, None for static rules.
    """

    chain: ChainKey
    rank: int
    owner: Optional[ServicePortName]

    @property
    def place(self) -> Place:
        """Return the position of the part among the others of its chain."""
        return self.rank, self.owner or ()


class Ownership(NamedTuple):
    """The chains that are ours, by table.

    ``fixed`` are full names, ``prefixes`` starts of names, per table. ``shared`` chains are created by us if necessary,
    and used by other programs too (KUBE-FIREWALL, with kubelet): they are removed only if no other program uses them,
    that is, if they hold nothing but ``shared_content``. Of ``presence_only`` chains only the existence is ours.
    """

    fixed: frozenset[ChainKey]
    prefixes: Mapping[str, tuple[str, ...]]
    shared: frozenset[ChainKey] = frozenset()
    presence_only: frozenset[ChainKey] = frozenset()
    shared_content: frozenset[str] = frozenset()

    def owns(self, table: str, chain: str) -> bool:
        """Return whether the chain is ours, wholly or shared."""
        return (
            (table, chain) in self.fixed
            or (table, chain) in self.shared
            or chain.startswith(self.prefixes.get(table, ()))
        )


# Shared chains of up to this many rules are rewritten whole; larger ones are edited rule by rule if little changes.
_REWRITE_BELOW = 48


def _edits(chain: str, old: Rules, new: Rules) -> Optional[list[str]]:
    """Return lines that turn ``old`` into ``new`` by single deletions and insertions; None if a rewrite is better.

    Unchanged rules keep their packet counters, and the size of the text is O(change).
    """
    if min(len(old), len(new)) < _REWRITE_BELOW:
        return None
    old_rules, new_rules = set(old), set(new)
    gone = [rule for rule in old if rule not in new_rules]
    come = [(position, rule) for position, rule in enumerate(new, 1) if rule not in old_rules]
    if len(gone) + len(come) > len(new) // 8 or len(old_rules) != len(old) or len(new_rules) != len(new):
        return None
    if [rule for rule in old if rule in new_rules] != [rule for rule in new if rule in old_rules]:
        return None
    return [f"-D {chain} {rule}" for rule in gone] + [f"-I {chain} {position} {rule}" for position, rule in come]


class _TableText:
    """The lines of one table's transaction, in the required order."""

    def __init__(self) -> None:
        self.chains: list[str] = []
        self.before: list[str] = []
        self.rules: list[str] = []
        self.jumps: list[str] = []
        self.deleted: list[str] = []

    def fill(self, chain: str, rules: Rules) -> None:
        self.chains.append(f":{chain} - [0:0]")
        if rules:
            body = "\n".join(rules)
            if body.count("\n") != len(rules) - 1 or "\r" in body or "\0" in body:
                raise ConfigurationError(f"chain {chain}: a rule holds a line break or NUL")
            head = f"-A {chain} "
            self.rules.append(head + body.replace("\n", f"\n{head}"))

    def input(self, table: str) -> str:
        before, jumps, deleted = (map(one_line, lines) for lines in (self.before, self.jumps, self.deleted))
        return transaction(table, self.chains, [*before, *self.rules, *jumps, *deleted])


def _replace_chain(text: _TableText, chain: str, old: ChainTableValue, new: ChainTableValue) -> None:
    if not isinstance(new, tuple):
        return
    edits = _edits(chain, old, new) if isinstance(old, tuple) else None
    if edits is None:
        text.fill(chain, new)
    else:
        text.rules.extend(map(one_line, edits))


def _remove(text: _TableText, key: ChainTableKey, value: ChainTableValue) -> None:
    if isinstance(key, JumpKey):
        text.before.extend([f"-D {key.chain} {key.rule}"] * (value if isinstance(value, int) else 1))
    elif isinstance(key, ChainKey):
        text.chains.append(f":{key.chain} - [0:0]")
        text.deleted.append(f"-X {key.chain}")


def _replace(text: _TableText, key: ChainTableKey, old: ChainTableValue, new: ChainTableValue) -> None:
    if isinstance(key, ChainKey):
        _replace_chain(text, key.chain, old, new)
    elif isinstance(key, JumpKey) and isinstance(old, int) and isinstance(new, int):
        text.before.extend([f"-D {key.chain} {key.rule}"] * (old - new))
        text.jumps.extend([f"-I {key.chain} {key.rule}"] * (new - old))


def _add(text: _TableText, key: ChainTableKey, value: ChainTableValue) -> None:
    if isinstance(key, JumpKey):
        text.jumps.append(f"-I {key.chain} {key.rule}")
    elif isinstance(key, ChainKey) and isinstance(value, tuple):
        text.fill(key.chain, value)
    elif isinstance(key, ChainKey):
        text.before.append(f"-N {key.chain}")


def transaction_text(commit: Commit) -> str:
    """Return one commit as input of ``iptables-restore --noflush``.

    Built-in chains are never named as chains, so they are not flushed. Order: chains created or flushed, jumps removed,
    rules, jumps inserted at the head of their chain in the order of the change, chains deleted. Raises
    ConfigurationError if a rule or a name holds a line break or a NUL, which could inject a line.
    """
    text = _TableText()
    for key, value in commit.change.removed.items():
        _remove(text, key, value)
    for key, (old, new) in commit.change.replaced.items():
        _replace(text, key, old, new)
    for key, value in commit.change.added.items():
        _add(text, key, value)
    return text.input(commit.table)


def restore_text(change: Change[ChainTableKey, ChainTableValue]) -> str:
    """Return the change as input of ``iptables-restore --noflush``; an empty change gives an empty text.

    Raises ConfigurationError as :func:`transaction_text` does.
    """
    return "".join(map(transaction_text, commits(change)))


def whole_text(table: Mapping[ChainTableKey, ChainTableValue]) -> str:
    """Return a desired table as input of ``iptables-restore --noflush``, as for an empty kernel."""
    return restore_text(Change(added=dict(table)))
