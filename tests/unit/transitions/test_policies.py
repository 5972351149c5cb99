# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of network policies: after each transaction, every packet fares as before the change or as after it."""

from __future__ import annotations

import random
from typing import Any, Callable, Iterable, Iterator

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.configuration.node_proxy import CUT, DENY
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import messages as m
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Labelled, Transaction
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import ANY, GRANT, PolicyRows

from .policies import SETTINGS, Agent, Check, Kernel, any_changes, loaded, neighbours, verdicts

full = pytest.mark.full
NEIGHBOURS = neighbours()
OTHERS: dict[str, dict[str, Any]] = {
    "no cluster policies": {"cluster_policies": False},
    "connections are cut": {"established_connections": CUT},
    "unknown pods": {"unknown_pods": DENY, "pod_cidrs": ("10.244.1.0/24",)},
    "exempt destinations": {"egress_exempt_cidrs": ("203.0.113.0/28", "10.244.2.11/32")},
    "exempt sources": {"exempt_sources": ("203.0.113.0/24",)},
    "sources are not checked": {"check_sources": False},
    "a log": {"log_denied": True},
}
MADE = {name: SETTINGS._replace(**changes) for name, changes in OTHERS.items()}


def sample(seed: int, count: int) -> list[Any]:
    """Return changes of one thing, and of everything at once."""
    return [*random.Random(seed).sample(NEIGHBOURS, count), *any_changes(seed, count // 4)]


@full
@pytest.mark.parametrize("part", range(4))
def test_every_change_of_one_thing(part: int) -> None:
    check = Check()
    check.changes(NEIGHBOURS[part::4])
    assert check.faults == [] and check.states > 1500


@full
@pytest.mark.parametrize("settings", MADE.values(), ids=MADE)
def test_many_changes_with_other_settings(settings: Any) -> None:
    check = Check(settings)
    check.changes(sample(2, 1000))
    assert check.faults == []


@pytest.mark.parametrize("name", MADE)
def test_the_settings_change_as_well(name: str) -> None:
    for here, there in ((SETTINGS, MADE[name]), (MADE[name], SETTINGS)):
        check = Check(here)
        for old, new in sample(3, 4):
            check.change(old, new, to=there)
        assert check.faults == []


def test_a_crash_before_and_after_the_only_transaction() -> None:
    check = Check()
    crashed = 0
    for old, new in sample(4, 8):
        crashed += check.change(old, new, crash=0)
        assert not check.change(old, new, crash=1)
        assert check.change(old, new, crash=0, to=MADE["exempt sources"])
    assert check.faults == [] and crashed > 5


def test_late_grants_open_nothing() -> None:
    """A new pod is isolated at once; what it is granted may follow later."""
    check = Check(portion=1)
    check.changes(sample(5, 20))
    check.changes((old, new) for old, new in NEIGHBOURS[::20] if {old.pods, new.pods} == {"none", "one"})
    assert check.faults == [] and check.late > 1


def test_the_first_load_and_the_clean_up() -> None:
    check, nothing = Check(), loaded({})
    for state in {old for old, _new in sample(6, 12)}:
        agent = Agent(state.objects(), SETTINGS)
        ends = [verdicts(nothing), verdicts(loaded(agent.desired))]
        held, _crashed = check._made("first load", nothing, None, agent.desired, ends)
        check._made("clean-up", held, None, {}, ends[::-1])
    assert check.faults == [] and check.states > 20


Steps = list[Transaction]


def _divided(steps: Steps, is_first: Callable[[Labelled], bool]) -> Steps:
    """Return the transactions with the messages of a kind in one of their own before the others."""
    halves = ([each for each in step.messages if is_first(each) is first] for step in steps for first in (True, False))
    return [Transaction(half) for half in halves if half]


def _without(steps: Steps, is_lost: Callable[[Labelled], bool]) -> Steps:
    return [Transaction([each for each in step.messages if not is_lost(each)]) for step in steps]


def _of(*kinds: int) -> Callable[[Labelled], bool]:
    return lambda each: each.message[0] in kinds


def _about(*names: str) -> Callable[[Labelled], bool]:
    return lambda each: any(name in each.label for name in names)


def _is_of_ports(each: Labelled) -> bool:
    return each.message[2][0] == m.FAMILY_NUMBERS["bridge"]


FAULTS: dict[str, Callable[[Steps], Steps]] = {
    "ports after policies": lambda steps: _divided(steps, lambda each: not _is_of_ports(each)),
    "ports before policies": lambda steps: _divided(steps, _is_of_ports),
    "ports missing": lambda steps: _without(steps, _is_of_ports),
    "removals first": lambda steps: _divided(steps, _of(m.DELETE_ELEMENT)),
    "isolation first": lambda steps: _divided(steps, _about("isolated")),
    "isolation last": lambda steps: _divided(steps, lambda each: "isolated" not in each.label),
    "grants last": lambda steps: _divided(steps, lambda each: "grants" not in each.label),
    "classes last": lambda steps: _divided(steps, lambda each: "pods4" not in each.label),
    "elements not removed": lambda steps: _without(steps, _of(m.DELETE_ELEMENT)),
    "ports of grants missing": lambda steps: _without(steps, _about("elements of ports", "port-ranges")),
    "the last message missing": lambda steps: [Transaction(step.messages[:-1]) for step in steps],
}


def found(check: Check, changes: Iterable[Any]) -> bool:
    """Return whether the check finds anything in a sample of changes."""
    return any(check.change(old, new) or check.faults for old, new in changes)


def test_nothing_is_found_without_a_fault() -> None:
    check = Check()
    assert not found(check, sample(7, 120)) and check.states > 90


@pytest.mark.parametrize("fault", FAULTS)
def test_another_order_is_found(fault: str) -> None:
    def prepare(kernel: Kernel) -> None:
        planned = kernel._transactions

        def transactions(change: Any) -> Iterator[Transaction]:
            yield from FAULTS[fault](list(planned(change)))

        kernel._transactions = transactions  # type: ignore[method-assign]

    assert found(Check(prepare=prepare), sample(7, 120))


def test_divided_transactions_are_found() -> None:
    def prepare(kernel: Kernel) -> None:
        kernel._planner._most_elements = 1

    assert found(Check(prepare=prepare), sample(7, 120))


@pytest.mark.parametrize("kind", [ANY, GRANT])
def test_a_lost_row_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pop = PolicyRows.pop_journal
    monkeypatch.setattr(
        PolicyRows, "pop_journal", lambda rows: {row: old for row, old in pop(rows).items() if row[0] != kind}
    )
    assert found(Check(), sample(7, 120))
