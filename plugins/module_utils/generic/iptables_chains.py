# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""User-declared chains, complete, with the jumps into them; independent of Kubernetes."""

from __future__ import annotations

from typing import Iterable, Mapping, NamedTuple, Sequence, Union

from ..base.errors import KernelError
from ..kernel.xtables.chains import SavedTables, parse_save, refuse_unreadable
from ..kernel.xtables.restore import DEFAULT_WAIT, restore, save
from ..kernel.xtables.variant import XtablesVariant
from ..rendering.iptables.canonical import target_of
from ..rendering.iptables.tables import ChainKey, JumpKey
from ..resources import Change, Kind, Resource
from .canonical_chains import canonical_chains, comparable
from .listed_chains import ANY, FIRST, LAST, ListedChain, in_restorable_text, section, validate


class Occurrence(NamedTuple):
    """How often a jump is in its chain, and whether it is in the position that was declared."""

    times: int
    placed: bool = True


Key = Union[ChainKey, JumpKey]
Value = Union[tuple[str, ...], Occurrence]
Table = dict[Key, Value]
#: The jumps of a chain that are declared for one position, in order; by table, chain and position.
_Groups = Mapping[tuple[str, str, str], list[JumpKey]]


class ListedChainsResource(Resource[Key, Value]):
    """The user-declared chains of one family: ChainKey to its rules, JumpKey to its Occurrence.

    Owns the listed chains and, for chains whose jumps are listed, the rules that lead into them from built-in chains
    and from the chains named as origins. ``removal``: the chains are to be removed, with the jumps into them from
    built-in chains. ``wait``: seconds to wait for the xtables lock.
    """

    kind = Kind.CHAINS
    atomic = True
    diff_by_key = True

    def __init__(
        self, variant: XtablesVariant, chains: Sequence[ListedChain], wait: float = DEFAULT_WAIT, removal: bool = False
    ) -> None:
        validate(chains)
        self.family = variant.family
        self.variant = variant
        self.chains = [in_restorable_text(chain) for chain in chains]
        self.wait = wait
        self._removal = removal
        self._positions: dict[JumpKey, str] = {}
        #: The rule numbers that ``stage`` has found.
        self._observed: dict[JumpKey, list[int]] = {}

    def _saved(self) -> SavedTables:
        """Return the node's tables. Raises KernelError if one of the listed chains' tables cannot be shown."""
        saved = parse_save(save(self.variant))
        refuse_unreadable(self.variant, saved, {chain.table for chain in self.chains})
        return saved

    def observe(self) -> Table:
        """Return the listed chains that exist, and the owned jumps. Raises KernelError."""
        saved = self._saved()
        return self._owned(saved, self._numbers(saved))

    def stage(self) -> tuple[Table, Table]:
        """Return observed and desired table in comparable texts. Raises KernelError if iptables refuses a rule."""
        saved = self._saved()
        desired: Table = {}
        if self._removal:
            self._refuse_used(saved)
        else:
            self.chains = canonical_chains(self.variant, self.chains, saved, self.wait)
            for chain in self.chains:
                desired[ChainKey(chain.table, chain.name)] = chain.rules
            for chain in self.chains:
                for jump in chain.jumps or ():
                    key = JumpKey(chain.table, jump.origin, jump.condition)
                    desired[key] = Occurrence(1)
                    self._positions[key] = jump.position
        self._observed = self._numbers(saved)
        return self._owned(saved, self._observed), desired

    def _origins(self, chain: ListedChain, saved: SavedTables) -> Iterable[str]:
        named = {jump.origin for jump in chain.jumps or ()}
        return [
            name
            for table, name in saved.chains
            if table == chain.table and ((table, name) in saved.builtin or name in named) and name != chain.name
        ]

    def _numbers(self, saved: SavedTables) -> dict[JumpKey, list[int]]:
        """Return the rule numbers of each owned jump in its chain."""
        numbers: dict[JumpKey, list[int]] = {}
        for chain in self.chains:
            if chain.jumps is None and not self._removal:
                continue
            for origin in self._origins(chain, saved):
                for number, rule in enumerate(saved.chains[(chain.table, origin)], 1):
                    if target_of(rule) == chain.name:
                        key = JumpKey(chain.table, origin, comparable(rule, self.family))
                        numbers.setdefault(key, []).append(number)
        return numbers

    def _owned(self, saved: SavedTables, jumps: Mapping[JumpKey, Sequence[int]]) -> Table:
        table: Table = {}
        for chain in self.chains:
            rules = saved.chains.get((chain.table, chain.name))
            if rules is not None:
                table[ChainKey(chain.table, chain.name)] = tuple(comparable(rule, self.family) for rule in rules)
        misplaced = self._misplaced(saved, jumps)
        for key, numbers in jumps.items():
            table[key] = Occurrence(len(numbers), key not in misplaced)
        return table

    def _groups(self) -> _Groups:
        groups: dict[tuple[str, str, str], list[JumpKey]] = {}
        for key, position in self._positions.items():
            groups.setdefault((key.table, key.chain, position), []).append(key)
        return groups

    def _misplaced(self, saved: SavedTables, jumps: Mapping[JumpKey, Sequence[int]]) -> list[JumpKey]:
        """Return the jumps of those groups that are not at the head or end of their chain, in the declared order."""
        found = []
        for (table, chain, position), keys in self._groups().items():
            length = len(saved.chains.get((table, chain), ()))
            start = 1 if position == FIRST else length - len(keys) + 1
            wanted = range(start, start + len(keys))
            if position != ANY and [jumps.get(key) for key in keys] != [[number] for number in wanted]:
                found += keys
        return found

    def _refuse_used(self, saved: SavedTables) -> None:
        listed = {(chain.table, chain.name) for chain in self.chains}
        for chain in self.chains:
            origins = set(self._origins(chain, saved))
            for (table, name), rules in saved.chains.items():
                if table != chain.table or name in origins or (table, name) in listed:
                    continue
                rule = next((rule for rule in rules if target_of(rule) == chain.name), None)
                if rule is not None:
                    raise KernelError(
                        f"chain {table} {chain.name}: cannot be removed, chain {name} leads into it: -A {name} {rule}"
                    )

    def apply(self, change: Change[Key, Value]) -> None:
        """Make the whole change in one iptables-restore: all or nothing per table. Raises KernelError."""
        restore(self.variant, self.text(change), wait=self.wait)

    def made(self, change: Change[Key, Value]) -> Change[Key, Value]:
        """Return the part of a failed change that was made: the kernel changes a table as a whole or not at all.

        Raises KernelError.
        """
        now = self.observe()
        wanted = change.new_values()
        unmade = {key.table for key in (*wanted, *change.removed) if now.get(key) != wanted.get(key)}
        return Change(
            {key: value for key, value in change.added.items() if key.table not in unmade},
            {key: values for key, values in change.replaced.items() if key.table not in unmade},
            {key: value for key, value in change.removed.items() if key.table not in unmade},
        )

    def text(self, change: Change[Key, Value]) -> str:
        """Return the change as input of ``iptables-restore --noflush``."""
        lines = _declared(change)
        filled = change.new_values()
        surplus = {key: (old, Occurrence(0)) for key, old in change.removed.items()}
        for key, (old, new) in {**surplus, **change.replaced}.items():
            if isinstance(key, JumpKey) and isinstance(old, Occurrence) and isinstance(new, Occurrence):
                # Remove every copy of a misplaced one, and add it again.
                kept = new.times if old.placed or self._positions.get(key, ANY) == ANY else 0
                lines.setdefault(key.table, []).extend([f"-D {key.chain} {key.rule}"] * (old.times - kept))
        _fill(lines, filled)
        for table, command in self._insertions(change):
            lines.setdefault(table, []).append(command)
        _remove(lines, change.removed)
        return section(lines)

    def _insertions(self, change: Change[Key, Value]) -> Iterable[tuple[str, str]]:
        """Yield table and command of each jump that is to be added; those for the head last, from the last one on."""
        moved = [key for key, (old, _new) in change.replaced.items() if isinstance(old, Occurrence) and not old.placed]
        added = {key for key in (*change.added, *moved) if isinstance(key, JumpKey)}
        groups = sorted(self._groups().items(), key=lambda item: item[0][2] == FIRST)
        for (table, chain, position), keys in groups:
            for key in keys if position == LAST else reversed(keys):
                if key in added:
                    yield table, f"{'-A' if position == LAST else '-I'} {chain} {key.rule}"

    def undo_text(self, change: Change[Key, Value]) -> str:
        """Return the input of ``iptables-restore --noflush`` that reverts a change right after it was applied.

        ``stage`` has been called before the change. Jumps return to the rule numbers that they had, as long as nothing
        else has changed their chains.
        """
        back = Change(change.removed, {key: (new, old) for key, (old, new) in change.replaced.items()}, change.added)
        lines = _declared(back)
        returning: list[tuple[int, JumpKey]] = []
        for key in [*change.added, *change.replaced, *change.removed]:
            if isinstance(key, JumpKey):
                if key not in change.removed:
                    lines.setdefault(key.table, []).append(f"-D {key.chain} {key.rule}")
                returning += [(number, key) for number in self._observed.get(key, ())]
        _fill(lines, back.new_values())
        for number, key in sorted(returning):
            lines.setdefault(key.table, []).append(f"-I {key.chain} {number} {key.rule}")
        _remove(lines, back.removed)
        return section(lines)

    def describe(self, key: Key, value: Value) -> list[str]:
        """Return the lines as iptables-save prints them; a comment marks jumps that are not in their position."""
        if isinstance(key, JumpKey) and isinstance(value, Occurrence):
            mark = "" if value.placed else f"  # not {self._positions.get(key, ANY)}"
            return [f"-A {key.chain} {key.rule}{mark}"] * value.times
        if isinstance(key, ChainKey) and not isinstance(value, Occurrence):
            return [f":{key.chain} - [0:0]", *(f"-A {key.chain} {rule}" for rule in value)]
        return []


def _declared(change: Change[Key, Value]) -> dict[str, list[str]]:
    """Return, by table, the lines that create or empty the chains of a change."""
    lines: dict[str, list[str]] = {}
    for key in [*change.added, *change.replaced, *change.removed]:
        if isinstance(key, ChainKey):
            lines.setdefault(key.table, []).append(f":{key.chain} - [0:0]")
    return lines


def _fill(lines: dict[str, list[str]], filled: Mapping[Key, Value]) -> None:
    for key, value in filled.items():
        if isinstance(key, ChainKey) and not isinstance(value, Occurrence):
            lines[key.table] += [f"-A {key.chain} {rule}" for rule in value]


def _remove(lines: dict[str, list[str]], removed: Iterable[Key]) -> None:
    for key in removed:
        if isinstance(key, ChainKey):
            lines[key.table].append(f"-X {key.chain}")
