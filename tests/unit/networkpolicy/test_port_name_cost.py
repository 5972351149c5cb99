# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What names of ports cost: they are limited, counted as steps, and computed only where they mean something."""

from __future__ import annotations

import random

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy import budget, rows
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.matching.ports import _divided
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.subjects import Subject
from tests.unit.networkpolicy.test_refusal_order import attackers, names, odd, pod, policy, victims


def named(count, *others):
    return {"ports": [{"port": f"p{number}"} for number in range(count)], **dict(others)}


@pytest.fixture
def evaluated(monkeypatch):
    """Collect the subjects and classes that are evaluated."""
    found = []
    grant = Subject.grant
    monkeypatch.setattr(Subject, "grant", lambda self, content: found.append((self, content)) or grant(self, content))
    return found


@pytest.mark.parametrize("direction", ["Ingress", "Egress"])
def test_a_policy_with_too_many_names_is_refused_by_itself(direction):
    state = ClusterState.from_objects([*victims(), *attackers(2), policy("tenant", "p", direction, named(1_001))])
    ((key, reason),) = NodePolicy("node1", state.policy).too_large.items()
    assert (str(key[0]), key[1], reason) == ("tenant/p", direction, "1001 names of ports, more than 1000")


def test_classes_without_the_name_are_not_evaluated(evaluated):
    others = policy("tenant", "others", "Egress", {"ports": [{"port": "used"}]}, selector={"i": "1"})
    own = policy("tenant", "own", "Egress", *(named(200) for _ in range(3)), selector={"i": "0"})
    state = ClusterState.from_objects(
        [
            *attackers(50, lambda number: [("used", 1 + number)]),
            pod("tenant", "peer", "10.2.1.1", [("p7", 80)]),
            others,
            own,
        ]
    )
    NodePolicy("node1", state.policy)
    assert [{port.name for port in content.ports} for _subject, content in evaluated] == [{"p7"}]


def steps_of_a_new_class(*rules):
    """Return the steps for a new pod whose port no other pod has."""
    pods = attackers(50, lambda number: [("p0", 1 + 2 * number)])
    state = ClusterState.from_objects([*pods, policy("tenant", "p", "Egress", *rules)])
    found = NodePolicy("node1", state.policy)
    state.policy.pop_changes()
    state.upsert(pod("tenant", "more", "10.2.1.1", [("p0", 501)], "node2"))
    found.update(state.policy.pop_changes())
    assert not found.too_large
    return found.table.steps


SELECTED = {"to": [{"podSelector": {}}]}


def test_a_class_costs_the_ports_of_the_peer_and_not_the_names_of_the_policy():
    few, many = (steps_of_a_new_class({**named(count), **SELECTED}) for count in (1, 500))
    assert few == many < 10


def test_rules_that_have_the_name_are_steps():
    one, more = (
        steps_of_a_new_class(*({"ports": [{"port": "p0"}, *odd(1, each)]} for each in range(count)))
        for count in (1, 301)
    )
    assert more - one == 300


def test_the_union_with_ports_by_number_is_steps():
    few, many = (steps_of_a_new_class({"ports": [{"port": "p0"}, *odd(1001, count)], **SELECTED}) for count in (1, 900))
    assert many - few == 899 + 901 // 8, "computed, and compared with others"


@pytest.mark.parametrize("direction", ["Ingress", "Egress"])
def test_others_keep_their_policies_if_names_take_too_many_steps(direction, monkeypatch):
    monkeypatch.setattr(rows, "MOST_STEPS", 4_000)
    monkeypatch.setattr(budget, "MOST_STEPS", 4_000)
    rules = [{"ports": [{"port": "p0"}, *odd(1, each)]} for each in range(900)]
    hostile = [policy("tenant", f"p{number}", direction, *rules) for number in range(2)]
    pods = attackers(10, lambda number: [("p0", 1 + 2 * number)], node="node1")
    found = NodePolicy("node1", ClusterState.from_objects([*victims(), *pods, *hostile]).policy)
    assert found.too_large and {key.namespace for key, _direction in found.too_large} == {"tenant"}
    assert found.table.steps <= 4_000


def test_progress_is_reported_between_evaluations_and_while_policies_are_chosen(evaluated):
    state = ClusterState.from_objects([*victims(), *names({}, "Egress")()])
    calls = []
    found = NodePolicy("node1", state.policy, most_rows=2_000, progress=lambda: calls.append(len(evaluated)))
    assert found.choices == 1 and set(calls) >= set(range(1, len(evaluated)))
    assert max(calls.count(number) for number in set(calls)) > len(state.policy.pods), "compiling and classifying also"


def test_ports_are_divided_as_if_one_by_one():
    chosen = random.Random(3)

    def some():
        bounds = sorted(chosen.sample(range(60), 2 * chosen.randrange(8)))
        return list(zip(bounds[::2], bounds[1::2]))

    def members(ranges):
        return [port for first, last in ranges for port in range(first, last + 1)]

    for _round in range(500):
        ranges, wanted = some(), some()
        inside, outside = map(members, _divided(ranges, wanted))
        assert inside == [port for port in members(ranges) if port in members(wanted)]
        assert outside == [port for port in members(ranges) if port not in members(wanted)]


class _Steps(list[tuple[int, int]]):
    """Ranges that count how often one of them is read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_many_ranges_are_divided_in_linear_steps():
    wanted = _Steps((number, number) for number in range(1, 60_000, 2))
    _divided([(number, number) for number in range(0, 60_000, 2)], wanted)
    assert wanted.reads < 4 * 30_000
