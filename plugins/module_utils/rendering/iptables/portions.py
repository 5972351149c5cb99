# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Large changes of chains in portions, for iptables-nft-restore.

For every line that names a chain this program looks through the sorted names of all chains that the transaction has
named so far, so that one transaction with 30,000 chains takes minutes. New chains that nothing leads into yet can be
made ahead, and chains that nothing leads into any more removed afterwards, in transactions of their own: what packets
meet still changes in a single one.
"""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List, Mapping, Set

from ...resources import Change
from .canonical import target_of
from .tables import ChainKey, ChainTableKey, ChainTableValue, JumpKey

#: Changes that make or remove up to this many chains stay whole: that takes a fraction of a second.
WHOLE = 500
#: So many chains make one transaction.
PORTION = 250

ChainChange = Change[ChainTableKey, ChainTableValue]


def callees_first(chains: Mapping[ChainTableKey, ChainTableValue]) -> List[ChainKey]:
    """The chains of a table in such an order that each comes after those of them which its rules lead to."""
    order: List[ChainKey] = []
    seen: Set[ChainKey] = set()
    for start in chains:
        if isinstance(start, JumpKey) or start in seen:
            continue
        seen.add(start)
        path = [(start, _callees(start, chains))]
        while path:
            key, callees = path[-1]
            callee = next((callee for callee in callees if callee not in seen), None)
            if callee is None:
                order.append(key)
                path.pop()
            else:
                seen.add(callee)
                path.append((callee, _callees(callee, chains)))
    return order


def _callees(key: ChainKey, chains: Mapping[ChainTableKey, ChainTableValue]) -> Iterator[ChainKey]:
    rules = chains[key]
    for rule in rules if isinstance(rules, tuple) else ():
        callee = ChainKey(key.table, target_of(rule))
        if callee in chains:
            yield callee


def _parts(keys: List[ChainKey]) -> Iterable[List[ChainKey]]:
    return (keys[start : start + PORTION] for start in range(0, len(keys), PORTION))


def portions(change: ChainChange) -> List[ChainChange]:
    """The change as a series of changes to be made one after the other; just itself if it is not large.

    First come new chains, called ones before those that call them; then all that is replaced, jumps included; last
    chains that go, calling ones first. Whoever stops in between leaves chains behind that nothing leads into.
    """
    chains_made = sum(isinstance(key, ChainKey) for key in change.added)
    chains_gone = sum(isinstance(key, ChainKey) for key in change.removed)
    if chains_made <= WHOLE and chains_gone <= WHOLE:
        return [change]
    made: List[Any] = callees_first(change.added) if chains_made > WHOLE else []
    gone: List[Any] = callees_first(change.removed)[::-1] if chains_gone > WHOLE else []
    ahead, after = frozenset(made), frozenset(gone)
    middle: ChainChange = Change(
        {key: value for key, value in change.added.items() if key not in ahead},
        change.replaced,
        {key: value for key, value in change.removed.items() if key not in after},
    )
    found: List[ChainChange] = [Change(added={key: change.added[key] for key in part}) for part in _parts(made)]
    if middle:
        found.append(middle)
    found += [Change(removed={key: change.removed[key] for key in part}) for part in _parts(gone)]
    return found
