# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""IPv6 counterparts of addresses, flows and recordings."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from tests.conformance.wirelab import translation
from tests.conformance.wirelab.addressing import CLIENT_PREFIX, NODE, PEERS, SERVICE_CIDR, holder
from tests.conformance.wirelab.cases import find_cases, load_case
from tests.conformance.wirelab.twins import make_twin, twins

CONFORMANCE = Path(__file__).resolve().parent.parent.parent / "conformance"
CASES = CONFORMANCE / "cases"


@pytest.mark.parametrize(
    ("ipv4", "ipv6"),
    [
        ("10.96.1.1", "fd00:10:96::101"),
        ("10.96.14.5", "fd00:10:96::e05"),
        ("10.111.255.1", "fd00:10:96::ffe1"),
        ("10.244.2.250", "fd00:10:244:2::250"),
        ("203.0.113.200", "2001:db8:113::200"),
        ("198.51.100.7", "2001:db8:51::7"),
        ("127.0.0.1", "::1"),
    ],
)
def test_addresses(ipv4, ipv6):
    assert translation.address(ipv4) == ipv6


def test_hosts_of_the_lab_keep_their_place():
    assert translation.address(NODE[4]) == NODE[6]
    assert translation.address(CLIENT_PREFIX[4] + "10") == CLIENT_PREFIX[6] + "10"
    for peer in PEERS.values():
        assert translation.address(peer.address[4]) == peer.address[6]
        assert translation.network(peer.pod_network[4]) == peer.pod_network[6]
    assert holder(translation.address("10.244.1.12")) == "pod2"
    assert holder(translation.address("10.244.3.99")) == "peer3"


def test_networks_and_addresses_without_a_counterpart():
    assert translation.network("10.244.0.0/16") == "fd00:10:244::/48"
    assert translation.network("203.0.113.20/32") == "2001:db8:113::20/128"
    for unknown in ("203.0.113.0/28", "192.168.0.0/24"):
        with pytest.raises(translation.Untranslatable):
            translation.network(unknown)
    with pytest.raises(translation.Untranslatable):
        translation.address("192.168.0.1")


@pytest.mark.parametrize(
    ("ipv4", "ipv6"),
    [
        (
            "tcp client/203.0.113.20 -> 198.51.100.10:80 seq",
            "tcp client/2001:db8:113::20 -> [2001:db8:51::10]:80 seq",
        ),
        ("10.244.1.11:8080 from 10.244.1.1", "[fd00:10:244:1::11]:8080 from fd00:10:244:1::1"),
        ("outside from 203.0.113.10", "outside from 2001:db8:113::10"),
        ("reject icmp 3/3", "reject icmp6 1/4"),
        ("http node -> http://172.18.0.2:31601/healthz", "http node -> http://[fd00:172:18::2]:31601/healthz"),
        ("-A MINE -s 192.0.2.254/32 -j DROP", "-A MINE -s 2001:db8:2::254/128 -j DROP"),
    ],
)
def test_text(ipv4, ipv6):
    assert translation.text(ipv4) == ipv6


def test_content_translates_whole_values_and_repeats_nothing():
    given = {
        "cidrs": [SERVICE_CIDR[4], SERVICE_CIDR[6]],
        "family": "IPv4",
        "name": "a-v4",
        "ranges": [" 203.0.113.20/32"],
        "port": 80,
    }
    assert translation.content(given) == {
        "cidrs": [SERVICE_CIDR[6]],
        "family": "IPv6",
        "name": "a-v4",
        "ranges": [" 2001:db8:113::20/128"],
        "port": 80,
    }


def test_no_ipv4_address_is_left_in_an_ipv6_twin():
    for twin in twins(find_cases([str(CASES)], ["*"]), "ipv6"):
        for step in twin.expected(twin.modes[0]):
            for result in step["flows"]:
                if not result["flow"].startswith("cmd "):
                    assert not any(_is_ipv4(word) for word in str(result).replace(":", " ").split())
        for snapshot in twin.snapshots():
            for item in snapshot:
                if item["kind"] == "Service":
                    assert all(ipaddress.ip_address(ip).version == 6 for ip in _addresses(item)), twin.name


def _addresses(item):
    found = [ip for ip in item["spec"].get("clusterIPs", []) if ip not in ("", "None")]
    found += item["spec"].get("externalIPs", [])
    ingress = item["status"].get("loadBalancer", {}).get("ingress") or []
    return found + [entry["ip"] for entry in ingress if "ip" in entry]


def _is_ipv4(word):
    try:
        return ipaddress.ip_address(word.strip("'\",[]{}")).version == 4
    except ValueError:
        return False


def test_distinct_addresses_stay_distinct_in_every_case():
    for case in find_cases([str(CASES), str(CONFORMANCE / "cases-extra")], ["*"]):
        if tuple(case.families) != (4,):
            continue
        addresses = {
            ip
            for snapshot in case.snapshots()
            for item in snapshot
            if item["kind"] == "Service"
            for ip in _addresses(item)
            if not ip.startswith("10.250")
        }
        assert len({translation.address(ip) for ip in addresses}) == len(addresses), case.name


def test_a_dual_stack_twin_has_both():
    case = load_case(str(CASES / "open-connection-terminating"))
    twin = make_twin(case, "dual")
    assert tuple(twin.families) == (4, 6)
    (first, *_), (original, *_) = twin.expected("iptables"), case.expected("iptables")
    assert first["flows"][: len(original["flows"])] == original["flows"]
    assert len(first["flows"]) == 2 * len(original["flows"])
    assert {"held a", "held a-ipv6"} <= {flow.text for step in twin.steps for flow in step.flows}
    for snapshot in twin.snapshots():
        for item in snapshot:
            if item["kind"] == "Service":
                assert item["spec"]["ipFamilies"] == ["IPv4", "IPv6"]
                assert len(item["spec"]["clusterIPs"]) == 2
        kinds = [item["addressType"] for item in snapshot if item["kind"] == "EndpointSlice"]
        assert kinds.count("IPv4") == kinds.count("IPv6")


def test_only_ipv4_cases_have_twins():
    names = {twin.name for twin in twins(find_cases([str(CASES)], ["clusterip-basic", "hairpin"]), "ipv6")}
    assert names == {"hairpin.ipv6"}
