# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One canonical text per rule, and the text given to iptables-restore."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.errors import ConfigurationError
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.canonical import (
    canonical_rule,
    target_of,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.rule_parsing import tokens_of
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.tables import (
    PRESENT,
    ChainKey,
    ChainTable,
    ChainTableKey,
    ChainTableValue,
    JumpKey,
    restore_text,
    whole_text,
)
from ansible_collections.kubenode.proxy.plugins.module_utils.resources import Change, difference

CASES = [
    (
        '-m comment --comment "ns1/svc1:p80 cluster IP" -m tcp -p tcp -d 172.30.0.41 --dport 80 ! -s 10.0.0.0/8 -j X',
        '! -s 10.0.0.0/8 -d 172.30.0.41/32 -p tcp -m comment --comment "ns1/svc1:p80 cluster IP" '
        "-m tcp --dport 80 -j X",
    ),
    ("-j MARK --xor-mark 0x00004000", "-j MARK --set-xmark 0x4000/0x0"),
    ("-j MARK --or-mark 0x00004000", "-j MARK --set-xmark 0x4000/0x4000"),
    ("-j MARK --and-mark 0xffffbfff", "-j MARK --set-xmark 0x0/0x4000"),
    ("-j MARK --set-mark 1", "-j MARK --set-xmark 0x1/0xffffffff"),
    ("-m mark ! --mark 0x00004000/0x00004000 -j RETURN", "-m mark ! --mark 0x4000/0x4000 -j RETURN"),
    (
        "-m statistic --mode random --probability 0.3333333333 -j X",
        "-m statistic --mode random --probability 0.33333333349 -j X",
    ),
    (
        "-m recent --name KUBE-SEP-A --rcheck --seconds 10800 --reap -j KUBE-SEP-A",
        "-m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-A --mask 255.255.255.255 --rsource -j KUBE-SEP-A",
    ),
    (
        "-m recent --name KUBE-SEP-A --set -m tcp -p tcp -j DNAT --to-destination 10.0.0.1:80",
        "-p tcp -m recent --set --name KUBE-SEP-A --mask 255.255.255.255 --rsource -m tcp "
        "-j DNAT --to-destination 10.0.0.1:80",
    ),
    ("-j REJECT", "-j REJECT --reject-with icmp-port-unreachable"),
    (
        "-m nfacct --nfacct-name  localhost_nps_accepted_pkts -j X",
        "-m nfacct --nfacct-name localhost_nps_accepted_pkts -j X",
    ),
    ('-m comment --comment "plain" -j X', "-m comment --comment plain -j X"),
    ("-m comment --comment ns1/svc1:p80 -j X", '-m comment --comment "ns1/svc1:p80" -j X'),
    ("-s 0.0.0.0/0 -j X", "-j X"),
    ("! -s 0.0.0.0/0 -j X", "! -s 0.0.0.0/0 -j X"),
    ("-s 10.0.0.0/255.0.0.0 -j X", "-s 10.0.0.0/8 -j X"),
    ("-s ! 10.1.2.3/8 -j X", "! -s 10.0.0.0/8 -j X"),
    ("-p 6 --dport 80 -j X", "-p tcp -m tcp --dport 80 -j X"),
    ("--protocol UDP --destination-port 53 --jump X", "-p udp -m udp --dport 53 -j X"),
    (
        "-m conntrack ! --ctstate DNAT,ESTABLISHED,RELATED -j DROP",
        "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
    ),
    (
        "-s 1.2.3.4 -m ipvs --vaddr 1.2.3.4 --vproto tcp --vport 80 -j DROP",
        "-s 1.2.3.4/32 -m ipvs --vproto 6 --vaddr 1.2.3.4 --vport 80 -j DROP",
    ),
    ("-o eth0 -i eth+ -j X", "-i eth+ -o eth0 -j X"),
    ("-g X", "-g X"),
    ('-m string --string "a b" --algo bm -j X', '-m string --string "a b" --algo bm -j X'),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_canonical_rule(text: str, expected: str) -> None:
    assert canonical_rule(text, "IPv4") == expected
    assert canonical_rule(expected, "IPv4") == expected


def test_canonical_rule_of_ipv6() -> None:
    assert canonical_rule("-d fd00:0::1 -j REJECT", "IPv6") == (
        "-d fd00::1/128 -j REJECT --reject-with icmp6-port-unreachable"
    )
    mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    assert canonical_rule("-m recent --set --name A", "IPv6") == f"-m recent --set --name A --mask {mask} --rsource"


def test_different_rules_stay_different() -> None:
    texts = {canonical_rule(text, "IPv4") for text, _ in CASES}
    assert len(texts) == len({expected for _, expected in CASES})
    assert canonical_rule("-m foo --bar -j X", "IPv4") != canonical_rule("-m foo --baz -j X", "IPv4")


@given(st.text(max_size=80))
def test_any_text_has_a_stable_canonical_form(text: str) -> None:
    once = canonical_rule(text, "IPv4")
    assert canonical_rule(once, "IPv4") == once


@given(st.text(st.characters(blacklist_characters="\n\r\0"), min_size=1, max_size=60))
def test_comments_survive_quoting(text: str) -> None:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    canonical = canonical_rule(f'-m comment --comment "{quoted}" -j X', "IPv4")
    if not text.startswith("-") and text != "!":
        assert text in tokens_of(canonical)


def test_target_of() -> None:
    assert target_of("-j KUBE-SERVICES") == "KUBE-SERVICES"
    assert target_of('-m comment --comment "a -j B" -g C') == "C"
    assert target_of("-p tcp -j DNAT --to-destination 1.2.3.4:80") == "DNAT"
    assert target_of("-m comment --comment x") == ""


def test_target_of_does_not_take_an_option_from_a_quoted_text() -> None:
    assert target_of('-j LOG --log-prefix "x -j TEST y"') == "LOG"
    assert target_of('-i lo -j LOG --log-prefix "x -j TEST "') == "LOG"
    assert target_of('-m comment --comment "see -j TEST now"') == ""
    assert target_of('-m comment --comment "say \\" -j TEST now" -i lo') == ""
    assert target_of("-m comment --comment 'see -g TEST now'") == ""
    assert target_of('-m comment --comment "see -j TEST now" -j REAL -m comment --comment "-g TEST now"') == "REAL"
    assert target_of('-m comment --comment "it\'s -j TEST now" -g REAL') == "REAL"


A, B, C = (ChainKey("nat", name) for name in "ABC")


def test_restore_text_of_a_change() -> None:
    jump = JumpKey("nat", "OUTPUT", "-j A")
    old = JumpKey("nat", "OUTPUT", '-m comment --comment "old one" -j C')
    twice = JumpKey("nat", "PREROUTING", "-j A")
    change: Change[ChainTableKey, ChainTableValue] = Change(
        added={A: ("-j B",), jump: 1, ChainKey("filter", "F"): PRESENT},
        replaced={B: ((), ("-j RETURN",)), twice: (3, 1)},
        removed={C: ("-j A",), old: 1},
    )
    assert restore_text(change).split("\n") == [
        "*filter",
        "-N F",
        "COMMIT",
        "*nat",
        ":C - [0:0]",
        ":B - [0:0]",
        ":A - [0:0]",
        '-D OUTPUT -m comment --comment "old one" -j C',
        "-D PREROUTING -j A",
        "-D PREROUTING -j A",
        "-A B -j RETURN",
        "-A A -j B",
        "-I OUTPUT -j A",
        "-X C",
        "COMMIT",
        "",
    ]
    assert restore_text(Change()) == ""


@pytest.mark.parametrize("rule", ["-j A\nCOMMIT", "-j A\r", "-j A\0"])
def test_line_breaks_never_reach_the_text(rule: str) -> None:
    for table in ({A: (rule,)}, {A: ("-j RETURN", rule)}, {JumpKey("nat", "OUTPUT", rule): 1}):
        with pytest.raises(ConfigurationError):
            whole_text(table)
    with pytest.raises(ConfigurationError):
        whole_text({ChainKey("nat", rule): ()})
    with pytest.raises(ConfigurationError):
        whole_text({ChainKey(rule, "A"): ()})


def apply_to(rules: list[str], lines: list[str]) -> list[str]:
    """Return the rules of chain A after the lines of a restore text."""
    result = list(rules)
    for line in lines:
        command, _, rest = line.partition(" ")
        if command == "-D":
            result.remove(rest.split(" ", 1)[1])
        elif command == "-I":
            _, number, rule = rest.split(" ", 2)
            result.insert(int(number) - 1, rule)
        elif command == "-A":
            result.append(rest.split(" ", 1)[1])
        elif command.startswith(":"):
            result = []
    return result


@given(st.data())
def test_edits_of_a_long_chain_give_the_desired_rules(data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 300), min_size=100, max_size=150)
    old = tuple(f"-s 10.0.{number}.0/24 -j X" for number in sorted(data.draw(numbers)))
    new_rules = list(old)
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(0, len(new_rules) - 1))
        if data.draw(st.booleans()):
            del new_rules[place]
        else:
            new_rules.insert(place, f"-s 10.1.{data.draw(st.integers(0, 200))}.0/24 -j X")
    new = tuple(new_rules)
    table: ChainTable = {A: new}
    text = restore_text(difference({A: old}, table))
    assert tuple(apply_to(list(old), text.split("\n"))) == new


def test_small_change_of_a_long_chain_is_a_small_text() -> None:
    old = tuple(f"-s 10.{number // 250}.{number % 250}.0/24 -j X" for number in range(5000))
    new = (*old[:2500], "-j NEW", *old[2501:])
    text = restore_text(difference({A: old}, {A: new}))
    assert text == f"*nat\n-D A {old[2500]}\n-I A 2501 -j NEW\nCOMMIT\n"
