# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What policies keep in memory does not grow with the number of pods that they select."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy import budget, rows, subject_table, values
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.matching import port_unions
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.matching.port_unions import PortUnions
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.matching.ports import PortSet, union
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from tests.unit.networkpolicy.test_refusal_order import attackers, odd, pod, policy, victims


def own_policies(count):
    """Yield pods of which each has a policy of its own, whose port the large policies have, too."""
    yield from attackers(count, lambda _number: [("w", 9_000)], node="node1")
    for number in range(count):
        for direction in ("Ingress", "Egress"):
            name = f"own-{direction.lower()}-{number}"
            yield policy("tenant", name, direction, {"ports": odd(1, 1)}, selector={"i": str(number)})


def large_policies(size=300):
    for number in range(2):
        for direction in ("Ingress", "Egress"):
            ports = [*odd(1 + 2 * size * number, size), *([{"port": "w"}] if direction == "Ingress" else [])]
            yield policy("tenant", f"large-{direction.lower()}-{number}", direction, {"ports": ports})


def made(*items):
    state = ClusterState.from_objects(items)
    assert not state.refusals and not state.skipped
    found = NodePolicy("node1", state.policy)
    state.policy.pop_changes()
    return state, found


def subjects(found):
    return [subject for local in found.local.values() for subject in local.subjects]


def test_equal_ports_for_every_peer_are_one_object():
    _state, found = made(*own_policies(5), *large_policies())
    sets = [subject.any for subject in subjects(found)]
    assert len({subject.key for subject in subjects(found)}) == 10 and {len(ports.ranges) for ports in sets} == {
        600,
        601,
    }
    assert len(set(map(id, sets))) == 2


def test_they_remain_one_object_whatever_is_forgotten_and_are_released(monkeypatch):
    monkeypatch.setattr(port_unions, "MOST_KNOWN_RANGES", 0)
    state, found = made(*own_policies(1), *large_policies())
    before = subjects(found)[0].any
    for item in list(own_policies(4))[1:]:
        state.upsert(item)
        found.update(state.policy.pop_changes())
    assert sum(subject.any is before for subject in subjects(found)) == 4
    for item in own_policies(4):
        state.delete(item)
    found.update(state.policy.pop_changes())
    unions = found._state.subjects.unions
    assert not unions._shared and not found._state._values._by_identity and found._state.subjects.kept == 0


def test_rules_of_subjects_are_not_copied():
    _state, found = made(*own_policies(5), *large_policies())
    rules = [(rule, subject) for subject in subjects(found) for rule in subject._rules if len(rule.ports.ranges) > 1]
    assert len(rules) == 20 and len({id(rule.ports) for rule, _subject in rules}) == 4


def test_a_union_consists_of_the_same_ranges():
    one, other = PortSet(((6, 1, 1), (6, 5, 5))), PortSet(((6, 3, 3), (17, 1, 9)))
    parts = [*one.ranges, *other.ranges]
    assert sorted(map(id, union(parts).ranges)) == sorted(map(id, parts))


def test_what_is_remembered_is_limited_for_all_subjects_together(monkeypatch):
    monkeypatch.setattr(port_unions, "MOST_KNOWN_RANGES", 1_000)
    _state, found = made(*own_policies(20), *large_policies())
    assert 0 < found._state.subjects.unions.ranges <= 1_000 + 601 + 3


def test_a_union_is_computed_once_for_the_same_parts():
    unions, parts = PortUnions(), [PortSet(((6, number, number),)) for number in (1, 5, 9)]
    assert unions.of(parts) is unions.of(list(reversed(parts))) and unions.steps == 3
    assert unions.of(parts[:1]) is parts[0] and unions.steps == 3


def test_unions_for_every_peer_are_steps():
    few, many = (made(*own_policies(5), *large_policies(size))[1].table.steps for size in (100, 200))
    assert many - few >= 5 * 2 * 2 * 100


def test_others_keep_their_policies_if_unions_take_too_many_steps(monkeypatch):
    for module in (rows, budget):
        monkeypatch.setattr(module, "MOST_STEPS", 4_000)
    _state, found = made(*victims(), *own_policies(5), *large_policies())
    assert {key.namespace for key, _direction in found.too_large} == {"tenant"} and found.table.steps <= 4_000


def test_others_keep_their_policies_if_subjects_keep_too_much(monkeypatch):
    for module in (subject_table, budget):
        monkeypatch.setattr(module, "MOST_KEPT", 600)
    rules = [{"ports": odd(1 + 4 * number, 1)} for number in range(100)]
    many = policy("tenant", "many", "Ingress", *rules)
    _state, found = made(*victims(), *own_policies(8), many)
    assert {key.namespace for key, _direction in found.too_large} == {"tenant"}
    assert 0 < found._state.subjects.kept <= 600


@pytest.mark.parametrize("count", [1, 40])
def test_a_large_value_is_compared_once_for_all_classes(count, monkeypatch):
    acquired = []
    acquire = values.IdAllocator.acquire
    monkeypatch.setattr(
        values.IdAllocator,
        "acquire",
        lambda self, value: (acquired.append(value) if isinstance(value, PortSet) else None) or acquire(self, value),
    )
    peers = [{"podSelector": {"matchLabels": {"i": str(number)}}} for number in range(count)]
    made(
        *attackers(count),
        pod("tenant", "target", "10.2.1.1"),
        policy("tenant", "in", "Ingress", {"from": peers, "ports": odd(1, 50)}, selector={"app": "target"}),
    )
    assert len(acquired) == 1
