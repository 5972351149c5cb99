# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The ranges of addresses that other blocks contain after a change, compared with a check of each address."""

from __future__ import annotations

import random

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.matching.address_space import (
    changed_ranges,
    pieces_of,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.matching.compiled import Block, merge

LAST = 60


def _blocks(random_: random.Random) -> list[Block]:
    found = []
    for _number in range(random_.randrange(5)):
        starts = [random_.randrange(LAST) for _part in range(random_.randrange(1, 4))]
        found.append(Block("IPv4", tuple(merge((at, min(LAST, at + random_.randrange(12))) for at in starts))))
    return found


@pytest.mark.parametrize("seed", range(300))
def test_changed_ranges_are_exactly_those_addresses_whose_blocks_changed(seed):
    random_ = random.Random(seed)
    before, now = _blocks(random_), _blocks(random_)
    now += before[: random_.randrange(3)]

    def containing(blocks, address):
        return {block for block in blocks if any(first <= address <= last for first, last in block.intervals)}

    ranges = list(changed_ranges(pieces_of(before), pieces_of(now)))
    assert ranges == sorted(ranges) and all(first <= last for first, last in ranges)
    changed = [address for first, last in ranges for address in range(first, last + 1)]
    assert changed == [at for at in range(LAST + 2) if containing(before, at) != containing(now, at)]
