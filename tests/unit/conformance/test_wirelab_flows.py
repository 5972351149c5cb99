# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsing of flows, and the number of attempts."""

from __future__ import annotations

import pytest

from tests.conformance.wirelab.flows import TRIES_AT_MOST, parse_flow, tries_for


def test_a_transport_flow_has_source_address_target_and_options():
    flow = parse_flow("  udp  client/203.0.113.20 ->  172.18.0.2:30053   sport=41000 gap=0.5 ")
    assert flow.text == "udp client/203.0.113.20 -> 172.18.0.2:30053 sport=41000 gap=0.5"
    assert (flow.kind, flow.host, flow.source) == ("udp", "client", "203.0.113.20")
    assert (flow.destination, flow.port, flow.version, flow.source_port) == ("172.18.0.2", 30053, 4, 41000)
    assert flow.options["gap"] == "0.5"


def test_an_ipv6_target_is_in_brackets():
    flow = parse_flow("tcp pod1 -> [fd00:10:96::101]:80")
    assert (flow.destination, flow.port, flow.version, flow.source) == ("fd00:10:96::101", 80, 6, None)


def test_http_flows_have_a_path():
    flow = parse_flow("http peer -> http://[fd00:172:18::2]:31602/any/path")
    assert (flow.destination, flow.port, flow.path, flow.version) == ("fd00:172:18::2", 31602, "/any/path", 6)
    assert parse_flow("metrics node -> http://127.0.0.1:10249").path == "/"


def test_a_command_keeps_its_blanks_and_its_options_come_last():
    flow = parse_flow("cmd ipvsadm -Sn |  grep 10.96 @only=ipvs")
    assert flow.command == "ipvsadm -Sn |  grep 10.96"
    assert flow.wanted("ipvs")
    assert not flow.wanted("iptables")


@pytest.mark.parametrize(
    "text",
    [
        "tcp pod1 10.96.0.1:80",
        "tcp pod1 -> 10.96.0.1",
        "tcp pod1 -> fd00::1:80",
        "icmp pod1 -> 10.96.0.1:80",
        "http node -> https://1.2.3.4:1/",
        "held",
    ],
)
def test_invalid_flows_are_refused_with_their_text(text):
    with pytest.raises(ValueError, match="flow"):
        parse_flow(text)


@pytest.mark.parametrize(
    ("text", "ordered", "tries"),
    [
        ("tcp pod1 -> 10.96.0.1:80", False, None),
        ("tcp pod1 -> 10.96.0.1:80 tries=3", False, 3),
        ("tcp pod1 -> 10.96.0.1:80 seq", True, 8),
        ("tcp pod1 -> 10.96.0.1:80 open=a", True, 1),
        ("udp pod1 -> 10.96.0.1:80 sport=1234", True, 1),
        ("udp pod1 -> 10.96.0.1:80 sport=1234 tries=5", True, 5),
        ("tcp pod1 -> 10.96.0.1:80 sticky tries=4", True, 4),
        ("held a", True, 8),
    ],
)
def test_order_and_number_of_tries(text, ordered, tries):
    flow = parse_flow(text)
    assert flow.ordered is ordered
    assert flow.fixed_tries == tries


def test_the_option_only_accepts_several_modes():
    flow = parse_flow("tcp pod3 -> 10.96.7.3:80 only=iptables+nftables")
    assert [mode for mode in ("iptables", "nftables", "ipvs") if flow.wanted(mode)] == ["iptables", "nftables"]


def test_enough_tries_to_reach_every_endpoint():
    assert tries_for(1) == 20
    assert tries_for(2) == 35
    # the probability of missing one of n + 1 equally likely endpoints is (n / (n + 1)) ** tries
    assert all((n / (n + 1)) ** tries_for(n) <= 1e-6 for n in (2, 3, 10, 40))
    assert tries_for(10_000) == TRIES_AT_MOST
