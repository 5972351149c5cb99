# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A large change is encoded transaction by transaction, while the earlier ones are sent."""

from __future__ import annotations

import tracemalloc

from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.messages import Encoder
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.nftables.transactions import Planner, Transaction
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.nftables.mode import RENDERING
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import difference
from tests.unit.rendering.nftables.samples import sample_route, sample_settings

ENDPOINTS = 40


def size(transaction: Transaction) -> int:
    """Return the bytes of the messages of a transaction."""
    return sum(len(each.message[2]) for each in transaction.messages)


def test_only_one_transaction_of_a_large_change_is_in_memory() -> None:
    routes = [
        sample_route("IPv4", number, ENDPOINTS, cluster_ip=f"10.96.{number // 250}.{1 + number % 250}")
        for number in range(2000)
    ]
    tables = RENDERING.desired_tables({route.key: route for route in routes}, sample_settings("IPv4"))
    change = difference({}, tables["table objects"])
    encoded = 0
    tracemalloc.start()
    try:
        for transaction in Planner(Encoder("IPv4"), 1000).transactions(change):
            encoded += size(transaction)
        _kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What remains is mostly the order of the elements, by frontend.
    assert encoded > 3_000_000
    assert peak < encoded / 3
