# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the kernel has lost is added again owner by owner, while owners change and share entries."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.desired import change_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.merged import MergedTables

OWNERS = "abcdef"
KEYS = range(8)


@pytest.mark.parametrize("seed", range(100))
def test_the_kernel_always_has_what_an_owner_contributes_that_is_not_lost(seed: int) -> None:
    chosen = random.Random(seed)
    merged = MergedTables(["t"])
    owned: dict[str, dict[int, int]] = {}
    kernel: dict[int, Any] = {}

    def synced() -> None:
        change = change_of(merged.tables["t"], merged.pop_journal().get("t", {}))
        kernel.update({**change.added, **{key: new for key, (_old, new) in change.replaced.items()}})
        for key in change.removed:
            kernel.pop(key, None)

    for _step in range(60):
        owner = chosen.choice(OWNERS)
        action = chosen.random()
        if action < 0.1:
            kernel.clear()
            merged.lose(chosen.sample(OWNERS, chosen.randrange(len(OWNERS))))
        elif action < 0.3:
            merged.add_again(owner)
        else:
            # One that is applied is added again first.
            merged.add_again(owner)
            values = chosen.choice([0, 0, 0, 1])
            owned[owner] = dict.fromkeys(chosen.sample(KEYS, chosen.randrange(5)), values)
            merged.replace(owner, [("t", key, value) for key, value in owned[owner].items()])
        synced()
        needed = {key for name, entries in owned.items() if name not in merged.lost for key in entries}
        assert {key: kernel.get(key) for key in needed} == {key: merged.tables["t"][key] for key in needed}
        assert kernel.keys() <= merged.tables["t"].keys()
    for owner in OWNERS:
        merged.add_again(owner)
    synced()
    assert kernel == merged.tables["t"]
