# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks of transitions find faults of the code that orders a change: each of these makes packets fare wrongly."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import messages as m
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import transactions
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Planner, Transaction
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects import SetRole

from .check import Check
from .nftables import Kernel
from .states import all_changes, pair_changes, random_changes

Steps = list[Transaction]


def _divided(steps: Steps, is_first: Callable[[Any], bool]) -> Steps:
    """Return the transactions with the messages of a kind in one of their own before the others."""
    halves = ([each for each in step.messages if is_first(each) is first] for step in steps for first in (True, False))
    return [Transaction(half) for half in halves if half]


def _of(*kinds: int) -> Callable[[Any], bool]:
    return lambda each: each.message[0] in kinds


def _halves(steps: Steps) -> Steps:
    parts = ((each.messages[: len(each.messages) // 2], each.messages[len(each.messages) // 2 :]) for each in steps)
    return [Transaction(part) for pair in parts for part in pair if part]


def _sorted(steps: Steps, *kinds: int) -> Steps:
    """Return the transactions with those first that have messages of a kind."""
    return sorted(steps, key=lambda step: not any(map(_of(*kinds), step.messages)))


def _without(steps: Steps, *kinds: int) -> Steps:
    return [Transaction([each for each in step.messages if not _of(*kinds)(each)]) for step in steps]


REMOVING = (m.DELETE_SET, m.DELETE_CHAIN)
ORDERS: dict[str, Callable[[Steps], Steps]] = {
    "reversed": lambda steps: steps[::-1],
    "the first one missing": lambda steps: steps[1:],
    "the last one missing": lambda steps: steps[:-1],
    "the middle one missing": lambda steps: steps[: len(steps) // 2] + steps[len(steps) // 2 + 1 :],
    "two neighbours exchanged": lambda steps: [*steps[:-2], *steps[-2:][::-1]],
    "the first one last": lambda steps: [*steps[1:], *steps[:1]],
    "removals first": lambda steps: _sorted(steps, *REMOVING),
    "elements first": lambda steps: _sorted(steps, m.NEW_ELEMENT),
    "every one cut in two": _halves,
    "chains flushed alone": lambda steps: _divided(steps, _of(m.DELETE_RULE)),
    "elements removed alone": lambda steps: _divided(steps, _of(m.DELETE_ELEMENT)),
    "elements not removed": lambda steps: _without(steps, m.DELETE_ELEMENT),
    "objects not removed": lambda steps: _without(steps, *REMOVING),
    "rules not added": lambda steps: _without(steps, m.NEW_RULE),
}


class Ordered:
    """A planner with its transactions in another order."""

    def __init__(self, planner: Planner, order: Callable[[Steps], Steps]) -> None:
        self._planner = planner
        self._order = order

    def transactions(self, change: Any) -> Iterator[Transaction]:
        return iter(self._order(list(self._planner.transactions(change))))


def ordering(order: str) -> Callable[[Kernel], None]:
    """Return what gives a kernel the transactions of a change in another order."""

    def prepare(kernel: Kernel) -> None:
        kernel._planner = Ordered(kernel._planner, ORDERS[order])  # type: ignore[assignment]

    return prepare


def found(check: Check) -> bool:
    """Return whether the check finds anything in a sample of changes."""
    several = [*random_changes(1, 200, 2)[160:170], *random_changes(1, 10, 2)]
    changes = [*all_changes()[::400], *pair_changes(1, 30), *several]
    for old, new in [(None, changes[-1][1]), *changes]:
        check.change(old, new)
        if check.faults:
            return True
    return False


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the resource wait for nothing before it tries again."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)


def test_nothing_is_found_without_a_fault() -> None:
    assert not found(Check())


@pytest.mark.parametrize("order", ORDERS)
def test_another_order_of_the_transactions_is_found(order: str) -> None:
    assert found(Check(prepare=ordering(order)))


def _identity(**changes: Any) -> Callable[[Kernel], None]:
    def prepare(kernel: Kernel) -> None:
        kernel._encoder.identity = kernel.table._replace(**changes)

    return prepare


IDENTITIES = {
    "no roles": {"role": lambda _family, _name: SetRole()},
    "no set helps": {"role": lambda family, name: Kernel.table.role(family, name)._replace(part=SetRole().part)},
    "elements apart from their frontend": {
        "role": lambda family, name: Kernel.table.role(family, name)._replace(common_bytes=1 << 30)
    },
    "restricting hooks last": {"restricting_chains": frozenset()},
}


@pytest.mark.parametrize("identity", IDENTITIES)
def test_another_layout_is_found(identity: str) -> None:
    assert found(Check(prepare=_identity(**IDENTITIES[identity])))


def _hooks_early(planner: Planner, change: Any) -> Iterator[Transaction]:
    kinds = ("table", "set", "chain")
    first = {key: value for key, value in change.added.items() if key.kind in kinds}
    rest = {key: value for key, value in change.added.items() if key.kind not in kinds}
    for part in (transactions.Change(first), transactions.Change(rest, change.replaced, change.removed)):
        yield from PHASES(planner, part)


PHASES, CHUNKS = Planner._phases, Planner._chunks
PLANS: dict[str, dict[str, Any]] = {
    "hooks first": {"_phases": _hooks_early},
    "replaced chains apart from their frontends": {"_tied": lambda *_arguments: []},
    "every element alone": {
        "_chunks": lambda self, groups: CHUNKS(self, ([each] for group in groups for each in group))
    },
}


@pytest.mark.parametrize("plan", PLANS)
def test_another_plan_is_found(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in PLANS[plan].items():
        monkeypatch.setattr(Planner, name, function)
    assert found(Check())


def test_a_rest_of_a_shortened_list_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    change_list = transactions._Batch.change_list

    def stale(batch: Any, name: str, key: bytes, old: Any, new: Any) -> None:
        change_list(batch, name, key, old[: len(new)] if new else old, new)

    monkeypatch.setattr(transactions._Batch, "change_list", stale)
    assert found(Check())


def test_frontends_that_lead_to_a_chain_by_another_one_are_found_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.objects.owner_of", str
    )
    check = Check()
    check.change((("node port+affinity", 5),), (("external IP+affinity", 3),))
    assert check.faults


def test_unfilled_chains_are_found_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_is_unfilled", lambda *_arguments: False)
    check = Check()
    check.crashes([((("node port", 1),), (("affinity", 3),))])
    assert check.faults
