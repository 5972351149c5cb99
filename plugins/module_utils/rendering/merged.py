# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables merged from the entries of many owners, kept up to date one owner at a time.

Several ServicePorts may contribute one key, such as the cluster IP of a Service with two ports. A key is in the table
as long as an owner contributes it; if contributors disagree, the value of the first owner in the order of their names
is used, and of several values from one owner the first, as it is when everything is rendered at once.
"""

from __future__ import annotations

from typing import Any, Hashable, Iterable, Sequence, Union

from ..resources import ABSENT

Entry = tuple[str, Hashable, Any]
"""Name of the table, key, value."""

Owner = Hashable

Journal = dict[str, dict[Any, Any]]


class _Contributors(dict[Any, Any]):
    """Owner to value, for the keys that more than one owner contributes.

    ``agree``: all values are equal, as they nearly always are. Then adding or removing one of possibly thousands of
    owners changes nothing, and the others need not be searched.
    """

    agree = True


class _One:
    """The only contributor of a key and its value; compact, because most keys have just one."""

    __slots__ = ("owner", "value")

    def __init__(self, owner: Owner, value: Any) -> None:
        self.owner = owner
        self.value = value


class MergedTables:
    """Tables by name, each a mapping from key to value, and the owners that contributed each key.

    ``tables`` is read by its users and changed only here. ``journal`` has, by table, the keys that were touched since
    it was last popped, each with its previous value (ABSENT if none).
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.tables: dict[str, dict[Any, Any]] = {name: {} for name in names}
        self._contributors: dict[str, dict[Any, Union[_One, _Contributors]]] = {name: {} for name in self.tables}
        self._entries: dict[Owner, tuple[Entry, ...]] = {}
        self.journal: Journal = {}
        self.lost: set[Owner] = set()
        # Keys that only owners which are lost contribute now, but that were there when others did.
        self._there: set[tuple[str, Any]] = set()

    def pop_journal(self) -> Journal:
        """Return the journal and start a new one."""
        journal, self.journal = self.journal, {}
        return journal

    def put(self, table: str, key: Any, value: Any) -> None:
        """Set, or with ABSENT remove, a key that no owner contributes because it is derived from other keys."""
        rows = self.tables[table]
        before = rows.get(key, ABSENT)
        if before is not value and before != value:
            self.journal.setdefault(table, {}).setdefault(key, before)
            if value is ABSENT:
                del rows[key]
            else:
                rows[key] = value

    def entries_of(self, owner: Owner) -> tuple[Entry, ...]:
        """Return the entries that the owner contributes."""
        return self._entries.get(owner, ())

    def lose(self, owners: Iterable[Owner]) -> None:
        """Journal everything as absent, because the kernel has lost it, but not what only these owners contribute.

        They are ``lost`` until :meth:`add_again` is called with them, or an owner that is not contributes the same.
        """
        self.lost, self._there = set(owners), set()
        for table, rows in self.tables.items():
            contributed = self._contributors[table]
            derived = rows.keys() - contributed.keys() if len(rows) > len(contributed) else ()
            self.journal[table] = dict.fromkeys(derived, ABSENT)
        # The entries of those that are lost may be a million.
        for owner in self._entries.keys() - self.lost:
            for table, key, _value in self._entries[owner]:
                self.journal[table][key] = ABSENT

    def add_again(self, owner: Owner) -> None:
        """Journal what an owner that is lost contributes as absent."""
        if owner in self.lost:
            for table, key, _value in self.entries_of(owner):
                if self._is_lost(table, key):
                    self.journal.setdefault(table, {})[key] = ABSENT
            self.lost.discard(owner)

    def _is_lost(self, table: str, key: Any) -> bool:
        """Return whether a key is absent because only owners that are lost contribute it."""
        contributors = self._contributors[table].get(key)
        if not self.lost or contributors is None or (table, key) in self._there:
            return False
        return contributors.owner in self.lost if isinstance(contributors, _One) else self.lost >= contributors.keys()

    def replace(self, owner: Owner, entries: Sequence[Entry]) -> None:
        """Replace the entries that the owner contributes; of entries with the same key the first one wins."""
        chosen: dict[tuple[str, Any], Entry] = {}
        for entry in entries:
            chosen.setdefault(entry[:2], entry)
        before = self._entries.pop(owner, None)
        if before is not None:
            for table, key, _value in before:
                if (table, key) not in chosen and self._withdraw(table, key, owner):
                    self._put_value(table, key)
        for table, key, value in chosen.values():
            if self._contribute(table, key, owner, value):
                self._put_value(table, key)
        if chosen:
            # A tuple has no room for more.
            self._entries[owner] = tuple(chosen.values())

    def _contribute(self, table: str, key: Any, owner: Owner, value: Any) -> bool:
        contributors = self._contributors[table]
        present = contributors.get(key)
        if present is None:
            contributors[key] = _One(owner, value)
            return True
        if self.lost and owner not in self.lost and self._is_lost(table, key):
            self.journal.setdefault(table, {})[key] = ABSENT
        if isinstance(present, _One):
            if present.owner == owner:
                changed = present.value != value
                present.value = value
                return bool(changed)
            present = contributors[key] = _Contributors({present.owner: present.value})
        if present.agree and next(iter(present.values())) != value:
            present.agree = False
        changed = not present.agree and (owner not in present or present[owner] != value)
        present[owner] = value
        return bool(changed)

    def _withdraw(self, table: str, key: Any, owner: Owner) -> bool:
        """Remove the owner from a key's contributors; return whether the key's value may change."""
        contributors = self._contributors[table]
        present = contributors.get(key)
        if isinstance(present, _One):
            if present.owner == owner:
                del contributors[key]
            return True
        if present is None:
            return False
        there = not self._is_lost(table, key)
        present.pop(owner, None)
        if there and self._is_lost(table, key):
            self._there.add((table, key))
        if len(present) == 1:
            contributors[key] = _One(*next(iter(present.items())))
        return not present.agree

    def _put_value(self, table: str, key: Any) -> None:
        present = self._contributors[table].get(key)
        if present is None:
            self.put(table, key, ABSENT)
        elif isinstance(present, _One):
            self.put(table, key, present.value)
        else:
            self.put(table, key, present[min(present)])
