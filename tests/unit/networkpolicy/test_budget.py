# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All policies together have a budget: those beyond it are refused by name, and their pods stay isolated."""

from __future__ import annotations

import random

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.model import NamespacedName
from ansible_collections.kubenode.proxy.plugins.module_utils.cluster.state import ClusterState
from ansible_collections.kubenode.proxy.plugins.module_utils.convergence.policy import annotation_warnings
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.node_policy import NodePolicy
from ansible_collections.kubenode.proxy.plugins.module_utils.networkpolicy.rows import _BOUNDED
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.elements import (
    change_of,
    desired_table,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.networkpolicy.sets import Options
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.netpol.interpreter import Interpreter
from tests.netpol.oracle import Packet

MOST = 3_000
OPTIONS = Options()


def pod(namespace, name, address):
    return {
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {"app": name}},
        "spec": {"nodeName": "node1"},
        "status": {"phase": "Running", "podIPs": [{"ip": address}]},
    }


def policy(namespace, name, ranges, port, selector=None):
    rule = {"from": [{"ipBlock": {"cidr": text}} for text in ranges], "ports": [{"port": port}]}
    return {
        "kind": "NetworkPolicy",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"podSelector": selector or {}, "policyTypes": ["Ingress"], "ingress": [rule]},
    }


def multiplying(count):
    """Return small policies of one tenant whose ranges divide each other into thousands of classes."""
    chosen = random.Random(5)
    return [
        policy(
            "tenant",
            f"p{number:02}",
            [f"{chosen.randrange(1, 190)}.{chosen.randrange(256)}.0.0/{chosen.choice((8, 12, 16))}" for _ in range(12)],
            1000 + number,
        )
        for number in range(count)
    ]


#: A policy of many ranges that needs few elements, and one that matches every address.
OTHERS = [
    policy("shop", "blocklist", [f"198.{number >> 8}.{number & 255}.0/28" for number in range(400)], 443),
    policy("shop", "anywhere", ["0.0.0.0/0"], 80),
]
PODS = [
    *(pod("tenant", f"t{number}", f"10.244.1.{number}") for number in range(1, 11)),
    *(pod("shop", f"s{number}", f"10.244.1.{100 + number}") for number in range(1, 6)),
]


def made(*items, most=MOST):
    state = ClusterState.from_objects([*PODS, *items])
    assert not state.refusals
    found = NodePolicy("node1", state.policy, most_rows=most)
    state.policy.pop_changes()
    found.table.pop_journal()
    return state, found


def allowed(found, destination, port, source="198.0.7.1"):
    return Interpreter(desired_table(found.table.rows, OPTIONS)).allowed(Packet(source, destination, "tcp", port))


def follow(state, found, before, *events):
    """Apply events as an agent does, and check that the updated table equals the one of the rows."""
    for item, gone in events:
        state.delete(item) if gone else state.upsert(item)
    found.update(state.policy.pop_changes())
    change = change_of(found.table.pop_journal(), found.table.rows, OPTIONS)
    table = desired_table(found.table.rows, OPTIONS)
    assert change == difference(before, table)
    return table


def test_policies_that_multiply_are_refused_by_name_and_others_are_kept():
    hostile = multiplying(40)
    _state, found = made(*hostile, *OTHERS)
    bounded = [row for row in found.table.rows if row[0] not in ("isolated", "policed", "self", "class")]
    assert len(bounded) <= MOST
    refused = {key for key, _direction in found.too_large}
    assert refused and {key.namespace for key in refused} == {"tenant"}
    assert 0 < len(refused) < len(hostile), "as many as fit are kept"
    lines = annotation_warnings(found)
    assert (
        len(lines) == min(len(refused), 21)
        and f"NetworkPolicy {min(refused)}: spec.ingress: allows nothing" in lines[0]
    )
    assert allowed(found, "10.244.1.101", 443) and allowed(found, "10.244.1.105", 80)
    assert not allowed(found, "10.244.1.101", 22)
    for number in range(1000, 1040):
        name = NamespacedName("tenant", f"p{number - 1000:02}")
        source = hostile[number - 1000]["spec"]["ingress"][0]["from"][0]["ipBlock"]["cidr"].partition("/")[0]
        assert allowed(found, "10.244.1.3", number, source) == (name not in refused)


def test_the_choice_is_the_same_in_every_run_and_any_order():
    items = [*multiplying(40), *OTHERS]
    _state, first = made(*items)
    _state, second = made(*reversed(items))
    assert first.too_large == second.too_large and first.table.rows == second.table.rows


def test_with_enough_room_nothing_is_refused():
    _state, found = made(*multiplying(40), *OTHERS, most=1_000_000)
    assert found.too_large == {} and annotation_warnings(found) == []


@pytest.fixture
def full():
    """Provide a node with policies that just fit."""
    fits = 1
    while made(*multiplying(fits + 1), *OTHERS)[1].too_large == {}:
        fits += 1
    state, found = made(*multiplying(fits), *OTHERS)
    return state, found, multiplying(fits + 3)[fits:]


def test_a_policy_beyond_the_budget_is_refused_and_admitted_later(full):
    state, found, more = full
    table = desired_table(found.table.rows, OPTIONS)
    assert found.too_large == {}
    table = follow(state, found, table, (more[0], False), (more[1], False))
    refused = {key for key, _direction in found.too_large}
    assert refused == {NamespacedName("tenant", item["metadata"]["name"]) for item in more[:2]}
    assert not allowed(found, "10.244.1.3", more[0]["spec"]["ingress"][0]["ports"][0]["port"])
    # A pod added now is isolated like the others.
    table = follow(state, found, table, (pod("tenant", "late", "10.244.1.50"), False))
    assert not allowed(found, "10.244.1.50", 22) and allowed(found, "10.244.1.101", 443)
    refused = {key for key, _direction in found.too_large}
    kept = [item for item in multiplying(20) if NamespacedName("tenant", item["metadata"]["name"]) not in refused]
    follow(state, found, table, *((item, True) for item in kept[:12]))
    assert refused and {key for key, _direction in found.too_large} == refused, "until the choice is made again"
    found.reconsider()
    assert found.too_large == {} and found.table.rows == NodePolicy("node1", state.policy, most_rows=MOST).table.rows


def test_policies_that_fit_and_those_without_pods_here_are_not_refused_with_one_that_does_not(full):
    state, found, more = full
    small = policy("shop", "small", ["192.0.2.0/24"], 8443)
    elsewhere = policy("other", "elsewhere", ["192.0.2.0/24"], 1)
    table = desired_table(found.table.rows, OPTIONS)
    follow(state, found, table, (more[0], False), (small, False), (elsewhere, False))
    assert {str(key) for key, _direction in found.too_large} == {f"tenant/{more[0]['metadata']['name']}"}
    assert found.is_provisional and allowed(found, "10.244.1.101", 8443, "192.0.2.1")
    assert not allowed(found, "10.244.1.101", 8443)


def small_change():
    """Return a node whose table has no room at all, after a change of a small policy."""
    items = [*multiplying(20), *OTHERS]
    rows = made(*items, most=1_000_000)[1].table.rows
    state, found = made(*items, most=sum(row[0] in _BOUNDED for row in rows))
    assert found.too_large == {}
    state.upsert(policy("shop", "anywhere", ["0.0.0.0/0"], 81))
    state.upsert(policy("shop", "more", ["192.0.2.0/24", "203.0.113.0/24"], 8443))
    return state, found


def refused_namespaces(found):
    return {key.namespace for key, _direction in found.too_large}


def test_a_policy_that_changed_last_is_refused_only_until_the_next_choice():
    state, found = small_change()
    found.update(state.policy.pop_changes())
    assert found.is_provisional and refused_namespaces(found) == {"shop"}
    assert allowed(found, "10.244.1.101", 81), "what fits is in force"
    found.reconsider()
    assert not found.is_provisional and refused_namespaces(found) == {"tenant"}
    assert allowed(found, "10.244.1.101", 81) and allowed(found, "10.244.1.101", 8443, "192.0.2.1")


def test_a_policy_that_changed_last_is_not_refused_where_the_choice_may_take_its_time():
    state, found = small_change()
    found.update(state.policy.pop_changes(), choose=True)
    assert not found.is_provisional and refused_namespaces(found) == {"tenant"}
    assert allowed(found, "10.244.1.101", 81) and allowed(found, "10.244.1.101", 8443, "192.0.2.1")


def test_pods_beyond_the_budget_are_isolated(full):
    state, found, _more = full
    table = desired_table(found.table.rows, OPTIONS)
    follow(state, found, table, *((pod("tenant", f"n{n}", f"10.244.1.{n}"), False) for n in range(40, 60)))
    assert {key.namespace for key, _direction in found.too_large} == {"tenant"}
    assert all(not allowed(found, f"10.244.1.{number}", 22) for number in (3, 45))
    assert allowed(found, "10.244.1.101", 443)
    follow(
        state,
        found,
        desired_table(found.table.rows, OPTIONS),
        *((policy("tenant", key.name, ["192.0.2.0/24"], 1), True) for key, _direction in list(found.too_large)),
    )
    assert found.too_large == {}, "policies that are gone are not named"


def test_after_a_choice_new_pods_cause_no_other_choice(monkeypatch):
    state, found = made(*multiplying(40), *OTHERS, most=5_000)
    assert found.too_large
    searches = []
    monkeypatch.setattr(NodePolicy, "_search", lambda _self: searches.append(True))
    for number in range(3):
        state.upsert(pod("shop", f"more{number}", f"10.244.1.{120 + number}"))
        found.update(state.policy.pop_changes())
    assert searches == []
