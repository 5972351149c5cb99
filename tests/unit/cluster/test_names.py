# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Equal names and times of a cluster are one object, as long as an object has them."""

from __future__ import annotations

import sys
import tracemalloc

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.fields import interned


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 never frees an interned string")
def test_equal_strings_are_one_object() -> None:
    first, second = ("".join(("shop-", "web")) for _ in range(2))
    assert first is not second
    assert interned(first) is interned(second)


def test_strings_that_nothing_has_any_more_take_no_memory() -> None:
    tracemalloc.start()
    try:
        for minute in range(20):
            for number in range(20_000):
                interned(f"2026-11-23T10:{minute:02}:00.{number:06}Z")
        used, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The 400,000 strings would take 30 MB. The interpreter may enlarge its table of strings once, to a few MB.
    assert used < 12_000_000
