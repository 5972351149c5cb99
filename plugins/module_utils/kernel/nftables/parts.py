# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read the table in parts, each of which takes a fraction of a second, so that others can change it in between.

The order is that in which differences can be removed: first missing sets and chains, to which others refer, then the
rules of each chain, then elements, and what is not expected at the end, when nothing refers to it any more.

Large sets are not dumped. For each piece of a dump, of some hundred elements, the kernel walks over the set from its
beginning. So the time of a dump grows with the square of the number of elements: a list of 680,000 takes a minute.
Looking each element up takes time in proportion. It finds none that is not expected, so the number of elements must be
right as well. The same is true of a dump of all rules, so the rules of each chain are dumped by themselves.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Iterator, Mapping, Optional, cast

from ...base.errors import KernelError
from ...rendering.nftables import objects as nft
from ...resources import Change, Part
from ..netlink.attributes import parse_attributes
from ..netlink.outcomes import Outcome, is_missing
from ..netlink.socket import NetlinkSocket
from . import messages
from .attributes import GENMSG_BYTES, NFTA_SET_ELEM_LIST_ELEMENTS
from .decoding import parse_elements
from .messages import Encoder
from .observation import CountedSet, Reader
from .transactions import length_of

#: Smaller sets are dumped, which takes about as long up to here.
FEWEST_ELEMENTS = 20_000
#: Elements and chains of one part: they are read in 25 ms of processor time.
ELEMENTS_OF_PART = 5_000
CHAINS_OF_PART = 250
#: The elements of one request; the kernel sends an answer for each.
_ELEMENTS_OF_REQUEST = 2_000


class TableParts:
    """Reads a table in parts. ``expected``: its entries as they should be, which may change between two parts."""

    def __init__(self, sock: NetlinkSocket, encoder: Encoder, expected: Mapping[nft.Key, nft.Value]) -> None:
        self._reader = Reader(sock, encoder.family, encoder.identity)
        self._lookup = _Lookup(sock, encoder)
        self._expected = expected
        # The keys of the expected elements and lists, by set.
        self._elements: dict[str, list[nft.ElementKey]] = {}

    def read(self, urgent: Change[nft.Key, nft.Value]) -> Iterator[Part[nft.Key, nft.Value]]:
        """Yield the parts, with the entries of an urgent change as early as possible. Raises KernelError."""
        table = self._reader.table()
        if table is None:
            yield Part({}, self._expected)
            return
        for key in self._expected:
            if isinstance(key, nft.ElementKey):
                self._elements.setdefault(key.name, []).append(key)
        sets, hooks = self._reader.counted_sets(), self._reader.hooks()
        # Nothing refers to a chain with a hook, and one that is not expected may drop packets.
        hooked = {name: hook for name, hook in hooks.items() if hook != getattr(self._chain(name), "base", None)}
        yield self._definitions(table, sets, hooks, hooked)
        if urgent:
            yield self.touched(urgent)
        others = {name: hook for name, hook in hooks.items() if name not in hooked}
        yield from self._rules([item for item in others.items() if self._chain(item[0])])
        yield from self._contents({name: each for name, each in sets.items() if self._set(name)})
        not_ours = {name: each.value for name, each in sets.items() if self._set(name) is None}
        unexpected: dict[nft.Key, nft.Value] = {nft.ObjectKey("set", name): value for name, value in not_ours.items()}
        unexpected.update(self._reader.chains({name: hook for name, hook in others.items() if not self._chain(name)}))
        for name in not_ours:
            unexpected.update(self._reader.contents(name))
        yield Part(unexpected, ())

    def touched(self, change: Change[nft.Key, nft.Value]) -> Part[nft.Key, nft.Value]:
        """Return the entries that a change names, and the sets that they are in. Raises KernelError."""
        # A list may have as many elements as before or as wanted.
        longest = {key: max(pair, key=length_of) for key, pair in change.replaced.items()}
        entries = {**change.removed, **longest, **change.added}
        elements: dict[str, dict[nft.ElementKey, nft.Value]] = {key.name: {} for key in entries if key.kind == "set"}
        for key, value in entries.items():
            if isinstance(key, nft.ElementKey):
                elements.setdefault(key.name, {})[key] = value
        hooks, table = self._reader.hooks(), self._reader.table()
        found = self._reader.chains(
            {name: hook for name, hook in hooks.items() if nft.ObjectKey("chain", name) in entries}
        )
        if table is not None:
            found[self._reader.key] = table
        for name, wanted in elements.items():
            there = self._reader.counted_set(name)
            if there is not None:
                found[nft.ObjectKey("set", name)] = there.value
                # Keys of sets of ours are whole words.
                few = there.elements is None or there.elements < FEWEST_ELEMENTS
                dump = few or there.value.is_interval or any(len(key.key) % 4 for key in wanted)
                found.update(self._reader.contents(name) if dump else self._lookup.entries(name, wanted))
        return Part({key: value for key, value in found.items() if key in entries}, entries)

    def _chain(self, name: str) -> Optional[nft.Value]:
        return self._expected.get(nft.ObjectKey("chain", name))

    def _set(self, name: str) -> Optional[nft.Value]:
        return self._expected.get(nft.ObjectKey("set", name))

    def _definitions(
        self,
        table: nft.TableValue,
        sets: Mapping[str, CountedSet],
        hooks: Mapping[str, Optional[nft.BaseHook]],
        hooked: Mapping[str, Optional[nft.BaseHook]],
    ) -> Part[nft.Key, nft.Value]:
        """Return the part of the table itself, the expected sets, and the chains and sets that are missing."""
        observed: dict[nft.Key, nft.Value] = {self._reader.key: table}
        observed.update((nft.ObjectKey("set", name), each.value) for name, each in sets.items() if self._set(name))
        observed.update(self._reader.chains(hooked))
        there = {*observed, *(nft.ObjectKey("chain", name) for name in hooks)}
        keys = [key for key in self._expected if isinstance(key, nft.ObjectKey) and key not in there]
        elements = [each for key in keys if key.kind == "set" for each in self._elements.get(key.name, ())]
        return Part(observed, [*keys, *elements])

    def _rules(self, hooks: list[tuple[str, Optional[nft.BaseHook]]]) -> Iterator[Part[nft.Key, nft.Value]]:
        for begin in range(0, len(hooks), CHAINS_OF_PART):
            some = dict(hooks[begin : begin + CHAINS_OF_PART])
            yield Part(self._reader.chains(some), ())

    def _contents(self, sets: Mapping[str, CountedSet]) -> Iterator[Part[nft.Key, nft.Value]]:
        """Yield the elements of the expected sets: several small sets together, large ones in several parts."""
        observed: dict[nft.Key, nft.Value] = {}
        keys: list[nft.ElementKey] = []
        for name, (value, count) in sets.items():
            if value.dynamic:
                continue
            if count is not None and count >= FEWEST_ELEMENTS and not value.is_interval:
                yield from self._confirmed(name)
                if self._is_complete(name):
                    continue
            observed.update(self._reader.contents(name))
            keys += self._elements.get(name, ())
            if len(observed) >= ELEMENTS_OF_PART:
                yield Part(observed, keys)
                observed, keys = {}, []
        yield Part(observed, keys)

    def _confirmed(self, name: str) -> Iterator[Part[nft.Key, nft.Value]]:
        """Yield the expected elements of a set that the kernel has."""
        keys = iter(self._elements.get(name, ()))
        while True:
            wanted: dict[nft.ElementKey, nft.Value] = {}
            elements = 0
            for key in keys:
                if key in self._expected:
                    wanted[key] = self._expected[key]
                    elements += _size(wanted[key])
                if elements >= ELEMENTS_OF_PART:
                    break
            if not wanted:
                return
            yield Part(self._lookup.entries(name, wanted), wanted)

    def _is_complete(self, name: str) -> bool:
        """Return whether a set that has all expected elements has no others."""
        expected = sum(
            _size(value)
            for key, value in self._expected.items()
            if isinstance(key, nft.ElementKey) and key.name == name
        )
        now = self._reader.counted_set(name)
        return now is not None and now.elements == expected and not self._lookup.has_catch_all(name)


class _Lookup:
    """Looks elements of sets up over a socket."""

    def __init__(self, sock: NetlinkSocket, encoder: Encoder) -> None:
        self._sock = sock
        self._encoder = encoder

    def entries(self, name: str, wanted: Mapping[nft.ElementKey, nft.Value]) -> dict[nft.Key, nft.Value]:
        """Return those entries of a set that the kernel has; of a list, the elements at the wanted indices.

        Raises KernelError.
        """
        elements = _elements(wanted)
        found: dict[bytes, Any] = {}
        as_wanted = True
        while True:
            part = dict(islice(elements, _ELEMENTS_OF_REQUEST))
            if not part:
                break
            there = _parsed(self._sock.transact(list(self._encoder.get_elements(name, part))))
            if there != part:
                # The kernel does not look further after the first that is missing.
                each = [message for key in part for message in self._encoder.get_elements(name, [key])]
                there = _parsed(self._sock.transact(each))
                as_wanted = False
            found.update(there)
        if as_wanted:
            return dict(wanted.items())
        entries: dict[nft.Key, nft.Value] = {}
        for key, value in wanted.items():
            if key.kind != "list":
                if key.key in found:
                    entries[key] = found[key.key]
                continue
            indices = [index for index, _data in nft.list_items(cast(nft.ListValue, value))]
            items = {
                index: found[raw] for index in indices for raw in [key.key + nft.index_bytes(index)] if raw in found
            }
            if items:
                entries[key] = nft.list_value(items)
        return entries

    def has_catch_all(self, name: str) -> bool:
        """Return whether the set has the element that the kernel does not count. Raises KernelError."""
        outcome = self._sock.transact(list(self._encoder.get_elements(name, [messages.CATCH_ALL])))
        return not outcome.errors or not all(map(is_missing, outcome.errors))


def _parsed(outcome: Outcome) -> dict[bytes, Any]:
    """Return the elements in the answers, each of which has one."""
    for error in outcome.errors:
        if not is_missing(error):
            raise KernelError(f"elements of nftables cannot be read: {error}")
    if not outcome.replies:
        return {}
    first = outcome.replies[0].payload
    nest = parse_attributes(memoryview(first), GENMSG_BYTES, len(first))[NFTA_SET_ELEM_LIST_ELEMENTS]
    # The same names are before each element.
    begin = len(first) - len(nest)
    return parse_elements([b"".join([reply.payload[begin:] for reply in outcome.replies])])


def _size(value: nft.Value) -> int:
    """Return the number of the kernel's elements in an entry of a set."""
    return len(nft.list_items(cast(nft.ListValue, value))) if isinstance(value, tuple) else 1


def _elements(entries: Mapping[nft.ElementKey, nft.Value]) -> Iterator[tuple[bytes, Any]]:
    """Yield the elements of the entries of a set: those of a list one by one."""
    for key, value in entries.items():
        if key.kind == "list":
            for index, data in nft.list_items(cast(nft.ListValue, value)):
                yield key.key + nft.index_bytes(index), data
        else:
            yield key.key, value
