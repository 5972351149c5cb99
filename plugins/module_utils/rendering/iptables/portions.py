# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Divide large changes of chains into portions, for iptables-nft-restore.

For every line that names a chain this program searches the sorted names of all chains that the transaction has named so
far, so one transaction with 30,000 chains takes minutes. New chains that no rule leads to yet can be created
beforehand, flushed chains be filled beforehand, and chains that no rule leads to any more be removed afterwards, in
separate transactions: the rules that packets traverse still change in a single one. Only where very many chains get
other rules (a setting that concerns every Service has changed) do they change one portion after the other: the chains
of one Service, which call each other, at once, and with those that all Services share if other rules there lead to it.
"""

from __future__ import annotations

from typing import Iterable, Iterator, Mapping

from ...resources import Change
from .canonical import target_of
from .commit_order import Commit, commits
from .names import PREFIXES
from .tables import ChainKey, ChainTableKey, ChainTableValue, Rules

#: Changes that create or remove up to this many chains are not split: they take a fraction of a second.
WHOLE = 500
#: The number of chains in one transaction. With fewer, the cost of reading the existing chains, which iptables does
#: each time, dominates; with more, the cost of the search among the names in the transaction.
PORTION = 500

ChainChange = Change[ChainTableKey, ChainTableValue]
Pair = tuple[ChainTableValue, ChainTableValue]


def callees_first(chains: Mapping[ChainTableKey, ChainTableValue]) -> list[ChainKey]:
    """Return the chains of a table in an order in which each follows the chains that its rules jump to."""
    order: list[ChainKey] = []
    seen: set[ChainKey] = set()
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


def _targets(key: ChainKey, rules: Iterable[str]) -> Iterator[ChainKey]:
    return (ChainKey(key.table, target_of(rule)) for rule in rules)


def _callees(key: ChainKey, chains: Mapping[ChainTableKey, ChainTableValue]) -> Iterator[ChainKey]:
    rules = chains[key]
    return (callee for callee in _targets(key, rules if isinstance(rules, tuple) else ()) if callee in chains)


def _parts(keys: list[ChainKey]) -> Iterable[list[ChainKey]]:
    return (keys[start : start + PORTION] for start in range(0, len(keys), PORTION))


def _large(keys: Iterable[ChainTableKey]) -> bool:
    return sum(isinstance(key, ChainKey) for key in keys) > WHOLE


def _rules_of(change: ChainChange) -> dict[ChainKey, tuple[Rules, Rules]]:
    """Return the rules of the chains of a change, before it and after it."""
    values: dict[ChainTableKey, Pair] = dict(change.replaced)
    values.update({key: ((), value) for key, value in change.added.items()})
    values.update({key: (value, ()) for key, value in change.removed.items()})
    return {
        key: (old if isinstance(old, tuple) else (), new if isinstance(new, tuple) else ())
        for key, (old, new) in values.items()
        if isinstance(key, ChainKey)
    }


def _own(key: ChainTableKey) -> bool:
    """Return whether the chain belongs to one Service or endpoint."""
    return isinstance(key, ChainKey) and key.chain.startswith(PREFIXES)


def _hash(key: ChainKey) -> str:
    """Return the end of a name, which the chains of a Service have in common."""
    return key.chain.rpartition("-")[2]


def _apart(change: ChainChange, altered: Iterable[ChainKey]) -> Iterator[list[ChainKey]]:
    """Yield the altered chains of one Service after the other, except of those to which other rules lead afterwards.

    The latter must change together with the chains that all Services share.
    """
    keys: dict[str, list[ChainKey]] = {}
    for key in altered:
        keys.setdefault(_hash(key), []).append(key)
    linked: dict[str, set[str]] = {}
    tied: set[str] = set()
    for key, (old, new) in _rules_of(change).items():
        own = _own(key)
        targets = _targets(key, set(old + new) if own else set(old) ^ set(new))
        callees = {_hash(callee) for callee in targets if _own(callee)}
        if not own:
            tied |= callees
            continue
        for callee in callees:
            linked.setdefault(_hash(key), set()).add(callee)
            linked.setdefault(callee, set()).add(_hash(key))
    seen: set[str] = set()
    for start in keys:
        if start in seen:
            continue
        group = [start]
        seen.add(start)
        for each in group:
            new_ones = linked.get(each, set()) - seen
            group += sorted(new_ones)
            seen |= new_ones
        if tied.isdisjoint(group):
            yield [key for each in group for key in keys.get(each, ())]


def _joined(groups: Iterable[list[ChainKey]]) -> Iterator[list[ChainKey]]:
    """Yield as many groups together as a portion holds."""
    portion: list[ChainKey] = []
    for group in groups:
        if portion and len(portion) + len(group) > PORTION:
            yield portion
            portion = []
        portion += group
    if portion:
        yield portion


def portions(change: ChainChange) -> list[list[Commit]]:
    """Split the change into the commits of a series of runs of the program, one run after the other.

    First come new chains and chains that were flushed, called ones before their callers; then the chains whose rules
    are wrong, in one step unless there are very many; then jumps; last the chains to be removed, callers first. A
    failure in between leaves chains behind that no rule leads to, or a flushed chain that is still empty.
    """
    runs: list[list[Commit]] = []
    named = PORTION
    for commit in commits(change):
        for part in _portions(commit.change):
            if named >= PORTION:
                runs.append([])
                named = 0
            runs[-1].append(Commit(commit.table, part))
            named += sum(isinstance(key, ChainKey) for key in (*part.added, *part.replaced, *part.removed))
    return runs


def _portions(change: ChainChange) -> list[ChainChange]:
    """Split the change of one table; just itself if it is not large."""
    emptied = {key: pair for key, pair in change.replaced.items() if _own(key) and pair[0] == ()}
    fresh: dict[ChainTableKey, ChainTableValue] = {**change.added, **{key: pair[1] for key, pair in emptied.items()}}
    altered = [key for key in change.replaced if isinstance(key, ChainKey) and _own(key) and key not in emptied]
    edited = list(_joined(_apart(change, altered))) if _large(altered) else []
    made = list(_parts(callees_first(fresh))) if edited or _large(fresh) else []
    removed = list(_parts(callees_first(change.removed)[::-1])) if _large(change.removed) else []
    if not made and not edited and not removed:
        return [change]
    ahead = {key for part in (*made, *edited) for key in part}
    after = {key for part in removed for key in part}
    middle: ChainChange = Change(
        {key: value for key, value in change.added.items() if key not in ahead},
        {key: pair for key, pair in change.replaced.items() if key not in ahead},
        {key: value for key, value in change.removed.items() if key not in after},
    )
    found = [_part(change, part) for part in (*made, *edited)]
    if middle:
        found.append(middle)
    found += [Change(removed={key: change.removed[key] for key in part}) for part in removed]
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
