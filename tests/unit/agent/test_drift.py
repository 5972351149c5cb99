# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Detection of external changes: when contents are read, and which netlink messages wake the agent."""

from __future__ import annotations

import struct

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.agent.drift.polls import PollWatch
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.ipvs.outline import ServersContent
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.netlink.request_tap import changes_filter
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables import legacy_tables
from ansible_collections.kubenode.proxy.plugins.module_utils.kernel.xtables.legacy_tables import LegacyTables

GENERIC, NETFILTER, ROUTE = 16, 12, 0
IPVS, REQUEST, OURS = 28, 1, (4711, 4712)


class Polled:
    """A poll with a settable content, outline and clock."""

    def __init__(self, notified=False, cost=0.0):
        self.content, self.outline, self.now, self.reads, self.cost = b"a", b"7", 100.0, 0, cost
        self.watch = PollWatch(
            "IPVS",
            ["IPv4", "IPv6"],
            read=self.read,
            outline=lambda: self.outline,
            notified=lambda: notified,
            clock=lambda: self.now,
        )
        self.watch.synced(True, True)

    def read(self):
        self.reads += 1
        self.now += self.cost
        return self.content

    def poll(self):
        found = {}
        self.watch.poll(found)
        return sorted(found)


@pytest.mark.parametrize("notified", [False, True])
def test_other_contents_or_numbers_raise_suspicion(notified):
    polled = Polled(notified)
    assert polled.poll() == []
    polled.content = b"b"
    assert polled.poll() == ["IPv4", "IPv6"]
    polled.watch.synced(True, True)
    assert polled.poll() == []
    polled.outline = b"6"
    assert polled.poll() == ["IPv4", "IPv6"]
    polled.watch.synced(False, True)
    assert polled.poll() == []


@pytest.mark.parametrize(("notified", "verified"), [(False, ["IPv4", "IPv6"]), (True, [])])
def test_own_changes_are_verified_later_unless_external_ones_are_reported(notified, verified):
    polled = Polled(notified)
    polled.content, polled.outline = b"c", b"8"
    polled.watch.synced(True, False)
    assert polled.poll() == []
    polled.now += 6
    assert polled.poll() == verified
    polled.watch.synced(False, True)
    polled.now += 600
    assert polled.poll() == []


@pytest.mark.parametrize(
    ("notified", "cost", "reads"), [(False, 0.05, 200), (False, 0.5, 20), (True, 0.01, 10), (True, 0.5, 3)]
)
def test_contents_that_cost_much_to_read_are_read_less_often(notified, cost, reads):
    polled = Polled(notified, cost)
    before = polled.reads
    for _second in range(200):
        polled.poll()
        polled.now += 1.0
    assert 0.75 * reads <= polled.reads - before <= reads + 1


def test_connection_counts_do_not_change_the_content_of_ipvs():
    lines = (
        b"IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n"
        b"TCP  0A600001:0050 rr  \n  -> 0AF40101:1F90      Masq    %d      %d          %d         \n"
    )
    texts = iter([lines % (1, 0, 0), lines % (1, 5, 77), lines % (2, 5, 77)])
    content = ServersContent(lambda: next(texts))
    first, second, third = content(), content(), content()
    assert first == second != third


class Tables:
    """A stand-in for the kernel's tables; ``rules`` are one entry each."""

    def __init__(self):
        self.rules, self.reads = b"rules", 0

    def info(self, _table):
        return struct.pack("=76xII", len(self.rules), 0)

    def digest(self, _table):
        self.reads += 1
        self.now += self.cost
        return self.rules

    def forget(self):
        pass

    def close(self):
        pass


@pytest.fixture
def legacy(monkeypatch):
    kernel = Tables()
    monkeypatch.setattr(legacy_tables, "TableReader", lambda _family: kernel)
    kernel.now, kernel.cost = 100.0, 0.1
    kernel.tables = LegacyTables("IPv4", ["nat"], lambda: kernel.now)
    kernel.tables.synced(None, True)
    kernel.now += 2
    return kernel


def test_another_size_of_a_legacy_table_is_noticed_at_once(legacy):
    assert legacy.tables.changed(False) is False
    legacy.rules = b"more rules"
    assert legacy.tables.changed(False) is True


@pytest.mark.parametrize("lock_used", [False, True])
def test_changed_rules_of_equal_size_are_noticed_with_and_without_the_lock(legacy, lock_used):
    assert legacy.tables.changed(False) is False
    legacy.rules = b"RULES"
    legacy.now += 2 if lock_used else 120
    assert legacy.tables.changed(lock_used) is True


def test_an_external_change_that_needs_no_repair_is_reported_once(legacy):
    assert legacy.tables.changed(False) is False
    for rules in (b"RULES", b"more rules"):
        legacy.rules = rules
        legacy.now += 2
        assert legacy.tables.changed(True) is True
        legacy.tables.synced(None, False)
        legacy.now += 1000.0
        assert legacy.tables.changed(False) is False
        legacy.now += 1000.0
        assert legacy.tables.changed(True) is False


def test_own_changes_of_legacy_tables_are_not_external(legacy):
    legacy.rules = b"RULES and more"
    legacy.tables.synced({"nat": 9}, False)
    for _second in range(119):
        assert legacy.tables.changed(False) is False
        legacy.now += 1
    assert legacy.tables.changed(True) is False


def test_own_changes_in_a_row_read_no_table(legacy):
    reads = legacy.reads
    for number in range(1, 50):
        legacy.rules = b"rules" + b"s" * number
        legacy.tables.synced({"nat": 1}, False)
        assert legacy.tables.changed(False) is False
        legacy.now += 1.0
    assert legacy.reads == reads
    legacy.now += 2.0
    assert legacy.tables.changed(False) is False
    assert legacy.reads == reads + 1


def test_small_tables_are_read_after_each_own_change(legacy):
    legacy.now, legacy.cost = 1000.0, 0.001
    assert legacy.tables.changed(False) is False
    legacy.rules = b"RULES"
    legacy.tables.synced({"nat": 0}, False)
    legacy.rules = b"rULES"
    legacy.now += 1.1
    assert legacy.tables.changed(False) is True


def test_an_external_change_during_an_own_one_is_noticed_by_the_number_of_entries(legacy):
    legacy.rules = b"one rule is missing"[:-1]
    legacy.tables.synced({"nat": 14}, False)
    assert legacy.tables.changed(False) is True
    assert legacy.tables.changed(False) is False


def test_a_use_of_the_lock_after_an_own_change_makes_the_tables_suspect(legacy):
    legacy.rules = b"RULES"
    legacy.tables.synced({"nat": 0}, False)
    legacy.rules = b"rULES"
    assert legacy.tables.changed(True) is True
    legacy.tables.synced(None, False)
    legacy.now += 500
    assert legacy.tables.changed(False) is False


def test_a_change_without_the_lock_before_an_own_one_is_noticed_within_two_minutes(legacy):
    legacy.rules = b"RULES"
    for _second in range(120):
        legacy.tables.synced({"nat": 0}, False)
        assert legacy.tables.changed(False) is False
        legacy.now += 1.0
    assert legacy.tables.changed(False) is True
    legacy.tables.synced(None, False)
    legacy.now += 500.0
    assert legacy.tables.changed(False) is False


def test_a_use_of_the_lock_that_is_still_to_be_looked_into_is_not_forgotten_by_an_own_change(legacy):
    legacy.now += 1000.0
    assert legacy.tables.changed(True) is False
    legacy.rules = b"RULES"
    assert legacy.tables.changed(True) is False
    legacy.tables.synced({"nat": 0}, False)
    legacy.now += 5.0
    assert legacy.tables.changed(False) is True


def test_frequent_uses_of_the_lock_read_large_tables_at_intervals(legacy):
    legacy.cost = 0.5
    legacy.now += 600.0
    assert legacy.tables.changed(True) is False
    reads = legacy.reads
    found = []
    for number in range(100):
        if number == 50:
            legacy.rules = b"RULES"
        found.append(legacy.tables.changed(number < 52))
        legacy.now += 0.1
    assert legacy.reads - reads == 3
    assert found.count(True) == 1


def outcome(program, protocol, message):
    """Return what a classic BPF program returns for a packet, for the instructions that the filter uses."""
    position, value = 0, 0
    while True:
        code, true, false, operand = program[position]
        position += 1
        if code == 0x06:
            return operand
        if code in (0x20, 0x28, 0x30):
            if operand == 0xFFFFF000:
                value = protocol
                continue
            size = {0x20: 4, 0x28: 2, 0x30: 1}[code]
            if operand + size > len(message):
                return 0
            value = int.from_bytes(message[operand : operand + size], "big")
        else:
            position += true if (value == operand if code == 0x15 else value & operand) else false


def message(kind, flags, port, command=0):
    return struct.pack("=IHHIIBBH", 20, kind, flags, 1, port, command, 1, 0)


@pytest.mark.parametrize(
    ("what", "protocol", "packet", "kept"),
    [
        ("add a real server", GENERIC, message(IPVS, REQUEST | 4, 99, 5), True),
        ("flush", GENERIC, message(IPVS, REQUEST | 4, 0, 17), True),
        ("our own", GENERIC, message(IPVS, REQUEST | 4, OURS[0], 5), False),
        ("list virtual servers", GENERIC, message(IPVS, REQUEST | 0x300, 99, 4), False),
        ("request the numbers", GENERIC, message(IPVS, REQUEST, 99, 15), False),
        ("an answer", GENERIC, message(IPVS, 2, 99, 5), False),
        ("another generic family", GENERIC, message(IPVS + 1, REQUEST, 99, 5), False),
        ("the same number in routing netlink", ROUTE, message(IPVS, REQUEST, 99, 5), False),
        ("add to a set", NETFILTER, message(0x609, REQUEST | 4, 0), True),
        ("swap sets", NETFILTER, message(0x606, REQUEST | 4, 0), True),
        ("our own set", NETFILTER, message(0x609, REQUEST | 4, OURS[1]), False),
        ("list sets", NETFILTER, message(0x607, REQUEST | 0x300, 0), False),
        ("nf_tables", NETFILTER, message(0xA06, REQUEST, 0), False),
        ("too short", GENERIC, message(IPVS, REQUEST | 4, 99, 5)[:10], False),
    ],
)
def test_only_requests_of_other_programs_pass_the_filter(what, protocol, packet, kept):
    assert bool(outcome(changes_filter(IPVS, OURS), protocol, packet)) is kept, what
