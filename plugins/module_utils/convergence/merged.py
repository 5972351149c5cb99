# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Desired tables kept up to date one ServicePort at a time: what several routes contribute is counted, not recomputed.

A mode renders each route to entries (table, key, value). Several routes may contribute one key, e.g. two ports of a
Service its cluster IP. A key is in the table as long as anybody contributes it; if contributors disagree, the value of
the one that comes first in the order of its name wins, which is what a rendering of everything gives as well.
"""

from __future__ import annotations

from typing import Any, Dict, Hashable, Iterable, List, Set, Tuple, Union

Entry = Tuple[str, Hashable, Any]
Owner = Hashable

#: In a journal: the key was not in the table.
ABSENT = object()
Journal = Dict[str, Dict[Any, Any]]


class _Contributors(Dict[Any, Any]):
    """Owner to value, for the keys that more than one owner contributes.

    ``agree``: all values are equal, as they nearly always are. Then one more or one less of possibly thousands of
    owners changes nothing, and nobody has to look through the others.
    """

    agree = True


class _One:
    """The only contributor of a key and its value: most keys have just one, so it takes little room."""

    __slots__ = ("owner", "value")

    def __init__(self, owner: Owner, value: Any) -> None:
        self.owner = owner
        self.value = value


class MergedTables:
    """Tables by name, each a mapping from key to value, and who contributed what.

    ``tables`` is read by its users and changed only here. ``journal`` has, by table, the keys that were touched since
    it was last taken, each with the value it had then (ABSENT if none).
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.tables: Dict[str, Dict[Any, Any]] = {name: {} for name in names}
        self._contributors: Dict[str, Dict[Any, Union[_One, _Contributors]]] = {name: {} for name in self.tables}
        self._entries: Dict[Owner, List[Entry]] = {}
        self.journal: Journal = {}

    def take_journal(self) -> Journal:
        """The journal so far; a new one is begun."""
        taken, self.journal = self.journal, {}
        return taken

    def put(self, table: str, key: Any, value: Any) -> None:
        """Set, or with ABSENT remove, a key that nobody contributes because it is worked out from other keys."""
        rows = self.tables[table]
        before = rows.get(key, ABSENT)
        if before is not value and before != value:
            self.journal.setdefault(table, {}).setdefault(key, before)
            if value is ABSENT:
                del rows[key]
            else:
                rows[key] = value

    def owners(self) -> Iterable[Owner]:
        """Everybody who contributes something."""
        return self._entries.keys()

    def replace(self, owner: Owner, entries: List[Entry]) -> Dict[str, Set[Any]]:
        """Let the owner contribute these entries instead of its earlier ones; returns the keys touched, by table."""
        touched: Dict[str, Set[Any]] = {}
        before = self._entries.pop(owner, [])
        kept = {(table, key) for table, key, _value in entries}
        for table, key, _value in before:
            if (table, key) not in kept and self._withdraw(table, key, owner):
                touched.setdefault(table, set()).add(key)
        for table, key, value in entries:
            if self._contribute(table, key, owner, value):
                touched.setdefault(table, set()).add(key)
        if entries:
            self._entries[owner] = entries
        for table, keys in touched.items():
            for key in keys:
                self._settle(table, key)
        return touched

    def _contribute(self, table: str, key: Any, owner: Owner, value: Any) -> bool:
        contributors = self._contributors[table]
        present = contributors.get(key)
        if present is None:
            contributors[key] = _One(owner, value)
            return True
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
        """Take the owner away from a key's contributors; whether the key's value may change by it."""
        contributors = self._contributors[table]
        present = contributors.get(key)
        if isinstance(present, _One):
            if present.owner == owner:
                del contributors[key]
            return True
        if present is None:
            return False
        present.pop(owner, None)
        if len(present) == 1:
            contributors[key] = _One(*next(iter(present.items())))
        return not present.agree

    def _settle(self, table: str, key: Any) -> None:
        present = self._contributors[table].get(key)
        if present is None:
            self.put(table, key, ABSENT)
        elif isinstance(present, _One):
            self.put(table, key, present.value)
        else:
            self.put(table, key, present[min(present)])
