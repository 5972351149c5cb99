# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A table of nftables to which messages are applied as the kernel would."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Union

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.attributes import (
    attribute_text,
    each_attribute,
    parse_attributes,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import messages as m
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.decoding import (
    parse_elements,
    parse_expression,
    parse_hook,
    parse_set,
    ranges,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.resource import (
    NftablesResource,
    TransactionRefused,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Labelled
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.user_data import rule_comment
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import (
    SET_ANONYMOUS,
    SET_CONCAT,
    ChainValue,
    ElementKey,
    Key,
    ObjectKey,
    Rule,
    SetValue,
    TableValue,
    Value,
    index_bytes,
    index_of,
    list_items,
    list_value,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, Part


def target_of(verdict: Any) -> str:
    """Return the chain to which a verdict leads, empty if to none."""
    return verdict.partition(" ")[2] if isinstance(verdict, str) else ""


#: A chain or an element: kind, name, and the key of an element, which is text in iptables and ipsets. ``HOOKS``: which
#: chains have one.
Object = tuple[str, str, Union[bytes, str]]
HOOKS: Object = ("hooks", "", b"")


class Table:
    """The sets, chains and elements of a table; the elements of lists are single ones. It never changes.

    Anonymous sets, which only other programs make, end with the rules that refer to them, and are not observed.
    ``changed``: what the transaction that led to the table has changed.
    """

    def __init__(self, desired: Mapping[Key, Value]) -> None:
        #: The key of the table itself; None while there is none.
        self.key: Optional[Key] = next((key for key in desired if key.kind == "table"), None)
        self.sets: dict[str, SetValue] = {}
        self.chains: dict[str, ChainValue] = {}
        self.elements: dict[str, dict[bytes, Any]] = {}
        self.changed: set[Object] = set()
        for key, value in desired.items():
            if isinstance(value, SetValue):
                self.sets[key.name] = value
                self.elements[key.name] = {}
            elif isinstance(value, ChainValue):
                self.chains[key.name] = value
        for key, value in desired.items():
            if isinstance(key, ElementKey) and key.kind == "list":
                found = {key.key + index_bytes(index): data for index, data in list_items(value)}  # type: ignore[arg-type]
                self.elements[key.name].update(found)
            elif isinstance(key, ElementKey):
                self.elements[key.name][key.key] = value

    def observed(self) -> dict[Key, Value]:
        """Return what is read from the kernel."""
        if self.key is None:
            return {}
        found: dict[Key, Value] = {self.key: TableValue()}
        found.update({ObjectKey("chain", name): value for name, value in self.chains.items()})
        named = {name: value for name, value in self.sets.items() if not value.flags & SET_ANONYMOUS}
        for name, value in named.items():
            found[ObjectKey("set", name)] = value
            lists: dict[bytes, dict[int, bytes]] = {}
            for key, data in self.elements[name].items():
                if value.is_list:
                    lists.setdefault(key[:-4], {})[index_of(key[-4:])] = data
                else:
                    found[ElementKey("element", name, key)] = data
            found.update({ElementKey("list", name, key): list_value(items) for key, items in lists.items()})
        return found

    def after(self, messages: Iterable[Labelled], old_kernel: bool = False) -> Table:
        """Return the table after a transaction. Raises TransactionRefused.

        ``old_kernel``: before Linux 6.2 a chain cannot be removed together with the last element that leads to it.
        """
        table = Table({})
        table.key, table.sets, table.chains = self.key, dict(self.sets), dict(self.chains)
        table.elements = {name: dict(found) for name, found in self.elements.items()}
        led_to = {target_of(data) for found in self.elements.values() for data in found.values()} if old_kernel else ()
        for labelled in messages:
            kind, _flags, payload = labelled.message
            if kind == m.DELETE_CHAIN and labelled.chain in led_to:
                raise TransactionRefused(labelled.label, transient=True, busy_chains=True)
            table._apply(kind, parse_attributes(memoryview(payload), 4, len(payload)), labelled.label)
        return table

    def _apply(self, kind: int, found: dict[int, memoryview], label: str) -> None:
        of_chain = kind in (m.NEW_CHAIN, m.DELETE_CHAIN)
        of_table = kind in (m.NEW_TABLE, m.DELETE_TABLE)
        name = attribute_text(found[1 if of_table else 3 if of_chain else 2])
        self.changed.add(("chain", name, b""))
        if of_table or (of_chain and (parse_hook(found) or (name in self.chains and self.chains[name].base))):
            self.changed.add(HOOKS)
        if kind == m.NEW_TABLE:
            self.key = ObjectKey("table", name)
        elif kind == m.DELETE_TABLE:
            self._expect(self.key is not None, label)
            self.key, self.sets, self.chains, self.elements = None, {}, {}, {}
        else:
            self._expect(self.key is not None, label)
            self._apply_to_object(kind, name, found, label)

    def _apply_to_object(self, kind: int, name: str, found: dict[int, memoryview], label: str) -> None:
        if kind == m.NEW_SET:
            self._expect(name not in self.sets, label)
            self.sets[name], self.elements[name] = parse_set(found), {}
        elif kind == m.DELETE_SET:
            self._expect(name in self.sets and name not in self._used_sets(), label)
            del self.sets[name], self.elements[name]
        elif kind == m.NEW_CHAIN:
            self._expect(name not in self.chains, label)
            self.chains[name] = ChainValue((), parse_hook(found))
        elif kind == m.DELETE_CHAIN:
            self._expect(name in self.chains and name not in self._used_chains(), label)
            del self.chains[name]
        elif kind == m.DELETE_RULE:
            self._expect(name in self.chains, label)
            self.chains[name] = self.chains[name]._replace(rules=())
            for unused in self.sets.keys() - self._used_sets():
                if self.sets[unused].flags & SET_ANONYMOUS:
                    del self.sets[unused], self.elements[unused]
        elif kind == m.NEW_RULE:
            self._add_rule(name, found, label)
        else:
            self._expect(name in self.sets, label)
            self._change_elements(kind == m.NEW_ELEMENT, name, self._parsed(name, found[3]), label)

    def _add_rule(self, name: str, found: dict[int, memoryview], label: str) -> None:
        parts = tuple(parse_expression(part) for _kind, part in each_attribute(found[4], 0, len(found[4])))
        rule = Rule(parts, rule_comment(found, 7))
        self._expect(name in self.chains and set(_sets_of([rule])) <= self.sets.keys(), label)
        self._expect(set(_chains_of([rule])) <= self.chains.keys(), label)
        self.chains[name] = self.chains[name]._replace(rules=(*self.chains[name].rules, rule))

    def _parsed(self, name: str, encoded: memoryview) -> dict[bytes, Any]:
        """Return encoded elements; a range is its first key and its last."""
        if not self.sets[name].is_interval:
            return parse_elements([bytes(encoded)])
        elements = (raw for _number, raw in each_attribute(encoded, 0, len(encoded)))
        return ranges(elements, bool(self.sets[name].flags & SET_CONCAT))

    def _change_elements(self, added: bool, name: str, changed: dict[bytes, Any], label: str) -> None:
        for key, data in changed.items():
            self._expect((key in self.elements[name]) != added, label)
            self.changed.add(("element", name, key))
            if added:
                self._expect(target_of(data) in {"", *self.chains}, label)
                self.elements[name][key] = data
            else:
                del self.elements[name][key]

    def _used_sets(self) -> set[str]:
        return {name for chain in self.chains.values() for name in _sets_of(chain.rules)}

    def _used_chains(self) -> set[str]:
        used = {name for chain in self.chains.values() for name in _chains_of(chain.rules)}
        return used | {target_of(data) for found in self.elements.values() for data in found.values()}

    @staticmethod
    def _expect(accepted: bool, label: str) -> None:
        if not accepted:
            raise TransactionRefused(label, transient=True, busy_chains=False)


def _sets_of(rules: Iterable[Rule]) -> Iterator[str]:
    return (part.get(1) for rule in rules for part in rule.expressions if part.name in ("lookup", "dynset"))


def _chains_of(rules: Iterable[Rule]) -> Iterator[str]:
    targets = (target_of(part.get(2)) for rule in rules for part in rule.expressions if part.name == "immediate")
    return (target for target in targets if target)


class _Held:
    """What is read from a table, as a reader of the real one returns it."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def hooks(self) -> None:
        return None

    def chains(self, _hooks: None) -> dict[Key, Value]:
        return {key: value for key, value in self._table.observed().items() if key.kind == "chain"}

    def contents(self, name: str) -> dict[Key, Value]:
        found = self._table.observed().items()
        return {key: value for key, value in found if isinstance(key, ElementKey) and key.name == name}

    def touched(self, change: Change[Key, Value]) -> Part[Key, Value]:
        keys = {*change.added, *change.replaced, *change.removed}
        return Part({key: value for key, value in self._table.observed().items() if key in keys}, keys)


class Crashed(Exception):
    """The process has ended between two transactions."""


class Steps:
    """Counts transactions. ``crash``: after how many of them the process ends, never if negative."""

    def __init__(self, crash: int) -> None:
        self._left = crash

    def begin(self) -> None:
        if not self._left:
            raise Crashed
        self._left -= 1


class Simulated(NftablesResource):
    """A resource of a table with a simulated one, ``held``, in place of the kernel's.

    ``seen``: called with the table after each transaction.
    """

    held: Table
    old_kernel = False
    steps = Steps(-1)
    seen: Callable[[Table], None] = staticmethod(lambda _table: None)

    def observe(self) -> dict[Key, Value]:
        return self.held.observed()

    def exists(self) -> bool:
        return self.held.key is not None

    def _parts(self, _expected: Any) -> Any:
        return _Held(self.held)

    def _reader(self) -> Any:
        return _Held(self.held)

    def _send(self, labelled: list[Labelled]) -> None:
        self.steps.begin()
        self.held = self.held.after(labelled, self.old_kernel)
        self.seen(self.held)


class Kernel(Simulated):
    """The table of nftables mode. ``crash``: see :class:`Steps`."""

    def __init__(
        self, family: str, held: Table, most_elements: int, seen: Callable[[Table], None] = lambda _table: None,
        old_kernel: bool = False, crash: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(family, most_elements)
        self.held, self.old_kernel, self.seen, self.steps = held, old_kernel, seen, Steps(crash)
