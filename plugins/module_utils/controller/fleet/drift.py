# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How nodes have drifted, by table and kind of difference, so that equal drift of many nodes is one line of the report.

The kinds by severity: emptied chain, missing entry, changed entry, unexpected entry.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Iterable, NamedTuple

from .nodes import TableDrift

EMPTIED, MISSING, DIFFERENT, UNEXPECTED = "emptied", "missing", "different", "unexpected"
HARM: tuple[str, ...] = (EMPTIED, MISSING, DIFFERENT, UNEXPECTED)
_SHOWN = 3
# How service_proxy_info names an entry with parts that are missing.
_PARTS = re.compile(r"(?P<name>.*) \((?P<missing>[0-9]+) of (?P<all>[0-9]+) missing\)\Z")


class Difference(NamedTuple):
    """One kind of difference in one table, on one node or on several.

    ``entries``: how many, over all nodes. ``names``: of some of them, repeated where several nodes have the same.
    """

    table: str
    kind: str
    entries: int
    names: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The number of entries with the most frequent names, such as ``3 missing: a, b, ...``."""
        often = Counter(self.names)
        shown = ", ".join(name for name, _number in often.most_common(_SHOWN))
        more = ", ..." if shown and (len(often) > _SHOWN or self.entries > len(self.names)) else ""
        return f"{self.entries:,} {self.kind}{': ' if shown else ''}{shown}{more}"


def differences(change: TableDrift) -> list[Difference]:
    """Return the kinds of difference that a table has, in the order of their harm.

    The names in ``entries`` are those of different entries, then of missing ones, then of unexpected ones, and may end
    before all are named.
    """
    different = change.entries[: change.replaced]
    missing = change.entries[change.replaced : change.replaced + change.added]
    unexpected = change.entries[change.replaced + change.added :]
    parts = [_PARTS.match(name) for name in different]
    emptied = tuple(item["name"] for item in parts if item is not None and item["missing"] == item["all"])
    others = tuple(name for name, item in zip(different, parts) if item is None or item["missing"] != item["all"])
    found = (
        Difference(change.table, EMPTIED, len(emptied), emptied),
        Difference(change.table, MISSING, change.added, missing),
        Difference(change.table, DIFFERENT, change.replaced - len(emptied), others),
        Difference(change.table, UNEXPECTED, change.removed, unexpected),
    )
    return [item for item in found if item.entries > 0]


def merged(items: Iterable[Difference]) -> dict[tuple[str, str], Difference]:
    """Return the differences of several nodes by table and kind, the most harmful first."""
    entries: Counter[tuple[str, str]] = Counter()
    names: dict[tuple[str, str], list[str]] = {}
    for item in items:
        key = (item.table, item.kind)
        entries[key] += item.entries
        names.setdefault(key, []).extend(item.names)
    order = sorted(entries, key=lambda key: (HARM.index(key[1]), -entries[key], key[0]))
    return {key: Difference(*key, entries[key], tuple(names[key])) for key in order}
