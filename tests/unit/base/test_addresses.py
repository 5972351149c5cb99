# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Addresses and CIDRs as text."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.kubenode.proxy.plugins.module_utils.base.addresses import (
    IPV4,
    IPV6,
    address_and_port,
    address_bits,
    canonical_address,
    canonical_network,
    family_of,
    packed,
    parse_network,
    port_number,
    split_port,
    unpacked,
    without_brackets,
)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("172.30.0.041", "172.30.0.41"),
        ("000.0.00.010", "0.0.0.10"),
        ("2001:DB8:0:0:0:0:0:1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::", "::"),
        ("::1.2.3.4", "::1.2.3.4"),
    ],
)
def test_addresses_are_read_as_kube_proxy_reads_them(text, canonical):
    assert canonical_address(text) == canonical


NOT_ADDRESSES = [
    "",
    " ",
    "10.0.0",
    "10.0.0.256",
    "10.0.0.1.",
    "1",
    "0x7f.0.0.1",
    "10.0.0.1/8",
    "10.0.0.1 ",
    "10.0.0.1\n",
    "::1%lo",
    ":::",
    "1::2::3",
    "12345::",
    "10.0.0.1\0",
    "\udc80",
    "1.2.3.٤",
    "+1.2.3.4",
    "None",
]


@pytest.mark.parametrize("text", NOT_ADDRESSES)
def test_other_text_is_not_an_address(text):
    assert canonical_address(text) is None and packed(text) is None


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("203.0.113.000/025", "203.0.113.0/25"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("fd00::1/64", "fd00::/64"),
        ("::/0", "::/0"),
        ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
    ],
)
def test_networks(text, canonical):
    assert canonical_network(text) == canonical


@pytest.mark.parametrize(
    "text",
    [
        *(text for text in NOT_ADDRESSES if text != "10.0.0.1/8"),
        "10.0.0.0",
        "10.0.0.0/",
        "10.0.0.0/33",
        "10.0.0.0/-1",
        "fd00::/129",
        "x/8",
        "10.0.0.0/255.0.0.0",
        "10.0.0.0/٨",
        "::ffff:10.0.0.0/95",
        "10.0.0.0/8 ",
        "/8",
    ],
)
def test_other_text_is_not_a_network(text):
    assert canonical_network(text) is None and parse_network(text) is None


@given(st.ip_addresses())
def test_every_address_survives(address):
    if address.version == 6 and address.ipv4_mapped:
        address = address.ipv4_mapped
    text = canonical_address(str(address))
    assert text is not None and ipaddress.ip_address(text) == address
    assert canonical_address(text) == text and unpacked(packed(text) or b"") == text
    assert family_of(text) == (IPV6 if address.version == 6 else IPV4)
    assert address_bits(family_of(text)) == address.max_prefixlen


@given(st.ip_addresses(), st.data())
def test_networks_agree_with_the_standard_library(address, data):
    if address.version == 6 and address.ipv4_mapped:
        return
    length = data.draw(st.integers(0, address.max_prefixlen))
    expected = ipaddress.ip_network(f"{address}/{length}", strict=False)
    network = parse_network(f"{address}/{length}")
    assert network is not None and ipaddress.ip_network(str(network)) == expected
    other = data.draw(st.ip_addresses(v=address.version))
    if address.version == 4 or not other.ipv4_mapped:
        assert network.contains(canonical_address(str(other)) or "") == (other in expected)
    assert network.contains(canonical_address(str(address)) or "")
    assert not network.contains("fd00::1" if address.version == 4 else "10.0.0.1")
    assert not network.contains("x")


@given(st.text(max_size=20))
def test_no_text_raises(text):
    for function in (canonical_address, canonical_network, packed, parse_network, port_number, without_brackets):
        function(text)
    split_port(text, 80)


def test_address_and_port():
    assert address_and_port("10.0.0.1", 80) == "10.0.0.1:80"
    assert address_and_port("fd00::1", 80) == "[fd00::1]:80"


@pytest.mark.parametrize(
    ("text", "port"),
    [("1", 1), ("00080", 80), ("65535", 65535)] + [(text, None) for text in ("", "0", "65536", "+1", "٣")],
)
def test_ports(text, port):
    assert port_number(text) == port


def test_a_number_of_many_digits_is_no_port():
    # Python itself refuses to convert that number of digits (sys.set_int_max_str_digits).
    assert port_number("1" * 5000) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10.0.0.1", ("10.0.0.1", 443)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("fd00::1", ("fd00::1", 443)),
        ("[fd00::1]:80", ("fd00::1", 80)),
        ("api.example.com", ("api.example.com", 443)),
        ("api.example.com:80", ("api.example.com", 80)),
        ("[fd00::1]", None),
        ("10.0.0.1:", None),
        ("10.0.0.1:65536", None),
    ],
)
def test_hosts_with_and_without_a_port(text, found):
    assert split_port(text, 443) == found
