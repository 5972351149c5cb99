# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The difference between tables, and the order in which a plan is applied."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import KernelError, ProxyError, Refusal
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import (
    Change,
    Resource,
    Stage,
    apply_plan,
    difference,
    plan,
)

TABLES = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2))


def applied(table, change):
    """Return ``table`` after ``change``, which must fit it."""
    after = dict(table)
    for key, value in change.removed.items():
        assert after.pop(key) == value
    for key, (old, new) in change.replaced.items():
        assert after[key] == old != new
        after[key] = new
    for key, value in change.added.items():
        assert key not in after
        after[key] = value
    return after


@given(TABLES, TABLES)
def test_applying_the_difference_gives_the_other_table(observed, desired):
    change = difference(observed, desired)
    assert applied(observed, change) == desired
    assert bool(change) == (observed != desired)
    assert not difference(desired, desired)
    assert len(change) == len({key for key in {*observed, *desired} if observed.get(key) != desired.get(key)})
    assert list(change.added) == [key for key in desired if key in change.added]
    assert list(change.removed) == [key for key in observed if key in change.removed]


@given(TABLES, TABLES, st.lists(st.sampled_from("abcdefgh")))
def test_a_restricted_difference_is_the_part_of_the_whole(observed, desired, keys):
    whole, part = difference(observed, desired), difference(observed, desired, keys)

    def chosen(table):
        return {key: value for key, value in table.items() if key in keys}

    assert part == Change(chosen(whole.added), chosen(whole.replaced), chosen(whole.removed))


KEYS = st.sampled_from("abcdef")


@given(TABLES, TABLES, st.dictionaries(KEYS, KEYS))
def test_a_change_is_split_into_additions_and_removals(observed, desired, limited):
    change = difference(observed, desired)
    first, second = change.passes(limited.get)
    assert applied(applied(observed, first), second) == desired
    assert len(first) + len(second) == len(change) and not second.replaced
    assert second.added.keys() == {key for key in change.added if limited.get(key, key) not in change.added}
    assert first.removed.keys() == {key for key in change.removed if limited.get(key, key) not in change.removed}
    assert limited or change == Change(first.added, first.replaced, second.removed)
    assert change != 3 and "added" in repr(change)


class Table(Resource[str, int]):
    """A table in memory that records its operations in a journal."""

    def __init__(self, name: str, content: dict[str, int], journal: list[Any], atomic: bool = False) -> None:
        self.kind = name
        self.atomic = atomic
        self.content = content
        self.journal = journal

    def observe(self) -> dict[str, int]:
        return dict(self.content)

    def apply(self, change: Change[str, int]) -> None:
        self.journal.append((self.kind, sorted(change.added), sorted(change.replaced), sorted(change.removed)))
        self.content = applied(self.content, change)


def test_objects_are_created_before_and_removed_after_those_that_refer_to_them():
    journal: list[Any] = []
    devices = Table("devices", {"old": 1}, journal)
    chains = Table("chains", {"old": 1, "same": 1, "other": 1}, journal, atomic=True)
    servers = Table("servers", {"old": 1}, journal)
    same = Table("same", {"a": 1}, journal)
    stages = [
        Stage(devices, {"new": 1}),
        Stage(chains, {"new": 1, "same": 1, "other": 2}),
        Stage(servers, {"new": 1}),
        Stage(same, {"a": 1}),
    ]
    planned = plan(stages)
    assert journal == [], "planning changes nothing"
    ticks = iter(range(100))
    seconds = apply_plan(planned, lambda: float(next(ticks)))
    assert journal == [
        ("devices", ["new"], [], []),
        ("chains", ["new"], ["other"], ["old"]),
        ("servers", ["new"], [], []),
        ("servers", [], [], ["old"]),
        ("devices", [], [], ["old"]),
    ]
    assert seconds == {"devices": 2.0, "chains": 1.0, "servers": 2.0}
    assert not any(item.change for item in plan(stages)), "nothing is left to do"


def test_a_desired_table_may_depend_on_the_observed_one():
    table = Table("servers", {"draining": 1, "idle": 1}, [])

    def desired(observed):
        return {key: 0 for key in observed if key == "draining"}

    (planned,) = plan([Stage(table, desired)])
    assert planned.change == Change({}, {"draining": (1, 0)}, {"idle": 1})


def test_a_failure_stops_the_plan():
    class Broken(Table):
        def apply(self, change: Change[str, int]) -> None:
            raise KernelError("no\nroom")

    journal: list[Any] = []
    stages = [Stage(Broken("broken", {}, journal), {"a": 1}), Stage(Table("later", {}, journal), {"a": 1})]
    with pytest.raises(ProxyError) as caught:
        apply_plan(plan(stages))
    assert str(caught.value) == "no room" and journal == []


def test_errors_and_refusals_are_one_printable_line():
    assert str(KernelError("a\tb\n\x1b[0m c")) == "a b ?[0m c"
    assert str(Refusal("Service", "shop", "web", "spec", "is\nbad")) == "Service shop/web: spec: is bad"
    assert str(Refusal("Node", "", "node-a", "spec", "bad")) == "Node node-a: spec: bad"
    assert str(Refusal("object", "", "", "", "bad")) == "object (without a name): bad"
