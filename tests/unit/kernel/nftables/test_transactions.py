# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Division of many sets, chains and rules into transactions, as session affinity needs them."""

from __future__ import annotations

from typing import Any

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables import messages
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.messages import Encoder
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Planner, Transaction
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.unit.rendering.nftables.samples import sample_route, sample_settings

ENDPOINTS = 10


def table(services: int) -> dict[Any, Any]:
    """Return the table of a number of Services with session affinity."""
    routes = [sample_route("IPv4", 1 + number, ENDPOINTS, affinity_seconds=60) for number in range(services)]
    return RENDERING.desired_tables({route.key: route for route in routes}, sample_settings("IPv4"))["table objects"]


def labels(transaction: Transaction, kind: int) -> list[str]:
    return [each.label for each in transaction.messages if each.message[0] == kind]


def count(transactions: list[Transaction], kind: int) -> list[int]:
    """Return the messages of a kind in each transaction that has any."""
    return [found for found in (len(labels(each, kind)) for each in transactions) if found]


def test_many_sets_and_rules_are_created_in_portions() -> None:
    """Creating a set takes longer, the more sets there are, so that 17,600 in one transaction took the kernel 28 s."""
    desired = table(200)
    transactions = list(Planner(Encoder("IPv4")).transactions(difference({}, desired)))
    # Of 2,000 sets each counts as eleven elements, and each rule as six.
    assert max(count(transactions, messages.NEW_SET)) <= 10_000 // 11 + 1
    assert max(count(transactions, messages.NEW_RULE)) <= 10_000 // 6 + 2 * ENDPOINTS
    every = [label for each in transactions for label in labels(each, messages.NEW_SET)]
    assert len(every) == len(set(every)) == sum(key.kind == "set" for key in desired)


def test_the_costs_of_sets_and_rules_count_without_any_element() -> None:
    desired = {key: value for key, value in table(200).items() if key.kind != "element"}
    assert len(list(Planner(Encoder("IPv4")).transactions(difference({}, desired)))) > 2


def test_many_sets_are_removed_in_portions_in_the_order_of_their_creation() -> None:
    """The kernel searches all sets before the removed one, and sets removed by the same transaction as well."""
    before, after = table(200), table(1)
    transactions = list(Planner(Encoder("IPv4")).transactions(difference(before, after)))
    assert max(count(transactions, messages.DELETE_SET)) <= 500
    removed = [label for each in transactions for label in labels(each, messages.DELETE_SET)]
    created = [key.name for key in before if key.kind == "set" and key not in after]
    assert removed == [f"set {name} to be removed" for name in created]
    flushed = max(place for place, each in enumerate(transactions) if labels(each, messages.DELETE_RULE))
    assert flushed <= min(place for place, each in enumerate(transactions) if labels(each, messages.DELETE_SET))
