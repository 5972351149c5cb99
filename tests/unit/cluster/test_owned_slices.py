# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The EndpointSlices of each Service behave like a dict of dicts, and take less memory."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import EndpointSlice, NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.owned_slices import OwnedSlices

OWNERS = [NamespacedName("default", name) for name in "abc"]


def endpoint_slice(name, trigger_time=""):
    return EndpointSlice("default", name, "a", "IPv4", (), (), trigger_time)


@pytest.mark.parametrize("seed", range(50))
def test_any_sequence_of_changes_leaves_what_a_dict_of_dicts_would_have(seed):
    chosen = random.Random(seed)
    slices, model = OwnedSlices(), {}
    for step in range(200):
        owner = chosen.choice(OWNERS)
        name = chosen.choice("xyz")
        if chosen.random() < 0.5:
            item = endpoint_slice(name, str(step))
            slices.put(owner, item)
            model.setdefault(owner, {})[name] = item
        elif chosen.random() < 0.8:
            if name in model.get(owner, {}):
                slices.drop(owner, name)
                del model[owner][name]
            else:
                with pytest.raises(KeyError):
                    slices.drop(owner, name)
        elif chosen.random() < 0.5:
            given = {each: endpoint_slice(each, str(step)) for each in chosen.sample("xyz", chosen.randrange(4))}
            slices.replace(owner, given)
            model[owner] = given
        else:
            assert slices.pop(owner) == model.pop(owner, {})
        model = {key: value for key, value in model.items() if value}
        assert dict(slices.items()) == model
        assert {key for key in OWNERS if key in slices} == set(model)
        assert all(slices.of(key).get("x") == slices.get(key, "x") for key in OWNERS)


def test_the_slices_given_are_not_changed_later():
    given = {"x": endpoint_slice("x"), "y": endpoint_slice("y")}
    slices = OwnedSlices()
    slices.replace(OWNERS[0], given)
    slices.put(OWNERS[0], endpoint_slice("z"))
    assert list(given) == ["x", "y"]


def test_a_service_with_one_slice_takes_no_dict():
    item = endpoint_slice("x")
    owners = [NamespacedName("default", f"s{number}") for number in range(10_000)]
    tracemalloc.start()
    try:
        slices = OwnedSlices()
        for owner in owners:
            slices.put(owner, item)
        used, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 100 * len(owners)
