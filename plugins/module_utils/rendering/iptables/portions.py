# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Divide large changes of chains into portions, for iptables-nft-restore.

For every line that names a chain this program searches the sorted names of all chains that the transaction has named so
far, so one transaction with 30,000 chains takes minutes. New chains that no rule leads to yet can be created
beforehand, flushed chains be filled beforehand, and chains that no rule leads to any more be removed afterwards, in
separate transactions: the rules that packets traverse still change in a single one. Only where very many chains get
other rules (a setting that concerns every Service has changed) do the chains change one portion after the other, each
chain atomically.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, List, Mapping, Set

from ...resources import Change
from .canonical import target_of
from .tables import ChainKey, ChainTableKey, ChainTableValue

#: Changes that create or remove up to this many chains are not split: they take a fraction of a second.
WHOLE = 500
#: The number of chains in one transaction. With fewer, the cost of reading the existing chains, which iptables does
#: each time, dominates; with more, the cost of the search among the names in the transaction.
PORTION = 500

ChainChange = Change[ChainTableKey, ChainTableValue]


def callees_first(chains: Mapping[ChainTableKey, ChainTableValue]) -> List[ChainKey]:
    """Return the chains of a table in an order in which each follows the chains that its rules jump to."""
    order: List[ChainKey] = []
    seen: Set[ChainKey] = set()
    for start in chains:
        if not isinstance(start, ChainKey) or start in seen:
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


def _large(keys: Iterable[ChainTableKey]) -> bool:
    return sum(isinstance(key, ChainKey) for key in keys) > WHOLE


def portions(change: ChainChange) -> List[ChainChange]:
    """Split the change into a series of changes to be made one after the other; just itself if it is not large.

    First come new chains and chains that were flushed, called ones before their callers; then the chains whose rules
    are wrong, in one step unless there are very many; then jumps; last the chains to be removed, callers first. A
    failure in between leaves chains behind that no rule leads to, or a flushed chain that is still empty.
    """
    emptied = {key: pair for key, pair in change.replaced.items() if isinstance(key, ChainKey) and pair[0] == ()}
    fresh: Dict[ChainTableKey, ChainTableValue] = {**change.added, **{key: pair[1] for key, pair in emptied.items()}}
    altered = {key: pair for key, pair in change.replaced.items() if key not in emptied}
    edited: List[Any] = callees_first({key: pair[1] for key, pair in altered.items()}) if _large(altered) else []
    made: List[Any] = callees_first(fresh) if edited or _large(fresh) else []
    removed: List[Any] = callees_first(change.removed)[::-1] if _large(change.removed) else []
    if not made and not edited and not removed:
        return [change]
    ahead, after = {*made, *edited}, frozenset(removed)
    middle: ChainChange = Change(
        {key: value for key, value in change.added.items() if key not in ahead},
        {key: pair for key, pair in change.replaced.items() if key not in ahead},
        {key: value for key, value in change.removed.items() if key not in after},
    )
    found = [_part(change, part) for part in _parts([*made, *edited])]
    if middle:
        found.append(middle)
    found += [Change(removed={key: change.removed[key] for key in part}) for part in _parts(removed)]
    return found


def _part(change: ChainChange, keys: Iterable[ChainTableKey]) -> ChainChange:
    """Return the additions and replacements of the change under these keys."""
    part: ChainChange = Change()
    for key in keys:
        if key in change.added:
            part.added[key] = change.added[key]
        else:
            part.replaced[key] = change.replaced[key]
    return part
