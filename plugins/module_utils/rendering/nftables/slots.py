# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stable hashing: the slots of a ServicePort, each with one endpoint, and the slot of a client.

A client's address is hashed to one of a fixed number of slots, so a change of endpoints moves a flow only if its slot
changes hands. Nodes keep no state and exchange none; they agree because slots follow from addresses, ports and weights
of the endpoints alone.

Every endpoint prefers slots in an order that follows from its address and port. In every round each endpoint requests
its next slot, and receives it if it is still free. So a slot belongs to the endpoint that prefers it most, whichever
other endpoints exist: rendezvous hashing. Maglev (Eisenbud et al., NSDI 2016) instead lets an endpoint whose slot is
occupied request another in the same round, which fills all endpoints evenly and moves many slots that need not move.
Here an endpoint requests no more slots once it has :data:`LIMIT` percent of its fair share, as in consistent hashing
with bounded loads (Mirrokni et al., SODA 2018); only slots beyond this limit may move without need. docs/nftables.md
has the figures that led to this choice and to the number of slots.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import cycle
from typing import Iterator, Sequence

from ...cluster.account import SLOTS

#: The most slots of an endpoint, in percent of its share by weight, rounded up.
LIMIT = 115
#: The most endpoints of a hashed ServicePort. With many more, some would have no slot at all.
MOST_ENDPOINTS = SLOTS // 4

#: The seed of the hash. Any number will do, but all nodes must use the same one, in all versions.
SEED = 0x6B6E7078

_JHASH_INITIAL = 0xDEADBEEF
_MASK = 0xFFFFFFFF
_TIME_UNIT = 1 << 32
_DRAWS = 1024

#: Address and port of an endpoint in canonical form, and its weight, at least 1.
WeightedEndpoint = tuple[str, int]


def _preferences(endpoint: str) -> Iterator[int]:
    """Yield the slots that one endpoint requests, in the order of its preference; some of them repeatedly."""
    draws = struct.unpack(f">{_DRAWS}H", hashlib.shake_128(endpoint.encode()).digest(2 * _DRAWS))
    for draw in draws:
        yield draw * SLOTS >> 16
    # Reached only if a ServicePort has one or two endpoints.
    yield from range(SLOTS)


def _turns(weights: Sequence[int]) -> Iterator[int]:
    """Yield the positions of endpoints in the order of their requests, each as often as its weight says."""
    if len(set(weights)) == 1:
        yield from cycle(range(len(weights)))
    queue = [(_TIME_UNIT // weight, position, 1) for position, weight in enumerate(weights)]
    heapify(queue)
    while True:
        _time, position, times = queue[0]
        heapreplace(queue, ((times + 1) * _TIME_UNIT // weights[position], position, times + 1))
        yield position


@lru_cache(maxsize=1024)
def assigned(endpoints: tuple[WeightedEndpoint, ...]) -> tuple[int, ...]:
    """Return for each slot the position of its endpoint in ``endpoints``, which has at least one and no duplicates.

    The order of ``endpoints`` affects only these positions.
    """
    order = sorted(range(len(endpoints)), key=endpoints.__getitem__)
    weights = [endpoints[position][1] for position in order]
    total = sum(weights)
    left = [-(-SLOTS * LIMIT * weight // (100 * total)) for weight in weights]
    preferences = [_preferences(endpoints[position][0]) for position in order]
    owners: list[int] = [-1] * SLOTS
    free = SLOTS
    for turn in _turns(weights):
        if not left[turn]:
            continue
        slot = next(preferences[turn])
        if owners[slot] < 0:
            owners[slot] = order[turn]
            left[turn] -= 1
            free -= 1
            if not free:
                break
    return tuple(owners)


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _MASK


def jhash(words: Sequence[int], seed: int) -> int:
    """Return the hash of 32-bit words, at least one, as the kernel's ``jhash`` (include/linux/jhash.h) computes it."""
    a = b = c = (_JHASH_INITIAL + 4 * len(words) + seed) & _MASK
    rest = list(words)
    while len(rest) > 3:
        a, b, c = (a + rest[0]) & _MASK, (b + rest[1]) & _MASK, (c + rest[2]) & _MASK
        rest = rest[3:]
        a, c = (a - c & _MASK) ^ _rotated(c, 4), (c + b) & _MASK
        b, a = (b - a & _MASK) ^ _rotated(a, 6), (a + c) & _MASK
        c, b = (c - b & _MASK) ^ _rotated(b, 8), (b + a) & _MASK
        a, c = (a - c & _MASK) ^ _rotated(c, 16), (c + b) & _MASK
        b, a = (b - a & _MASK) ^ _rotated(a, 19), (a + c) & _MASK
        c, b = (c - b & _MASK) ^ _rotated(b, 4), (b + a) & _MASK
    first, second, third = [*rest, 0, 0][:3]
    a, b, c = (a + first) & _MASK, (b + second) & _MASK, (c + third) & _MASK
    c = (c ^ b) - _rotated(b, 14) & _MASK
    a = (a ^ c) - _rotated(c, 11) & _MASK
    b = (b ^ a) - _rotated(a, 25) & _MASK
    c = (c ^ b) - _rotated(b, 16) & _MASK
    a = (a ^ c) - _rotated(c, 4) & _MASK
    b = (b ^ a) - _rotated(a, 14) & _MASK
    return (c ^ b) - _rotated(b, 24) & _MASK


def slot_of(registers: bytes) -> int:
    """Return the slot that ``jhash ... mod SLOTS seed SEED`` gives for whole registers (net/netfilter/nft_hash.c).

    The kernel reads registers as words in the order of the machine, and scales the hash instead of dividing it.
    """
    words = struct.unpack(f"={len(registers) // 4}I", registers)
    return jhash(words, SEED) * SLOTS >> 32
