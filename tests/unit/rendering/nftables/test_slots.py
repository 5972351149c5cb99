# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slots of stable hashing: balance, what moves when endpoints change, weights, and the kernel's hash."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.slots import (
    LIMIT,
    MOST_ENDPOINTS,
    SLOTS,
    assigned,
    jhash,
    slot_of,
)

Endpoints = tuple[tuple[str, int], ...]


def drawn(number: int, count: int, weight: int = 1) -> Endpoints:
    """Return endpoints of a cluster drawn with a number; IPv6 with odd ones."""
    source = random.Random(number)
    form = "[fd00::{:x}]:8080" if number % 2 else "10.244.{}.{}:8080"
    made = set()
    while len(made) < count:
        high, low = source.randrange(256), source.randrange(1, 255)
        made.add(form.format(high << 8 | low) if number % 2 else form.format(high, low))
    return tuple((text, weight) for text in sorted(made))


def owners(endpoints: Endpoints) -> list[str]:
    return [endpoints[position][0] for position in assigned(endpoints)]


def moved(before: list[str], after: list[str]) -> int:
    return sum(one != other for one, other in zip(before, after))


@pytest.mark.parametrize("number", range(40))
def test_ten_endpoints_are_balanced_and_few_flows_move(number: int) -> None:
    ten = drawn(number, 10)
    before = owners(ten)
    assert max(Counter(before).values()) <= 1.15 * SLOTS / 10
    assert min(Counter(before).values()) >= 0.5 * SLOTS / 10
    shares = [moved(before, owners(tuple(item for item in ten if item != gone))) / SLOTS for gone in ten]
    assert max(shares) <= 0.12
    assert sum(shares) / len(shares) <= 0.107


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20, 50, 100, MOST_ENDPOINTS])
def test_every_slot_has_an_endpoint_and_every_endpoint_its_share(count: int) -> None:
    endpoints = drawn(count, count)
    found = Counter(owners(endpoints))
    assert sum(found.values()) == SLOTS
    assert max(found.values()) <= -(-LIMIT * SLOTS // (100 * count))
    assert set(found) == {text for text, _weight in endpoints}


@pytest.mark.parametrize("number", range(10))
def test_the_order_of_endpoints_does_not_matter(number: int) -> None:
    endpoints = [*drawn(number, 12, 2), ("192.0.2.1:1", 5)]
    expected = owners(tuple(endpoints))
    random.Random(number).shuffle(endpoints)
    assert owners(tuple(endpoints)) == expected


def test_only_the_proportion_of_weights_matters() -> None:
    ones, sevens = drawn(4, 9), drawn(4, 9, 7)
    assert assigned(ones) == assigned(sevens)


def test_slots_follow_weights() -> None:
    texts = [text for text, _weight in drawn(6, 6)]
    weights = [1, 1, 2, 3, 5, 8]
    found = Counter(owners(tuple(zip(texts, weights))))
    for text, weight in zip(texts, weights):
        share = SLOTS * weight / 20
        assert 0.7 * share <= found[text] <= max(1.15 * share, share + 1)


@pytest.mark.parametrize("number", range(10))
def test_a_change_of_weight_moves_little(number: int) -> None:
    ten = list(drawn(number, 10, 100))
    before = owners(tuple(ten))
    ten[3] = (ten[3][0], 50)
    # The endpoint loses half of its tenth; twice that allows for limits that others reach.
    assert moved(before, owners(tuple(ten))) / SLOTS <= 0.1


@pytest.mark.parametrize("number", range(10))
def test_an_added_endpoint_takes_its_share_from_the_others(number: int) -> None:
    eleven = drawn(number, 11)
    before, after = owners(eleven[:-1]), owners(eleven)
    taken = Counter(after)[eleven[-1][0]]
    assert moved(before, after) - taken <= 0.02 * SLOTS


@pytest.mark.parametrize(
    ("words", "seed", "expected"),
    # By a C program with the kernel's definition; tests/kernel/test_nftables_hashing.py asks the kernel itself.
    [
        ([0x01020304], 0x5EED0001, 0x17FC09D4),
        ([0x01020304, 0xFFFEFDFC], 0xFFFFFFFF, 0x23495D72),
        ([0x01020304, 0xFFFEFDFC, 7], 0x5EED0003, 0x5083876D),
        ([0x01020304, 0xFFFEFDFC, 7, 0x80000001], 0x5EED0004, 0xF32F4B5D),
        ([0x01020304, 0xFFFEFDFC, 7, 0x80000001, 0x12345678], 0x5EED0005, 0x4E9503F8),
    ],
)
def test_the_hash_is_the_kernels(words: list[int], seed: int, expected: int) -> None:
    assert jhash(words, seed) == expected


def test_a_client_has_a_slot() -> None:
    slots = Counter(slot_of(bytes([10, high, 0, low])) for high in range(64) for low in range(256))
    assert set(slots) == set(range(SLOTS))
    assert max(slots.values()) < 2 * 64 * 256 / SLOTS
