# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients of the forwarder: which may connect, and whose connections are closed first at the limit."""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Callable, Dict, Generic, Hashable, Iterator, Set, Tuple, TypeVar

from ..addresses import IPV4, IPV6, address_bits, family_of_packed, packed, parse_network

Item = TypeVar("Item", bound=Hashable)

#: Connections silent for this long, in seconds, may be closed for any client.
PRESSED_SECONDS = 60.0
_SHARE = 128


@functools.lru_cache(maxsize=4096)
def _prefixes(sources: Tuple[str, ...]) -> Dict[str, Dict[int, Set[int]]]:
    """Return the prefixes of the ranges, by family and by the number of bits after the prefix."""
    found: Dict[str, Dict[int, Set[int]]] = {IPV4: {}, IPV6: {}}
    for network in map(parse_network, sources):
        if network is not None:
            shift = address_bits(network.family) - network.prefix_length
            found[network.family].setdefault(shift, set()).add(network.first >> shift)
    return found


def is_allowed(sources: Tuple[str, ...], client: str) -> bool:
    """Return whether source ranges admit a client (a canonical address); without ranges all clients are admitted.

    The cost does not depend on the number of ranges, of which the owner of a Service may give tens of thousands: every
    datagram is checked here, too.
    """
    if not sources:
        return True
    raw = packed(client)
    if raw is None:
        return False
    number = int.from_bytes(raw, "big")
    by_shift = _prefixes(sources)[family_of_packed(raw)]
    return any(number >> shift in prefixes for shift, prefixes in by_shift.items())


class Sources(Generic[Item]):
    """Connections by client. ``evict`` closes and removes one; ``active`` returns when it last transferred data.

    The connections of a client are ordered by when they last transferred data, and the clients are grouped by how many
    they have. So admitting or refusing a client at the limit takes the same time however many there are: refused
    clients try again at once, and all others wait meanwhile.
    """

    def __init__(
        self, evict: Callable[[Item], None], active: Callable[[Item], float], clock: Callable[[], float]
    ) -> None:
        self._clients: Dict[str, collections.OrderedDict[Item, None]] = {}
        self._by_size: Dict[int, Dict[str, None]] = {}
        self._largest = 0
        self._evict = evict
        self._active = active
        self._clock = clock
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        for items in list(self._clients.values()):
            yield from list(items)

    def add(self, client: str, item: Item) -> None:
        """Count a connection of the client, which is active now."""
        items = self._clients.setdefault(client, collections.OrderedDict())
        items[item] = None
        self._count += 1
        self._resized(client, len(items) - 1, len(items))

    def touch(self, client: str, item: Item) -> None:
        """Record that a connection is active now."""
        items = self._clients.get(client)
        if items is not None and item in items:
            items.move_to_end(item)

    def remove(self, client: str, item: Item) -> None:
        """Stop counting a closed connection."""
        items = self._clients.get(client)
        if items is not None and item in items:
            del items[item]
            self._count -= 1
            if not items:
                del self._clients[client]
            self._resized(client, len(items) + 1, len(items))

    def _resized(self, client: str, before: int, after: int) -> None:
        if after:
            self._by_size.setdefault(after, {})[client] = None
        if before:
            group = self._by_size[before]
            del group[client]
            if not group:
                del self._by_size[before]
        if after > self._largest or self._largest not in self._by_size:
            # Sizes change by one, so a client that was the only largest one still is.
            self._largest = after

    def admit(self, client: str, most: int) -> bool:
        """Return whether a client may open another connection if at most ``most`` are allowed.

        At the limit, the client with the most connections loses those that have been silent longest, provided that the
        new client has fewer, or that they have been silent for PRESSED_SECONDS. So no single client can keep the
        others out.
        """
        if self._count < most:
            return True
        if not self._count:
            return False
        largest = self._clients[next(iter(self._by_size[self._largest]))]
        spare = self._largest - len(self._clients.get(client, ())) - 1
        if spare > 0:
            chosen = list(itertools.islice(largest, min(spare, max(1, most // _SHARE))))
        else:
            late = self._clock() - PRESSED_SECONDS
            chosen = [item for item in itertools.islice(largest, 1) if self._active(item) <= late]
        for item in chosen:
            self._evict(item)
        return bool(chosen)
