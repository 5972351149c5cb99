# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Split one change of the table into the messages of transactions.

A table that another program has made dormant is made active first, in a transaction of its own: some kernels refuse new
hooks, or lose removed ones, in a transaction that also changes the flags of the table.

Within a transaction an object is removed before and added after those that it refers to: rules, elements, sets and
chains are removed, then sets, chains, rules and elements are added.

A change with few elements is one transaction. A large one is split so that no call into the kernel takes long, and so
that every packet still sees each frontend either in its old or in its new state. The layout of the table gives each set
its role in this (:class:`SetRole`):

1. objects that no packet can reach yet: new sets, new chains that no hook leads to, their rules, and the elements of
   the new sets;
2. new hooks that only refuse packets, unless the table is new;
3. new elements that help packets which others select;
4. elements that decide about packets, with all those of one address or node port together;
5. changed chains and other hooks, in one transaction, with the elements of the frontends that lead to such a chain,
   also by another chain of the same ServicePort: at the first load of the table, packets see nothing before everything
   is in place;
6. removed elements that helped;
7. objects that no packet can reach any more: removed chains and sets, one after the other.

The kernel finds a set by comparing the names of the table's sets in the order of their creation, twice to create a set
and once for each rule that refers to it. So the time for creating many sets grows with the square of their number, and
each of them, and each rule, counts as more than one element. Removed sets stay in that list until the transaction ends;
removed in the order of their creation, few at a time, each is found at its beginning.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, cast

from ...rendering.nftables import objects as nft
from ...resources import Change
from ..netlink.protocol import Message
from .expression_schema import SET_NAMES
from .messages import Encoder, ListPart

#: The most elements in one transaction (the elements of one frontend are kept together even beyond that).
ELEMENTS_PER_TRANSACTION = 10_000
#: The number of new sets that makes creating one set, or one rule, cost one more element.
_SETS_PER_ELEMENT = 200
_SETS_PER_ELEMENT_OF_RULES = 400
#: Weight of a removed set, in elements.
_REMOVED_SET = 20


class _Element(NamedTuple):
    """The key of an element or list with its old and new value, None if there is none."""

    key: nft.ElementKey
    old: Optional[nft.Value]
    new: Optional[nft.Value]


class Labelled(NamedTuple):
    """A message and its object, for errors. ``chain``: the name of a chain that is created or removed."""

    message: Message
    label: str
    chain: str = ""


class Transaction(NamedTuple):
    """Messages that take effect together."""

    messages: list[Labelled]


class _Batch:
    """Collects the parts of one transaction and sorts them."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.weight = 0
        self.create_table = False
        self.flushed: list[str] = []
        self.removed_sets: list[str] = []
        self.removed_chains: list[str] = []
        self.sets: list[tuple[str, nft.SetValue]] = []
        self.chains: list[tuple[str, Optional[nft.BaseHook]]] = []
        self.rules: list[tuple[str, tuple[nft.Rule, ...]]] = []
        self.removed_elements: dict[str, list[bytes]] = {}
        self.elements: dict[str, list[tuple[bytes, nft.Value]]] = {}
        self.lists: dict[str, list[ListPart]] = {}

    def put(self, element: _Element) -> None:
        (kind, name, raw), old, new = element
        if kind == "list":
            self.change_list(name, raw, cast(nft.ListValue, old or ()), cast(nft.ListValue, new or ()))
            return
        if old is not None:
            self.removed_elements.setdefault(name, []).append(raw)
            self.weight += 1
        if new is not None:
            self.elements.setdefault(name, []).append((raw, new))
            self.weight += 1

    def change_list(self, name: str, key: bytes, old: nft.ListValue, new: nft.ListValue) -> None:
        """Turn one list into another; either may be empty."""
        if not old and not isinstance(new, nft.SparseList):
            self.lists.setdefault(name, []).append((key, _indices(len(new)), b"".join(new)))
            self.weight += len(new)
            return
        before, after = dict(nft.list_items(old)), dict(nft.list_items(new))
        gone = [key + nft.index_bytes(index) for index, data in before.items() if after.get(index) != data]
        come = [(index, data) for index, data in after.items() if before.get(index) != data]
        if gone:
            self.removed_elements.setdefault(name, []).extend(gone)
        if come:
            indices = b"".join([nft.index_bytes(index) for index, _data in come])
            self.lists.setdefault(name, []).append((key, indices, b"".join([data for _index, data in come])))
        self.weight += len(gone) + len(come)

    def labelled(self, first_set: int) -> Iterator[Labelled]:
        encoder = self._encoder
        if self.create_table:
            yield Labelled(encoder.table(), "table")
        for name in self.flushed:
            yield Labelled(encoder.flush_chain(name), f"rules of chain {name}")
        for name, keys in self.removed_elements.items():
            for message in encoder.delete_elements(name, keys):
                yield Labelled(message, f"elements of {name} to be removed")
        for name in self.removed_sets:
            yield Labelled(encoder.delete_set(name), f"set {name} to be removed")
        for name in self.removed_chains:
            yield Labelled(encoder.delete_chain(name), f"chain {name} to be removed", name)
        for number, (name, value) in enumerate(self.sets, first_set):
            yield Labelled(encoder.set(name, value, number), f"set {name}")
        for name, base in self.chains:
            yield Labelled(encoder.chain(name, base), f"chain {name}", name)
        for name, rules in self.rules:
            for position, rule in enumerate(rules, 1):
                yield Labelled(encoder.rule(name, rule), f"rule {position} of chain {name}")
        for name, lists in self.lists.items():
            for message in encoder.add_lists(name, lists):
                yield Labelled(message, f"elements of {name}")
        for name, items in self.elements.items():
            for message in encoder.add_elements(name, items):
                yield Labelled(message, f"elements of {name}")

    def transaction(self) -> Transaction:
        return Transaction(list(self.labelled(1)))


class _Portions:
    """Divides objects among transactions, in their order.

    Put each object into ``batch`` and call :meth:`weigh`; yield :meth:`take` where that returns True, and :meth:`rest`
    in the end.
    """

    def __init__(self, encoder: Encoder, most_elements: int) -> None:
        self.batch = _Batch(encoder)
        self._encoder = encoder
        self._most_elements = most_elements

    def weigh(self, elements: int) -> bool:
        """Count what was just put into the batch, weighted in elements; return whether the batch is full."""
        self.batch.weight += elements
        return self.batch.weight >= self._most_elements

    def spread(self, items: Iterable[Any], to: Callable[[_Batch], list[Any]], cost: int) -> Iterator[Transaction]:
        """Put each item into the list ``to`` of the batch; yield the transactions of the batches that become full."""
        for item in items:
            to(self.batch).append(item)
            if self.weigh(cost):
                yield self.take()

    def take(self) -> Transaction:
        """Return the transaction of the batch, and start a new batch."""
        full, self.batch = self.batch, _Batch(self._encoder)
        return full.transaction()

    def rest(self) -> Iterator[Transaction]:
        """Yield the last transaction, unless it is empty."""
        last = self.take()
        if last.messages:
            yield last


def _elements_of(change: Change[nft.Key, nft.Value]) -> Iterator[_Element]:
    """Yield the keys of elements and lists that change, with old and new values (None if there is none)."""
    for key, old in change.removed.items():
        if isinstance(key, nft.ElementKey):
            yield _Element(key, old, None)
    for key, (old, new) in change.replaced.items():
        if isinstance(key, nft.ElementKey):
            yield _Element(key, old, new)
    for key, new in change.added.items():
        if isinstance(key, nft.ElementKey):
            yield _Element(key, None, new)


@lru_cache(maxsize=4096)
def _indices(count: int) -> bytes:
    return b"".join([nft.index_bytes(index) for index in range(count)])


def length_of(value: Optional[nft.Value]) -> int:
    """Return the number of elements in a list; 0 if there is none."""
    if isinstance(value, nft.SparseList):
        return len(value.items)
    return len(value) if isinstance(value, tuple) else 0


def uses_sets(value: nft.Value, names: frozenset[str]) -> bool:
    """Return whether a value is that of a chain whose rules refer to one of the sets."""
    rules = value.rules if names and isinstance(value, nft.ChainValue) else ()
    parts = (part for rule in rules for part in rule.expressions)
    return not names.isdisjoint(part.get(SET_NAMES[part.name]) for part in parts if part.name in SET_NAMES)


class _Costs(NamedTuple):
    """What a new set and a rule cost in the kernel, in elements."""

    set: int
    rule: int


def _costs(new_sets: int) -> _Costs:
    """Return the costs in a change that creates this many sets."""
    return _Costs(1 + new_sets // _SETS_PER_ELEMENT, 1 + new_sets // _SETS_PER_ELEMENT_OF_RULES)


def weight_of(change: Change[nft.Key, nft.Value]) -> int:
    """Return the number of elements that a change touches; sets, chains and rules are weighted in elements."""
    weight = 0
    for key, old, new in _elements_of(change):
        weight += length_of(old) + length_of(new) if key.kind == "list" else 1
    sets = sum(isinstance(new, nft.SetValue) for new in change.added.values())
    rules = sum(1 + len(new.rules) for new in change.added.values() if isinstance(new, nft.ChainValue))
    costs = _costs(sets)
    weight += sum({"set": _REMOVED_SET, "chain": 2}.get(gone.kind, 0) for gone in change.removed)
    return weight + sets * costs.set + rules * costs.rule


class Planner:
    """Splits a change into transactions for the table of one family."""

    def __init__(self, encoder: Encoder, most_elements: int = ELEMENTS_PER_TRANSACTION) -> None:
        self._encoder = encoder
        self._most_elements = most_elements

    def transactions(self, change: Change[nft.Key, nft.Value]) -> Iterator[Transaction]:
        """Yield the transactions that make the change, in order.

        Each is encoded when it is requested: the messages for a large cluster take more memory than its tables.
        """
        if self._encoder.table_key in change.removed:
            yield Transaction([Labelled(self._encoder.delete_table(), "table to be removed")])
            return
        old, _new = change.replaced.get(self._encoder.table_key, (None, None))
        if isinstance(old, nft.TableValue):
            yield Transaction(
                [Labelled(self._encoder.table_flags(old.flags & ~nft.TABLE_DORMANT), "flags of the table")]
            )
        if weight_of(change) <= self._most_elements:
            batch = self._definitions(change)
            gone = _names(change.removed, "set")
            for element in _elements_of(change):
                if element.key.name not in gone:
                    batch.put(element)
            transaction = batch.transaction()
            if transaction.messages:
                yield transaction
        else:
            yield from self._phases(change)

    def _definitions(self, change: Change[nft.Key, nft.Value]) -> _Batch:
        """Return a batch with the sets, chains and rules of a change."""
        batch = _Batch(self._encoder)
        batch.create_table = self._encoder.table_key in change.added
        for key in change.removed:
            if key.kind == "set":
                batch.removed_sets.append(key.name)
            elif key.kind == "chain":
                batch.flushed.append(key.name)
                batch.removed_chains.append(key.name)
        for key, (old, new) in change.replaced.items():
            if isinstance(new, nft.SetValue):
                batch.removed_sets.append(key.name)
                batch.sets.append((key.name, new))
            elif isinstance(new, nft.ChainValue):
                batch.flushed.append(key.name)
                if not isinstance(old, nft.ChainValue) or old.base != new.base:
                    batch.removed_chains.append(key.name)
                    batch.chains.append((key.name, new.base))
                batch.rules.append((key.name, new.rules))
        for key, new in change.added.items():
            if isinstance(new, nft.SetValue):
                batch.sets.append((key.name, new))
            elif isinstance(new, nft.ChainValue):
                batch.chains.append((key.name, new.base))
                batch.rules.append((key.name, new.rules))
        return batch

    def _phases(self, change: Change[nft.Key, nft.Value]) -> Iterator[Transaction]:
        new_sets = _names(change.added, "set")
        # Rules look a set up at any time, so one that is created again gets its elements in the same transaction.
        renewed = _names(change.replaced, "set")
        apart = new_sets | renewed | _names(change.removed, "set")
        # An earlier run that ended halfway may have left chains without their rules; nothing leads to these yet.
        unfilled = {key: pair for key, pair in change.replaced.items() if self._is_unfilled(key, *pair)}
        unreachable = Change(
            {
                key: value
                for key, value in change.added.items()
                if key.kind in ("table", "set") or (isinstance(value, nft.ChainValue) and value.base is None)
            },
            unfilled,
        )
        yield from self._unreachable(unreachable)
        elements = list(_elements_of(change))
        yield from self._chunks([each] for each in elements if each.key.name in new_sets)
        hooks = {key: value for key, value in change.added.items() if key not in unreachable.added}
        early = frozenset() if self._encoder.table_key in change.added else self._encoder.identity.restricting_chains
        restricting = {key: hooks.pop(key) for key in list(hooks) if key.name in early}
        if restricting:
            yield self._definitions(Change(restricting)).transaction()
        visible = [each for each in elements if each.key.name not in apart]
        helping = [each for each in visible if self._role(each.key.name).part is nft.Part.HELPS]
        deciding = [each for each in visible if self._role(each.key.name).part is not nft.Part.HELPS]
        yield from self._chunks([each] for each in helping if each.new is not None)
        rest = Change(hooks, {key: pair for key, pair in change.replaced.items() if key not in unfilled})
        frontends = self._frontends(deciding)
        tied = self._tied(frontends, rest)
        yield from self._chunks(group for frontend, group in frontends.items() if frontend not in tied)
        live = self._definitions(rest)
        # Chains that are removed later no longer look up sets that are created again.
        live.flushed += [key.name for key, value in change.removed.items() if uses_sets(value, renewed)]
        for each in elements:
            if each.key.name in renewed:
                live.put(each)
        for frontend in tied:
            for each in frontends[frontend]:
                live.put(each)
        transaction = live.transaction()
        if transaction.messages:
            yield transaction
        yield from self._chunks([each] for each in helping if each.new is None)
        yield from self._removals(change)

    def _role(self, name: str) -> nft.SetRole:
        return self._encoder.identity.role(self._encoder.family, name)

    def _is_unfilled(self, key: nft.Key, old: nft.Value, new: nft.Value) -> bool:
        empty = isinstance(old, nft.ChainValue) and not old.rules and old.base is None
        common = key.name in self._encoder.identity.common_chains
        return empty and not common and isinstance(new, nft.ChainValue) and new.base is None

    def _frontends(self, elements: Iterable[_Element]) -> dict[bytes, list[_Element]]:
        """Return the elements by what those that change together have in common."""
        found: dict[bytes, list[_Element]] = {}
        for each in elements:
            found.setdefault(each.key.key[: self._role(each.key.name).common_bytes], []).append(each)
        return found

    def _tied(self, frontends: Mapping[bytes, list[_Element]], rest: Change[nft.Key, nft.Value]) -> list[bytes]:
        """Return the frontends that must change in one transaction with the chains that are replaced."""
        replaced = _names(rest.replaced, "chain")
        if not replaced:
            return []
        common = any(getattr(old, "base", None) is not None for old, _new in rest.replaced.values())
        if common or replaced & self._encoder.identity.common_chains:
            return list(frontends)

        owners = frozenset(map(nft.owner_of, replaced))

        def is_tied(element: _Element) -> bool:
            verdicts = (value for value in (element.old, element.new) if isinstance(value, str))
            leads = any(nft.owner_of(value.partition(" ")[2]) in owners for value in verdicts)
            return leads or self._role(element.key.name).part is nft.Part.REFUSES

        return [frontend for frontend, group in frontends.items() if any(map(is_tied, group))]

    def _unreachable(self, added: Change[nft.Key, nft.Value]) -> Iterator[Transaction]:
        """Yield transactions that create objects no packet reaches: sets, chains, and then the rules of the chains."""
        definitions = self._definitions(added)
        costs = _costs(len(definitions.sets))
        portions = _Portions(self._encoder, self._most_elements)
        portions.batch.create_table = definitions.create_table
        yield from portions.spread(definitions.sets, lambda batch: batch.sets, costs.set)
        yield from portions.spread(definitions.chains, lambda batch: batch.chains, 1)
        for name, rules in definitions.rules:
            portions.batch.rules.append((name, rules))
            if portions.weigh(costs.rule * len(rules)):
                yield portions.take()
        yield from portions.rest()

    def _chunks(self, groups: Iterable[list[_Element]]) -> Iterator[Transaction]:
        """Yield transactions of elements; those of one group are together."""
        portions = _Portions(self._encoder, self._most_elements)
        for group in groups:
            for element in group:
                portions.batch.put(element)
            if portions.weigh(0):
                yield portions.take()
        yield from portions.rest()

    def _removals(self, change: Change[nft.Key, nft.Value]) -> Iterator[Transaction]:
        """Yield the removal transactions: hooks, then what no packet can reach any more.

        Chains are flushed first, so that no rule refers to them or to the sets. Sets are removed in the order in which
        they were observed or rendered, which is that of their creation.
        """
        chains = {key.name: value for key, value in change.removed.items() if isinstance(value, nft.ChainValue)}
        hooks = [name for name, value in chains.items() if value.base is not None]
        others = [name for name, value in chains.items() if value.base is None]
        portions = _Portions(self._encoder, self._most_elements)
        portions.batch.flushed.extend(hooks)
        portions.batch.removed_chains.extend(hooks)
        if portions.weigh(len(hooks)):
            yield portions.take()
        sets = [key.name for key in change.removed if key.kind == "set"]
        yield from portions.spread(others, lambda batch: batch.flushed, 1)
        yield from portions.spread(sets, lambda batch: batch.removed_sets, _REMOVED_SET)
        yield from portions.spread(others, lambda batch: batch.removed_chains, 1)
        yield from portions.rest()


def _names(table: Iterable[nft.Key], kind: str) -> frozenset[str]:
    return frozenset(key.name for key in table if key.kind == kind)
