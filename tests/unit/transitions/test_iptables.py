# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The commits of iptables mode: after each of them, every packet fares as before the change or as after it."""

from __future__ import annotations

from typing import Any, Callable
from unittest import mock

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import chains
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.commit_order import Commit, commits
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change as Difference

from .iptables import Check
from .states import VARIETIES, Node, all_changes, ones, pair_changes, random_changes, sample

full = pytest.mark.full


@pytest.mark.parametrize("node", VARIETIES, ids=str)
def test_one_service(node: Node) -> None:
    check = Check(node)
    check.changes(sample(60))
    check.changes(pair_changes(1, 50))
    assert check.faults == []


@full
@pytest.mark.parametrize("node", VARIETIES, ids=str)
def test_every_change_of_one_service(node: Node) -> None:
    check = Check(node)
    check.changes(all_changes() if node == Node() else sample(1000))
    check.changes(pair_changes(2, 1000))
    assert check.faults == []


@pytest.mark.parametrize("portion", [1, 2])
def test_several_services_in_portions(portion: int) -> None:
    check = Check(VARIETIES[portion], portion)
    check.changes(random_changes(1, 8, 3))
    assert check.faults == []


@full
@pytest.mark.parametrize("node", VARIETIES, ids=str)
@pytest.mark.parametrize("portion", [0, 1, 2, 5])
def test_many_changes_of_several_services(node: Node, portion: int) -> None:
    check = Check(node, portion)
    for services in (2, 3):
        check.changes(random_changes(portion, 40, services))
    assert check.faults == []


@pytest.mark.parametrize(
    ("portion", "count"), [(0, 15), (1, 2), pytest.param(0, 500, marks=full), pytest.param(1, 60, marks=full)]
)
def test_a_crash_after_each_commit(portion: int, count: int) -> None:
    check = Check(portion=portion)
    check.crashes(sample(count))
    check.crashes(random_changes(2, 1 + count // 30, 2))
    assert check.faults == []


@pytest.mark.parametrize("portion", [0, 1])
def test_the_first_load_and_the_clean_up(portion: int) -> None:
    state = tuple(one for one in ones((3,)) if one)[4:6]
    check = Check(portion=portion)
    # Not after a crash in a portion of the first load: the next run may drop what is not served yet.
    check.changes([(None, state)])  # type: ignore[list-item]
    check.crashes([(state, None)] if portion else [(None, state), (state, None)])  # type: ignore[list-item]
    assert check.faults == []


@pytest.mark.parametrize("portion", [0, 2])
def test_rollbacks(portion: int) -> None:
    check = Check(portion=portion)
    for old, new in [*sample(15), *random_changes(3, 3, 2)]:
        check.roll_back(old, new)
    assert check.faults == []


@pytest.mark.parametrize(("here", "there"), [(VARIETIES[0], VARIETIES[1]), (VARIETIES[3], VARIETIES[2])])
def test_another_behaviour(here: Node, there: Node) -> None:
    check = Check(here)
    for old, new in [*pair_changes(7, 40), *random_changes(7, 10, 2)]:
        check.change(old, new, to=there)
    assert check.faults == []


def only(change: Difference[Any, Any], table: str) -> Difference[Any, Any]:
    """Return the part of the change that concerns a table."""
    parts = (change.added, change.replaced, change.removed)
    return Difference(*({key: value for key, value in part.items() if key.table == table} for part in parts))


def in_order(*tables: str) -> Callable[[Any], list[Commit]]:
    return lambda change: [commit for table in tables for commit in commits(only(change, table))]


def test_nothing_is_found_without_a_fault() -> None:
    assert not found()


def found() -> bool:
    check = Check()
    for old, new in [(None, random_changes(1, 1, 3)[0][1]), *sample(60), *random_changes(1, 20, 2)]:
        check.change(old, new)
        if check.faults:
            return True
    return False


FAULTS: dict[str, Callable[[Any], list[Commit]]] = {
    "filter before nat": in_order("mangle", "filter", "nat"),
    "nat before filter": in_order("mangle", "nat", "filter"),
    "reversed": lambda change: commits(change)[::-1],
    "the first one missing": lambda change: commits(change)[1:],
    "the last one missing": lambda change: commits(change)[:-1],
    "filter committed once": lambda change: list({commit.table: commit for commit in commits(change)}.values()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_order_of_the_commits_is_found(fault: str) -> None:
    with mock.patch.object(chains, "commits", FAULTS[fault]):
        assert found()
