# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The canonical text of a rule holds every condition of the rule."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.canonical import canonical_rule
from ansible_collections.kubenode.proxy.plugins.module_utils.rendering.iptables.rule_parsing import tokens_of

SET = "-m set --match-set trusted src"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"-p tcp --syn {SET} -j ACCEPT",
            f"-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN {SET} -j ACCEPT",
        ),
        ("-p tcp ! --syn -j DROP", "-p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -j DROP"),
        (f"-p tcp {SET} --syn -j ACCEPT", f"-p tcp {SET} -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -j ACCEPT"),
        (f"-p icmp --icmp-type echo-request {SET} -j X", f"-p icmp -m icmp --icmp-type echo-request {SET} -j X"),
        (f"-p 58 --icmpv6-type 128 {SET} -j X", f"-p ipv6-icmp -m icmp6 --icmpv6-type 128 {SET} -j X"),
        (f"-p esp ! --espspi 1:2 {SET}", f"-p esp -m esp ! --espspi 1:2 {SET}"),
        (f"-f {SET} -j DROP", f"-f {SET} -j DROP"),
        (f"{SET} ! --fragment -p udp -j DROP", f"-p udp ! -f {SET} -j DROP"),
        (
            "-p tcp --dport 80 --sport 1024:65535 --tcp-flags SYN,ACK SYN -j X",
            "-p tcp -m tcp --sport 1024:65535 --dport 80 --tcp-flags SYN,ACK SYN -j X",
        ),
        (
            "-m policy --dir in --pol ipsec --proto esp -p tcp -j ACCEPT",
            "-p tcp -m policy --dir in --pol ipsec --proto esp -j ACCEPT",
        ),
    ],
)
def test_options_of_the_protocol_are_kept(text: str, expected: str) -> None:
    assert canonical_rule(text, "IPv4") == expected
    assert canonical_rule(expected, "IPv4") == expected


@pytest.mark.parametrize(
    "text",
    [
        f"--syn -p tcp {SET} -j ACCEPT",
        f"! -p tcp --syn {SET} -j ACCEPT",
        f"--no-such-option {SET} -j ACCEPT",
        f"--source=10.0.0.1 {SET} -j ACCEPT",
        f"-s 10.0.0.1 -s 10.0.0.2 {SET} -j ACCEPT",
        f"-s 10.0.0.1 10.0.0.2 {SET} -j ACCEPT",
        f"-s ::/0 {SET} -j ACCEPT",
        f"-s example/0 {SET} -j ACCEPT",
        f"-p tcp -p udp {SET} -j ACCEPT",
        f"! ! -i lo {SET} -j ACCEPT",
        f"! -i ! lo {SET} -j ACCEPT",
        f"! {SET} -j ACCEPT",
        f"{SET} ! -j ACCEPT",
        f"{SET} -j ACCEPT !",
        f"{SET} -j ACCEPT at once",
        f"{SET} -j LOG --log-prefix x -j ACCEPT",
        f"{SET} -g X -j ACCEPT",
        f"-f 1 {SET} -j ACCEPT",
        f"-m comment --comment -f {SET} -j ACCEPT",
        f'-m comment --comment "!" {SET} -j ACCEPT',
        f"-m comment --comment -j {SET} -j ACCEPT",
    ],
)
def test_a_rule_that_is_not_parsed_as_a_whole_is_unchanged(text: str) -> None:
    """Iptables has to refuse some of them; without the words that it refuses, they would be broader."""
    assert canonical_rule(text, "IPv4") == text


FRAGMENTS = st.sampled_from(
    (
        *("-s 10.0.0.1/32", "-d 10.0.0.2/32", "-i eth0", "-o eth1", "-f", "-p tcp", "-p udp", "-p icmp", "-p esp"),
        *("--syn", "--tcp-flags SYN,ACK SYN", "--tcp-option 8", "--icmp-type 8", "--dport 80", "--sport 53:54"),
        *("--espspi 7", "--unknown", "--unknown value", "--proto esp", "-m set --match-set trusted src", "-m tcp"),
        *("-m policy --dir in", "-m comment --comment -f", '-m comment --comment "a -j b"', "-m mark --mark 0x1"),
        *("-j ACCEPT", "-j REJECT --reject-with tcp-reset", "-g OTHER", "-j LOG --log-prefix x", "stray", "-4"),
        *("-m recent --set --name A --mask 255.255.255.255 --rsource", "-m conntrack --ctstate NEW"),
    )
)


def said(rule: str) -> Counter[str]:
    """Return the words of a rule, with --syn as iptables prints it and without matches that the protocol implies."""
    words: list[str] = []
    for word in tokens_of(rule):
        words += ["--tcp-flags", "FIN,SYN,RST,ACK", "SYN"] if word == "--syn" else [word]
    return Counter("-p" if word == "--proto" else word for word in words)


@example([("", "-m mark --mark 0x1"), ("", "stray")])
@given(st.lists(st.tuples(st.sampled_from(("", "", "! ")), FRAGMENTS), max_size=7))
def test_no_word_of_a_rule_is_lost(fragments: list[tuple[str, str]]) -> None:
    rule = " ".join(sign + fragment for sign, fragment in fragments)
    canonical = canonical_rule(rule, "IPv4")
    assert not said(rule) - said(canonical)
    added = said(canonical) - said(rule)
    assert set(added) <= {"-m", "tcp", "udp", "icmp", "esp"}
