# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who a client is, and how much of what clients share one of them may have; for everything that listens.

A host with IPv6 usually has a whole /64, so counting addresses would let one host take everything. As long as there is
room, nobody is limited.
"""

from __future__ import annotations

import collections
import itertools
from typing import Callable, Generic, Hashable, Iterable, Iterator, Optional, Sequence, TypeVar

from .base.addresses import networks_of, packed, unpacked

Item = TypeVar("Item", bound=Hashable)
Path = tuple[str, ...]
"""A client, and if it may have several addresses, one of them."""

#: The part of all entries that a client over its share loses at once to others.
_SHARE = 128


class ClientRule:
    """The rule of who is one client: an IPv4 address (also if mapped), the /64 of an IPv6 address, or a pod.

    The pods of a node may have one /64, and belong to different users. So each address in the ranges of pods
    (:meth:`set_pods`) is a client. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._pods = networks_of(())

    def set_pods(self, cidrs: Iterable[str]) -> None:
        """Replace the ranges of pods; entries that exist keep their client."""
        self._pods = networks_of(cidrs)

    def path(self, address: str) -> Path:
        """Return the client at an address of a socket, and the address if that is not the client itself."""
        raw = packed(address.partition("%")[0])
        if raw is None:
            return (address,)
        text = unpacked(raw)
        if len(raw) == 4 or any(network.contains(text) for network in self._pods):
            return (text,)
        return unpacked(raw[:8] + bytes(8)) + "/64", text


class _Crowd(Generic[Item]):
    """The entries of everybody, of one client or of one address, in two queues, longest silent first.

    ``proven``: those whose use has been shown; ``fresh``: all others. ``members``: the crowds of which it consists,
    which are grouped by their numbers of entries.
    """

    __slots__ = ("_by_size", "fresh", "key", "largest", "members", "proven")

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.fresh: collections.OrderedDict[Item, None] = collections.OrderedDict()
        self.proven: collections.OrderedDict[Item, None] = collections.OrderedDict()
        self.members: dict[str, _Crowd[Item]] = {}
        self.largest = 0
        self._by_size: dict[int, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self.fresh) + len(self.proven)

    def touch(self, item: Item) -> None:
        (self.fresh if item in self.fresh else self.proven).move_to_end(item)

    def prove(self, item: Item) -> None:
        if item in self.fresh:
            del self.fresh[item]
            self.proven[item] = None

    def remove(self, item: Item) -> None:
        del (self.fresh if item in self.fresh else self.proven)[item]

    def resized(self, member: _Crowd[Item], before: int) -> None:
        """Note the size of a member that had one entry more or less; without entries it is none any more."""
        key, after = member.key, len(member)
        if after:
            self._by_size.setdefault(after, {})[key] = None
        else:
            del self.members[key]
        if before:
            group = self._by_size[before]
            del group[key]
            if not group:
                del self._by_size[before]
        if after > self.largest or self.largest not in self._by_size:
            # Sizes change by one, so a member that was the only largest one still is.
            self.largest = after

    def largest_member(self) -> _Crowd[Item]:
        return self.members[next(iter(self._by_size[self.largest]))]

    def first(self) -> Item:
        """Return the entry to lose first: of the largest member of the largest member."""
        crowd = self
        while crowd.members:
            crowd = crowd.largest_member()
        return next(iter(crowd.fresh or crowd.proven))


class Shares(Generic[Item]):
    """The entries of a limited table by client, such as connections.

    ``evict`` closes an entry, and calls :meth:`remove`. ``may_yield`` returns whether an entry may make room for a
    client that has about as many; without it each may.

    Admitting or refusing a client at the limit takes the same time however many entries there are: refused clients try
    again at once, and all others wait meanwhile.
    """

    def __init__(
        self, rule: ClientRule, evict: Callable[[Item], None], may_yield: Callable[[Item], bool] = lambda _item: True
    ) -> None:
        self._rule = rule
        self._evict = evict
        self._may_yield = may_yield
        self._everybody: _Crowd[Item] = _Crowd()
        self._crowds: dict[Item, tuple[_Crowd[Item], ...]] = {}

    def __len__(self) -> int:
        return len(self._crowds)

    def __iter__(self) -> Iterator[Item]:
        return iter(list(self._crowds))

    def oldest(self) -> Optional[Item]:
        """Return the entry that was added first, None without entries; unlike iteration it copies nothing."""
        return next(iter(self._crowds), None)

    def add(self, address: str, item: Item) -> None:
        """Count an entry of the client at this address, which is used now and not proven."""
        crowds = [self._everybody]
        for key in self._rule.path(address):
            members = crowds[-1].members
            if key not in members:
                members[key] = _Crowd(key)
            crowds.append(members[key])
        for crowd in crowds:
            crowd.fresh[item] = None
        self._crowds[item] = tuple(crowds)
        self._resized(crowds, -1)

    def touch(self, item: Item) -> None:
        """Record that an entry is used now."""
        for crowd in self._crowds.get(item, ()):
            crowd.touch(item)

    def prove(self, item: Item) -> None:
        """Record that an entry is of use, so that it is lost after the others of its client."""
        for crowd in self._crowds.get(item, ()):
            crowd.prove(item)

    def remove(self, item: Item) -> None:
        """Stop counting a closed entry."""
        crowds = self._crowds.pop(item, ())
        for crowd in crowds:
            crowd.remove(item)
        self._resized(crowds, 1)

    @staticmethod
    def _resized(crowds: Sequence[_Crowd[Item]], difference: int) -> None:
        for crowd, member in zip(crowds, crowds[1:]):
            crowd.resized(member, len(member) + difference)

    def due(self, is_due: Callable[[Item], bool]) -> list[Item]:
        """Return the entries that are due; those used recently are not asked about."""
        queues = (self._everybody.fresh, self._everybody.proven)
        return [item for queue in queues for item in itertools.takewhile(is_due, queue)]

    def make_room(self, address: str, most: int) -> bool:
        """Make room for another entry of the client at this address if at most ``most`` are allowed.

        Return whether there is room. At the limit the client with the most entries loses those that have been silent
        longest: to a client with fewer, and to itself. So no client can keep others out.
        """
        client = self._rule.path(address)[0]
        while len(self) >= most:
            if not self._make_room(client, most):
                return False
        return True

    def _make_room(self, client: str, most: int) -> bool:
        everybody = self._everybody
        own = everybody.members.get(client)
        held = len(own) if own is not None else 0
        more = everybody.largest - held
        if more > 1:
            victim = everybody.largest_member()
            for _count in range(min(more - 1, max(1, most // _SHARE))):
                self._evict(victim.first())
            return True
        if own is not None and held > 1 and not more:
            self._evict(own.first())
            return True
        # Clients that have as many do not take turns at what is in use.
        oldest = [next(iter(queue)) for queue in (everybody.fresh, everybody.proven) if queue]
        candidates = [item for item in oldest if len(self._crowds[item][1]) > held]
        if own is not None:
            candidates.append(own.first())
        for item in candidates:
            if self._may_yield(item):
                self._evict(item)
                return True
        return False
