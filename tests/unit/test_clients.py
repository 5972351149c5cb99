# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who is one client, and whose entries are closed at the limit of a table."""

from __future__ import annotations

import collections
import random
import re
from pathlib import Path

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.clients import ClientRule, Shares

ENGINE = Path(__file__).parents[2] / "plugins" / "module_utils"
PODS = ("2001:db8:f::/48", "10.244.0.0/16")
HOARD = [f"2001:db8::{number:x}" for number in range(1, 121)]
PATIENCE = 60.0


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("192.0.2.1", ("192.0.2.1",)),
        ("::ffff:192.0.2.1", ("192.0.2.1",)),
        ("10.244.1.2", ("10.244.1.2",)),
        ("2001:db8:1:2:3:4:5:6", ("2001:db8:1:2::/64", "2001:db8:1:2:3:4:5:6")),
        ("2001:db8:f:1::5", ("2001:db8:f:1::5",)),
        ("fe80::1%eth0", ("fe80::/64", "fe80::1")),
        ("::1", ("::/64", "::1")),
    ],
)
def test_who_is_one_client(address, path):
    rule = ClientRule()
    rule.set_pods(PODS)
    assert rule.path(address) == path


def test_nothing_that_accepts_clients_decides_again_who_is_one():
    """Each file with a listening socket, except for the one that only root can open, uses the shares."""
    accepting = re.compile(r"\.(accept|recvmsg_into)\(")
    for path in ENGINE.rglob("*.py"):
        text = path.read_text()
        if accepting.search(text) and "AF_UNIX" not in text and path.name != "forwarder.py":
            users = (path, path.with_name("connections.py"))
            assert any("clients import" in item.read_text() for item in users if item.exists()), path


class Account:
    """Entries as pairs of address and number, in a table with a limit."""

    def __init__(self, most, pods=(), patience=PATIENCE):
        self.now = 0.0
        self.evicted = []
        self.asked = 0
        self._most = most
        self._patience = patience
        self._active = {}
        rule = ClientRule()
        rule.set_pods(pods)
        self.shares = Shares(rule, self._evict, self._may_yield)

    def _evict(self, item):
        self.evicted.append(item)
        self.shares.remove(item)

    def _may_yield(self, item):
        self.asked += 1
        return self._active[item] <= self.now - self._patience

    def open(self, address):
        self.now += 0.001
        if not self.shares.make_room(address, self._most):
            return False
        item = (address, len(self._active))
        self._active[item] = self.now
        self.shares.add(address, item)
        return True

    def use(self, item):
        self._active[item] = self.now
        self.shares.touch(item)

    def of(self, address):
        return sum(item[0] == address for item in self.shares)


def test_as_long_as_there_is_room_nobody_is_limited():
    account = Account(100)
    assert all(account.open("10.0.0.1") for _number in range(99)) and account.open("10.0.0.2")
    assert not account.evicted


def test_one_host_with_many_ipv6_addresses_is_one_client():
    account = Account(100)
    account.open("2001:db8:9::1")
    assert all(account.open(address) for address in HOARD)
    account.evicted.clear()
    assert all(account.open(f"2001:db8:7:{number:x}::1") for number in range(20))
    assert {address for address, _number in account.evicted} <= set(HOARD) and len(account.evicted) == 20
    assert account.open("2001:db8::ffff") and account.of("2001:db8:9::1") == 1


def test_an_address_has_its_share_of_what_its_network_has():
    account = Account(100)
    assert all(account.open("2001:db8::a") for _number in range(99)) and account.open("2001:db8::b")
    assert all(account.open("2001:db8::c") for _number in range(20))
    assert account.of("2001:db8::a") == 79 and account.of("2001:db8::b") == 1


def test_pods_that_share_a_network_do_not_count_as_one_client():
    """A hundred clients outside get no more than each pod."""
    pods = [f"2001:db8:f:1::{number:x}" for number in range(50)]
    account = Account(100, PODS)
    assert all(account.open(pod) for pod in pods)
    assert sum(account.open(f"2001:db8:0:{number:x}::1") for number in range(100)) == 50
    assert not account.evicted


def test_clients_with_as_many_replace_only_what_has_been_silent():
    account = Account(3)
    for number in range(3):
        assert account.open(f"10.0.0.{number}")
    account.now = PATIENCE
    account.use(("10.0.0.0", 0))
    assert not account.open("10.0.0.1") and not account.open("10.0.0.9")
    account.now = PATIENCE + 0.0025
    assert account.open("10.0.0.9")
    assert account.evicted == [("10.0.0.1", 1)]


def test_a_client_with_the_most_loses_its_own_however_silent_those_of_others_are():
    account = Account(100)
    assert account.open("10.0.0.2") and all(account.open("10.0.0.1") for _number in range(99))
    account.now = 10 * PATIENCE
    account.use(("10.0.0.1", 1))
    assert account.open("10.0.0.1") and account.evicted == [("10.0.0.1", 2)]
    assert Account(0).open("10.0.0.1") is False


def test_without_patience_forged_sources_replace_each_other_and_not_what_was_answered():
    account = Account(100, patience=0.0)
    for number in range(10):
        account.open(f"10.0.1.{number}")
    for item in list(account.shares):
        account.shares.prove(item)
    assert all(account.open(f"10.1.{number >> 8}.{number & 255}") for number in range(1000))
    assert all(account.of(f"10.0.1.{number}") == 1 for number in range(10))


def test_a_refused_client_costs_the_same_however_many_entries_there_are():
    most = 1000
    account = Account(most)
    for number in range(most):
        assert account.open(f"10.1.{number >> 8}.{number & 255}")
    assert not any(account.open("10.0.0.1") for _attempt in range(500))
    assert account.asked <= 500


@pytest.mark.parametrize("seed", range(5))
def test_the_limit_holds_and_only_a_client_with_more_loses_for_another(seed):
    chosen, most = random.Random(seed), 50
    account = Account(most, patience=chosen.choice([0.0, 0.3, PATIENCE]))
    rule = ClientRule()
    addresses = ["10.0.0.1"] * 20 + [f"2001:db8::{number % 7}" for number in range(20)] + ["2001:db8:1::1"] * 3
    addresses += [f"10.0.1.{number}" for number in range(10)]
    for _number in range(2000):
        address = chosen.choice(addresses)
        before = [rule.path(item[0]) for item in account.shares]
        clients = collections.Counter(path[0] for path in before)
        client, evicted = rule.path(address)[0], len(account.evicted)
        admitted = account.open(address)
        assert admitted or clients[client] + 1 >= max(clients.values())
        for loser, _count in account.evicted[evicted:]:
            found = rule.path(loser)[0]
            assert found == client or clients[found] > clients[client]
            if found != client and max(clients.values()) > clients[client] + 1:
                assert clients[found] == max(clients.values())
        assert len(account.shares) == len(set(account.shares)) <= most
        for item in chosen.sample(list(account.shares), min(2, len(account.shares))):
            account.use(item)
            if chosen.random() < 0.2:
                account.shares.remove(item)
            elif chosen.random() < 0.2:
                account.shares.prove(item)
