# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Services that wait while others are synced, because they make many entries.

One change of an endpoint may replace a hundred thousand entries of a Service, and a user may change many such Services
at once. Programmed together with these, the change of another Service would wait for all of them. So Services that make
more entries than their size suggests wait once there are too many entries for one sync, and follow in portions. What
an entry takes differs with its kind, the tables and the load of the node, so portions that take long become smaller.
"""

from __future__ import annotations

from collections import Counter
from typing import Callable, Dict, FrozenSet, Iterable, Set

from ...cluster.model import NamespacedName

#: The most entries in one portion, unless a single Service has more: in nftables mode, those of lists are replaced in
#: an eighth of a second.
MOST_ENTRIES = 10_000
#: The time that a portion may take; after one that took longer, the next ones are smaller.
MOST_SECONDS = 0.5

EntriesOf = Callable[[NamespacedName], int]
"""Returns how many entries a Service makes, 0 if there are not more than its size suggests."""


class Portions:
    """Chooses which Services are programmed next; what a Service removes counts as what it makes."""

    def __init__(self) -> None:
        #: With their entries, in the order in which they began to wait.
        self._waiting: Dict[NamespacedName, int] = {}
        self._programmed: Dict[NamespacedName, int] = {}
        #: The entries of a portion, and those of the last one.
        self._most = MOST_ENTRIES
        self._taken = 0

    @property
    def waiting(self) -> FrozenSet[NamespacedName]:
        """The Services that wait."""
        return frozenset(self._waiting)

    def clear(self) -> None:
        """Forget who waits: everything is programmed at once."""
        self._waiting.clear()

    def urgent(self, dirty: Set[NamespacedName], entries_of: EntriesOf) -> Set[NamespacedName]:
        """Return the Services that are programmed at once; the others wait."""
        heavy = {}
        for service in dirty:
            entries = entries_of(service)
            if entries or service in self._programmed:
                heavy[service] = max(entries, self._programmed.get(service, 0))
        if not self._waiting and sum(heavy.values()) <= self._most:
            self._note(heavy, entries_of)
            return dirty
        for service in sorted(heavy):
            self._waiting[service] = heavy[service]
        return dirty - heavy.keys()

    def take(self, entries_of: EntriesOf) -> Set[NamespacedName]:
        """Return the next portion: the Service that waits longest, then those of the namespaces with fewest entries."""
        of_namespace: Counter[str] = Counter()
        for service, entries in self._waiting.items():
            # Its endpoints may have arrived since it began to wait.
            self._waiting[service] = max(entries, entries_of(service))
            of_namespace[service.namespace] += self._waiting[service]
        chosen: Set[NamespacedName] = set()
        left = self._most
        for service in [
            *list(self._waiting)[:1],
            *sorted(self._waiting, key=lambda each: of_namespace[each.namespace]),
        ]:
            if service not in chosen and (not chosen or self._waiting[service] <= left):
                chosen.add(service)
                left -= self._waiting[service]
        self._taken = self._most - left
        for service in chosen:
            del self._waiting[service]
        self._note(chosen, entries_of)
        return chosen

    def took(self, seconds: float) -> None:
        """Adapt the size of portions to the time that the last one took."""
        if seconds > MOST_SECONDS:
            self._most = min(MOST_ENTRIES, int(self._taken * MOST_SECONDS / seconds))
        else:
            self._most = min(MOST_ENTRIES, 2 * self._most + 1)

    def _note(self, services: Iterable[NamespacedName], entries_of: EntriesOf) -> None:
        for service in services:
            entries = entries_of(service)
            if entries:
                self._programmed[service] = entries
            else:
                self._programmed.pop(service, None)
