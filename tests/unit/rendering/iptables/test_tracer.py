# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The tracer itself: matches, targets, order, random choice, and errors for unsupported rules."""

from __future__ import annotations

import pytest

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import (
    ChainKey,
    ChainTable,
    JumpKey,
)

from .tracer import Tracer, UnknownRule

ENTRY = JumpKey("nat", "PREROUTING", "-j START")
NAT = ChainKey("nat", "START")
TO_A = "-p tcp -m tcp -j DNAT --to-destination 10.0.0.1:81"
TO_B = "-p tcp -m tcp -j DNAT --to-destination 10.0.0.2:82"


def table(*rules: str, **more: tuple[str, ...]) -> ChainTable:
    result: ChainTable = {NAT: rules, ENTRY: 1, JumpKey("nat", "OUTPUT", "-j START"): 1}
    for name, chain in more.items():
        result[ChainKey("nat", name)] = chain
    return result


def outcome(*rules: str, source: str = "192.0.2.1", destination: str = "10.1.0.1", **packet: object) -> object:
    tracer = Tracer(table(*rules), local_addresses=("192.0.2.9",))
    return set(tracer.trace(source, destination, 80, **packet))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("match", "hit"),
    [
        ("-s 192.0.2.0/24", True),
        ("! -s 192.0.2.0/24", False),
        ("-d 10.1.0.0/16", True),
        ("-d 10.2.0.0/16", False),
        ("-i eth0", True),
        ("-i eth+", True),
        ("! -i veth+", True),
        ("-i cni0", False),
        ("-p udp -m udp --dport 80", False),
        ("-p tcp -m tcp --dport 81", False),
        ('-p tcp -m comment --comment "any text" -m tcp --dport 80', True),
        ("-m addrtype --src-type LOCAL", False),
        ("-m addrtype ! --src-type LOCAL", True),
        ("-m addrtype --dst-type LOCAL", False),
        ("-m mark --mark 0x4000/0x4000", False),
        ("-m mark ! --mark 0x4000/0x4000", True),
        ("-m conntrack --ctstate NEW", True),
        ("-m conntrack --ctstate RELATED,ESTABLISHED", False),
        ("-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT", True),
        ("-m recent --rcheck --seconds 5 --reap --name X --mask 255.255.255.255 --rsource", False),
        ("-m recent --set --name X --mask 255.255.255.255 --rsource", True),
    ],
)
def test_matches(match: str, hit: bool) -> None:
    assert outcome(f"{match} -j DNAT --to-destination 10.0.0.1:81") == {"10.0.0.1:81" if hit else "-"}


def test_first_rule_wins_and_random_choice_follows_both_branches() -> None:
    assert outcome(TO_A, TO_B) == {"10.0.0.1:81"}
    statistic = "-m statistic --mode random --probability 0.50000000000 -j"
    tracer = Tracer(table(f"{statistic} A", "-j B", A=(TO_A,), B=(TO_B,)))
    assert tracer.trace("192.0.2.1", "10.1.0.1", 80) == {"10.0.0.1:81", "10.0.0.2:82"}


def test_a_chain_that_does_not_decide_returns() -> None:
    tracer = Tracer(table("-j A", "-j B", A=("-j RETURN", TO_A), B=(TO_B,)))
    assert tracer.trace("192.0.2.1", "10.1.0.1", 80) == {"10.0.0.2:82"}


def test_mark_leads_to_masquerading() -> None:
    rules = table("-j MARK --set-xmark 0x4000/0x4000", TO_A)
    rules[ChainKey("nat", "OUT")] = ("-m mark ! --mark 0x4000/0x4000 -j RETURN", "-j MASQUERADE")
    rules[JumpKey("nat", "POSTROUTING", "-j OUT")] = 1
    assert Tracer(rules).trace("192.0.2.1", "10.1.0.1", 80) == {"10.0.0.1:81 +M"}
    rules[NAT] = (TO_A,)
    assert Tracer(rules).trace("192.0.2.1", "10.1.0.1", 80) == {"10.0.0.1:81"}


@pytest.mark.parametrize(
    ("source", "destination", "hook"),
    [
        ("192.0.2.1", "192.0.2.9", "INPUT"),
        ("192.0.2.1", "192.0.2.8", "FORWARD"),
        ("192.0.2.9", "192.0.2.8", "OUTPUT"),
        ("127.0.0.1", "192.0.2.9", "INPUT"),
        ("127.0.0.1", "192.0.2.9", "OUTPUT"),
    ],
)
def test_filter_hooks(source: str, destination: str, hook: str) -> None:
    for name in ("INPUT", "FORWARD", "OUTPUT"):
        rules: ChainTable = {ChainKey("filter", "F"): ("-j DROP",), JumpKey("filter", name, "-j F"): 1}
        dropped = Tracer(rules, ("192.0.2.9",)).trace(source, destination, 80) == {"DROP"}
        passes_both = source == "127.0.0.1" and name in ("INPUT", "OUTPUT")
        assert dropped == (name == hook or passes_both)


@pytest.mark.parametrize("verdict", ["DROP", "REJECT", "ACCEPT"])
def test_verdicts_without_translation(verdict: str) -> None:
    rules: ChainTable = {ChainKey("filter", "F"): (f"-j {verdict}",), JumpKey("filter", "FORWARD", "-j F"): 1}
    assert Tracer(rules).trace("192.0.2.1", "10.1.0.1", 80) == {verdict}


def test_the_last_jump_inserted_comes_first() -> None:
    rules: ChainTable = {ChainKey("nat", "A"): (TO_A,), ChainKey("nat", "B"): (TO_B,)}
    rules[JumpKey("nat", "PREROUTING", "-j A")] = 1
    rules[JumpKey("nat", "PREROUTING", "-j B")] = 1
    assert Tracer(rules).trace("192.0.2.1", "10.1.0.1", 80) == {"10.0.0.2:82"}


@pytest.mark.parametrize("rule", ["-m time --timestart 10:00 -j DROP", "-m addrtype --src-type BLACKHOLE -j DROP"])
def test_unknown_matches_are_refused(rule: str) -> None:
    with pytest.raises(UnknownRule):
        Tracer(table(rule))


def test_a_jump_to_a_missing_chain_is_refused() -> None:
    with pytest.raises(UnknownRule):
        outcome("-j NOWHERE")
